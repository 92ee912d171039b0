"""The client of a federation."""
