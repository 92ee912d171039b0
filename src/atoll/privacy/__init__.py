"""Differential privacy: mechanisms, noise, accounting, the ledger of what was spent, and its audit."""
