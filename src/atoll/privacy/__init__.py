"""Differential privacy: mechanisms, noise, accounting, the ledger of charged attempts, and audits."""
