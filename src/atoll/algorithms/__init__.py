"""Algorithms: how clients train and how the server steps, one file for each."""
