"""Foreign task sources, made to speak the unified description."""
