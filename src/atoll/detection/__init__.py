"""Detectors of bad clients by their updates, one file for each."""
