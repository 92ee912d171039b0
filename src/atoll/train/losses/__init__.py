"""Losses, one number a sample."""
