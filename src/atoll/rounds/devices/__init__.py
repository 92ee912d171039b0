"""Populations of devices, in simulated time."""
