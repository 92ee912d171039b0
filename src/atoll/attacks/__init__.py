"""Attacks: what bad clients do to their data or updates, one file for each."""
