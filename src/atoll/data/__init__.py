"""Data sets, and how their samples are assigned to clients."""
