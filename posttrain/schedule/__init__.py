"""Who goes next, and how much."""
