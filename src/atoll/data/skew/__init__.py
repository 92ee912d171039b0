"""Skews: changes of features, labels or sizes that differ between clients, one file for each."""
