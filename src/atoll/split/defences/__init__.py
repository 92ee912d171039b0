"""Defences of split learning: what parties do to what leaves them, one file for each."""
