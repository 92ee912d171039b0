"""Whom the server trusts: one small file a way of telling."""
