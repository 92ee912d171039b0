"""The red team: how much probes got out of a plan."""
