"""Where data come from, checksummed."""
