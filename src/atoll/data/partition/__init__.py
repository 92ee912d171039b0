"""Partitions: rules that assign training samples to clients, one file for each."""
