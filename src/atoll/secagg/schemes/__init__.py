"""Schemes of secure aggregation, one file each."""
