"""Measurements: one module a name, each with `main(quick: bool) -> dict`."""
