"""Policies: when tasks are sent and when a round is committed; samplers and devices in the folders below."""
