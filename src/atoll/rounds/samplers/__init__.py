"""Samplers: how the clients of a round are chosen, one file for each."""
