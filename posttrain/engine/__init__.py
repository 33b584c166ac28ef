"""Tokens in, tokens out: models, sampling, and the one compute thread that owns the device."""
