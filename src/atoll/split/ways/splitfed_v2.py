"""The second version of SplitFed."""

from __future__ import annotations

from atoll.split.way import Way


def splitfed_v2() -> Way:
    """Let clients train at once on the same server-side layers (Thapa et al. 2022, arXiv:2004.12088).

    The server takes a batch of each client, in an order that is drawn for every step, and a step after each. The
    clients' layers are averaged by the number of samples at the end of a round.
    """
    return Way(hands_on=False, own_server=False)
