"""Picture of personal methods: the mean of each, and how each client fares against alone. Shapes: C dots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.report.figures import INK, LINE, MUTED, PALETTE, Array, new_figure, plain, plot_style
from atoll.report.main_figure import SHARES, title_of
from atoll.report.personal import ALONE, GLOBAL, PersonalTable, Row
from atoll.report.spread import Spread, figure_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.46
"""Height of a row in inches."""
BETTER, WORSE = PALETTE[2], PALETTE[1]
MOST_DOTS = 6000
"""Dots that are drawn one by one; more become part of an image."""
PANEL = 5.2
"""Width of the panel of dots in inches, about."""
FILLED = 0.76
"""Share of a row's height that dots may fill."""


def personal_picture(table: PersonalTable) -> Figure:
    """Draw the mean of each method as a bar, and a dot for each client and seed: its gain over training alone."""
    methods = table.ranked()
    with plot_style():
        from matplotlib.ticker import PercentFormatter

        figure = new_figure(10.5, ROW * len(methods) + 1.6)
        bars, dots = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.7))
        rows = {method: row for method in methods if (row := table.row(method)) is not None}
        _draw_bars(bars, table, rows)
        gains = {method: np.concatenate([table.gains(run) for run in table.done(method)]) for method in methods}
        _draw_dots(dots, gains)
        share, name = table.metric in SHARES, title_of(table.metric)
        if share:
            bars.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
            dots.xaxis.set_major_formatter(lambda value, place: f"{100 * value:+.0f}" if value else "0")
        bars.set_title(f"{name[0].upper()}{name[1:]}, mean of clients")
        dots.set_title("Each client against itself alone")
        toward = "" if table.larger_is_better else ", turned so that right is better"
        dots.set_xlabel(f"{'percentage points' if share else name}{toward}: left is worse, right is better")
        bars.set_xlabel("whiskers: standard deviation over seeds" if len(table.seeds) > 1 else "one seed")
        bars.set_yticks(range(len(methods)), [plain(method, 34) for method in methods])
        bars.set_ylim(len(methods) - 0.45, -0.6)
        for panel in (bars, dots):
            panel.tick_params(length=0)
            panel.spines["left"].set_visible(False)
            panel.grid(axis="x")
        bars.tick_params(axis="y", labelcolor=INK, labelsize=10)
        _draw_legend(figure)
    return figure


def _draw_bars(panel: Axes, table: PersonalTable, rows: dict[str, Row]) -> None:
    """Draw bars from 0 on, with their numbers, and lines at the two baselines."""
    for place, (method, row) in enumerate(rows.items()):
        value = row.mean.mean
        colour = MUTED if method in (ALONE, GLOBAL) else PALETTE[0]
        panel.barh(place, value, height=0.62, color=colour, lw=0)
        if row.mean.std is not None:
            panel.errorbar(value, place, xerr=row.mean.std, color=INK, lw=1.1, capsize=2.5)
        _write_beside(panel, place, figure_text(table.metric, Spread(value, None)))
    if ALONE in rows:
        panel.axvline(rows[ALONE].mean.mean, color=INK, lw=1, ls=(0, (4, 2)))


def _write_beside(panel: Axes, place: int, text: str) -> None:
    """Write a number to the right of a panel, in the row of its method."""
    look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK}
    panel.annotate(text, (1.02, place), xycoords=panel.get_yaxis_transform(), annotation_clip=False, **look)


def _draw_dots(panel: Axes, gains: dict[str, Array]) -> None:
    """Draw each method's gains as dots that are stacked where they coincide, and a tick at their mean."""
    known = {method: gain_C[~np.isnan(gain_C)] for method, gain_C in gains.items()}
    everything = np.concatenate([*known.values(), np.zeros(1)])
    reach = max(float(np.abs(everything).max()), 1e-12)
    low, high = min(float(everything.min()), -0.05 * reach), max(float(everything.max()), 0.05 * reach)
    rasterized = len(everything) > MOST_DOTS
    diameter = float(np.clip(36 / np.sqrt(max(map(len, known.values()))), 1.8, 4.7))  # in points
    step = (diameter / (72 * PANEL) * (high - low), diameter / (72 * ROW))
    for place, (method, gain_C) in enumerate(known.items()):
        if method == ALONE:
            panel.text(0, place, " alone: the line at 0", va="center", fontsize=9, color=MUTED)
            continue
        offset_C2 = swarm(gain_C, *step)
        colours = np.where(gain_C > 0, BETTER, np.where(gain_C < 0, WORSE, MUTED))
        look: dict[str, Any] = {
            "s": diameter**2,
            "c": colours.tolist(),
            "alpha": 0.75,
            "lw": 0,
            "rasterized": rasterized,
        }
        panel.scatter(gain_C + offset_C2[:, 0], place + offset_C2[:, 1], **look)
        _write_beside(panel, place, f"{100 * float((gains[method] > 0).mean()):.0f} % better off")
        if len(gain_C):
            panel.plot([gain_C.mean()] * 2, [place - 0.36, place + 0.36], color=INK, lw=2.2, solid_capstyle="butt")
    panel.axvline(0, color=INK, lw=1, ls=(0, (4, 2)), zorder=0)
    for place in range(1, len(known)):
        panel.axhline(place - 0.5, color=LINE, lw=0.6, zorder=0)
    margin = 0.03 * (high - low)
    panel.set_xlim(low - margin, high + margin)


def swarm(values_C: Array, width: float, height: float) -> Array:
    """Return how far dots of this size are moved, (C, 2), so that those of equal values lie beside each other.

    They are stacked up to the height of a row, then in further columns within the gap to the next values.

    >>> swarm(np.array([0.5, 0.5, 0.1]), 0.01, 0.1).tolist()
    [[0.0, -0.05], [0.0, 0.05], [0.0, 0.0]]
    """
    places_C = np.round(values_C / width).astype(int)
    taken = np.unique(places_C)
    gaps = np.diff(taken, prepend=taken[:1] - 100, append=taken[-1:] + 100) * width
    most, offset_C2 = max(1, int(FILLED / height)), np.zeros((len(values_C), 2))
    for place, gap in zip(taken, np.minimum(gaps[:-1], gaps[1:]), strict=True):
        members = np.flatnonzero(places_C == place)
        columns = -(-len(members) // most)
        rows = -(-len(members) // columns)
        column, row = np.divmod(np.arange(len(members)), rows)
        in_column = np.minimum(rows, len(members) - column * rows)
        offset_C2[members, 0] = (column - (columns - 1) / 2) * min(width, 0.85 * gap / columns)
        offset_C2[members, 1] = (row - (in_column - 1) / 2) * height
    return offset_C2


def _draw_legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    dot: dict[str, Any] = {"ls": "", "marker": "o", "ms": 6, "mew": 0}
    handles = [
        Line2D([], [], color=BETTER, label="a client that fares better than alone", **dot),
        Line2D([], [], color=WORSE, label="worse", **dot),
        Line2D([], [], color=MUTED, label="as well", **dot),
        Line2D([], [], color=INK, ls="", marker="|", ms=11, mew=2.2, label="mean of clients"),
        Line2D([], [], color=INK, lw=1, ls=(0, (4, 2)), label="training alone"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, labelcolor=INK, fontsize=9)
