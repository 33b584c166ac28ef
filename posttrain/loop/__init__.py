"""The closed loop: what to do next, given what happened."""
