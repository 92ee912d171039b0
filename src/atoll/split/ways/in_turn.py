"""Split learning, one client after another."""

from __future__ import annotations

from atoll.split.way import Way


def in_turn() -> Way:
    """Let clients train in turn, each from the layers of the one before (Gupta and Raskar 2018, arXiv:1810.06060).

    A client does the whole task of a round before the next one begins. There is one set of server-side layers, and
    nothing is averaged: a round of several clients is the ordinary loop over the batches of one client after another.
    """
    return Way(hands_on=True, own_server=False)
