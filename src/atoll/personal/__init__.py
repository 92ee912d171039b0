"""Comparison of algorithms that give clients models of their own with training alone and with one model for all."""
