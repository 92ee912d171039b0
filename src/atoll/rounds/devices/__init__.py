"""Populations of simulated devices, one file for each."""
