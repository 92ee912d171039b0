"""Figure of the contribution of each client. Shapes: C clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll.report.figures import INK, PALETTE, new_figure, plot_style
from atoll.report.reading import RunRecord, contributions, dig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NAMED = 60
"""Maximum number of clients whose numbers fit below their bars."""


def gain_text(record: RunRecord) -> str:
    """Return the name of the gain that is divided among clients."""
    names = {"loss": "fall of the loss", "accuracy": "gain in accuracy"}
    return names.get(str(dig(record.rows[-1], "contribution.utility")), "gain")


def contribution_picture(record: RunRecord) -> Figure:
    """Draw the total contribution of each client, from least to most; harmful clients have bars below 0."""
    totals = sorted(contributions(record).items(), key=lambda item: (item[1], item[0]))
    names, share_C = [name for name, _ in totals], np.array([share for _, share in totals])
    C = len(names)
    with plot_style():
        figure = new_figure(10.5, 3.6)
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
