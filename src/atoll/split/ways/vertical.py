"""Vertical learning: parties that hold different columns of the same rows."""

from __future__ import annotations

from atoll.split.way import Way


def vertical() -> Way:
    """Let parties train bottom models on their columns, below a top model at the server (Liu et al. 2024, TKDE 36(7)).

    Every party sends its activations of each batch, which the server lays side by side. Nothing is averaged: a round is
    the ordinary loop over the batches of the party that holds the labels, on the model that all sides make up.
    """
    return Way(hands_on=False, own_server=False, columns=True)
