"""Aggregators: rules that combine the updates of a cohort into one, one file for each."""
