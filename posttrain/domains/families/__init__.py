"""Families of domains that are generated here."""
