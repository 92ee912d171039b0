"""Probes: attacks on privacy by somebody who sees what the server sees; one small file each."""
