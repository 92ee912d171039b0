"""Joining records of parties by private set intersection: machines without I/O, and who learns what."""
