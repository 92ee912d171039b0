"""A picture of what each client added to the model. Shapes: C clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll.report.figures import INK, PALETTE, _figure, _style
from atoll.report.reading import RunRecord, contributions, dig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 60
"""So many clients fit their numbers below their bars."""


def gain_text(record: RunRecord) -> str:
    """What was shared out."""
    named = {"loss": "fall of the loss", "accuracy": "gain in accuracy"}
    return named.get(str(dig(record.rows[-1], "contribution.utility")), "gain")


def contribution_picture(record: RunRecord) -> Figure:
    """What each client has added over the rounds, from least to most; bars below 0 are those who did harm."""
    totals = sorted(contributions(record).items(), key=lambda item: (item[1], item[0]))
    names, share_C = [name for name, _ in totals], np.array([share for _, share in totals])
    C = len(names)
    with _style():
        figure = _figure(10.5, 3.6)
        panel = figure.subplots()
        colours = [PALETTE[1] if share < 0 else PALETTE[0] for share in share_C]
        panel.bar(range(C), share_C, width=0.82 if C <= 120 else 1.0, color=colours, lw=0)
        panel.axhline(0, color=INK, lw=0.8)
        panel.set_title(f"Contribution of {C:,} client{'s' * (C != 1)} over {len(record.rows):,} rounds")
        panel.set(xlabel="client, from least to most", ylabel=gain_text(record), xlim=(-0.6, C - 0.4))
        panel.set_xticks(range(C) if C <= MOST_NAMED else [], names if C <= MOST_NAMED else [])
        panel.grid(axis="y")
        panel.tick_params(length=0, axis="both")
        if C > 25:
            panel.tick_params(axis="x", labelsize=7)
    return figure
