"""The words every part shares. Standard library only (pydantic in `config`)."""
