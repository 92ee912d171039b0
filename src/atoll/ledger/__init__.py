"""A tamper-evident record of every commit, and its offline verifier."""
