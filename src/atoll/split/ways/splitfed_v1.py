"""The first version of SplitFed."""

from __future__ import annotations

from atoll.split.way import Way


def splitfed_v1() -> Way:
    """Let clients train at once, each with server-side layers of its own (Thapa et al. 2022, arXiv:2004.12088).

    Both sides are averaged by the number of samples at the end of a round, so that the model is that of FedAvg.
    """
    return Way(hands_on=False, own_server=True)
