"""Sweeps: grids and searches over the settings of a plan."""
