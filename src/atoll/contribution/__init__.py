"""Measures of each client's contribution, one file for each."""
