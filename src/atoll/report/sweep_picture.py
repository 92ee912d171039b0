"""Pictures of a sweep: curves with a band over seeds, bars, a heat map of two keys, and the points of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.report.figures import (
    INK,
    LINE,
    MUTED,
    PALETTE,
    Array,
    colour_bar,
    heat_ramp,
    new_figure,
    note_if_empty,
    plain,
    plot_style,
)
from atoll.report.main_figure import SHARES, shown, title_of
from atoll.report.reading import read_run, series
from atoll.report.spread import figure_text
from atoll.report.sweep import SAMPLES, SweepTable, label, shown_range, value_key, value_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CURVES = len(PALETTE)
"""The best combinations that curves are drawn of."""
MOST_BARS = 30
ROW = 0.38
"""Height of a bar or a row of the heat map in inches."""
LONG = 48
"""Maximum number of letters of a combination's name."""


def curves_picture(table: SweepTable, out: Path) -> Figure:
    """Draw the main figure on the test set by round: the mean over seeds, and a band of one standard deviation."""
    with plot_style():
        from matplotlib.ticker import MaxNLocator

        rows = table.ranked()[:MOST_CURVES]
        figure = new_figure(10.5, 4.4 + 0.2 * ((len(rows) + 1) // 2))
        panel = figure.subplots()
        for colour, row in zip(PALETTE, rows, strict=False):
            runs = [run for run in table.of(row.combination) if run.status == "done"]
            rounds, values_SR = common_rounds(
                [series(read_run(out / run.directory), f"test.{table.metric}") for run in runs]
            )
            mean_R = values_SR.mean(axis=0)
            marker = "o" if len(rounds) <= 30 else ""
            panel.plot(
                rounds, mean_R, color=colour, lw=1.9, marker=marker, ms=3.5, label=plain(label(row.settings), 60)
            )
            if len(runs) > 1:
                std_R = values_SR.std(axis=0, ddof=1)
                panel.fill_between(rounds, mean_R - std_R, mean_R + std_R, color=colour, alpha=0.16, lw=0)
        band = "; band: one standard deviation over seeds" if len(table.seeds) > 1 else ""
        few = f"; the best {len(rows)} of {len(table.combinations)}" if len(rows) < len(table.combinations) else ""
        panel.set_title(f"Test {title_of(table.metric)} by round{band}{few}")
        panel.set_xlabel("Round")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
        _as_percent(panel.yaxis, table)
        panel.grid(axis="y")
        panel.tick_params(length=0)
        note_if_empty(panel)
        figure.legend(loc="outside lower left", ncols=2, labelcolor=INK, fontsize=9)
    return figure


def common_rounds(curves: list[tuple[list[float], list[float]]]) -> tuple[list[float], Array]:
    """Return the rounds that all seeds have, and their values, a row for each seed.

    >>> common_rounds([([1, 2, 3], [0.1, 0.2, 0.3]), ([1, 3], [0.5, 0.7])])[1].tolist()
    [[0.1, 0.3], [0.5, 0.7]]
    """
    by_round = [dict(zip(rounds, values, strict=True)) for rounds, values in curves]
    common = sorted(set.intersection(*map(set, by_round)))
    return common, np.array([[each[number] for number in common] for each in by_round])


def settings_picture(table: SweepTable) -> Figure:
    """Draw the points of a search, a heat map if two keys vary, or else bars."""
    values = [len({value_key(each[key]) for each in table.combinations}) for key in table.keys]
    if table.is_search:
        return _points(table)
    return _heat_map(table) if len(values) == 2 and min(values) > 1 else _bars(table)


def _bars(table: SweepTable) -> Figure:
    """Draw the figure of each combination, best on top, with the standard deviation over seeds."""
    rows = table.ranked()[:MOST_BARS]
    with plot_style():
        figure = new_figure(10.5, ROW * len(rows) + 1.5)
        panel = figure.subplots()
        for place, row in enumerate(rows):
            panel.barh(place, row.figure.mean, height=0.62, color=PALETTE[0] if place else PALETTE[2], lw=0)
            if row.figure.std is not None:
                panel.errorbar(row.figure.mean, place, xerr=row.figure.std, color=INK, lw=1.1, capsize=2.5)
            look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK, "annotation_clip": False}
            text = figure_text(table.metric, row.figure)
            panel.annotate(text, (1.01, place), xycoords=panel.get_yaxis_transform(), **look)
        panel.set_yticks(range(len(rows)), [plain(label(row.settings), LONG) for row in rows])
        panel.set_ylim(len(rows) - 0.45, -0.6)
        few = f", the best {len(rows)} of {len(table.combinations)}" if len(rows) < len(table.combinations) else ""
        panel.set_title(f"{_measured(table)}{few}")
        panel.set_xlabel("whiskers: standard deviation over seeds" if len(table.seeds) > 1 else "one seed")
        _as_percent(panel.xaxis, table)
        panel.tick_params(length=0)
        panel.tick_params(axis="y", labelcolor=INK)
        panel.spines["left"].set_visible(False)
        panel.grid(axis="x")
    return figure


def _heat_map(table: SweepTable) -> Figure:
    """Draw the means of two keys, the first down and the second across; the best has a frame."""
    values = [{value_key(each[key]): each[key] for each in table.combinations} for key in table.keys]
    down, across = ([plain(value_text(value), 30) for value in each.values()] for each in values)
    best = table.best
    with plot_style():
        from matplotlib.ticker import PercentFormatter

        longest = max(map(len, across))
        width = 2.6 + max(1.0, 0.09 * longest) * len(across)
        figure = new_figure(float(np.clip(width, 7.5, 14)), ROW * len(down) + 1.9)
        panel = figure.subplots()
        means_AB = np.full((len(down), len(across)), np.nan)
        places = {row.combination: _place(values, table.keys, row.settings) for row in table.ranked()}
        for row in table.ranked():
            means_AB[places[row.combination]] = row.figure.mean
        known = means_AB[~np.isnan(means_AB)]
        low, high = shown_range(known.tolist() or [0.0])
        low -= 0.08 * (high - low)  # the least is not drawn like a cell without a result
        image = panel.imshow(means_AB, cmap=heat_ramp(), vmin=low, vmax=high, aspect="auto", interpolation="none")
        for (row_place, column), value in np.ndenumerate(means_AB):
            empty = bool(np.isnan(value))
            dark = not empty and (value - low) / (high - low) > 0.55
            text = "no result" if empty else shown(table.metric, value)
            colour = MUTED if empty else "white" if dark else INK
            panel.text(column, row_place, text, ha="center", va="center", fontsize=8 if empty else 9.5, color=colour)
        if best is not None:
            _frame(panel, *places[best.combination])
        rotation: dict[str, Any] = {"rotation": 20, "ha": "right"} if longest > 14 else {}
        panel.set_xticks(range(len(across)), across, **rotation)
        panel.set_yticks(range(len(down)), down)
        panel.set(xlabel=plain(table.keys[1]), ylabel=plain(table.keys[0]))
        panel.set_title(f"{_measured(table)}, mean over seeds")
        panel.tick_params(length=0)
        panel.spines[:].set_visible(False)
        percent = {"format": PercentFormatter(1.0, symbol=" %")} if table.metric in SHARES else {}
        colour_bar(image, title_of(table.metric), ax=panel, pad=0.02, fraction=0.04, aspect=25, **percent)
    return figure


def _place(values: Sequence[Mapping[str, Any]], keys: Sequence[str], settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return row and column of a combination."""
    return tuple(list(each).index(value_key(settings[key])) for each, key in zip(values, keys, strict=True))


def _frame(panel: Axes, row: int, column: int) -> None:
    from matplotlib.patches import Rectangle

    panel.add_patch(Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, fill=False, edgecolor=PALETTE[1], lw=2))


def _points(table: SweepTable) -> Figure:
    """Draw the figure of each trial against each key, and the best so far by trial."""
    rows = [row for place in range(len(table.combinations)) if (row := table.row(place)) is not None]
    with plot_style():
        panels_wide = min(3, len(table.keys) + 1)
        panels_high = -(-(len(table.keys) + 1) // panels_wide)
        figure = new_figure(10.5, 3.4 * panels_high)
        panels = figure.subplots(panels_high, panels_wide, squeeze=False).ravel()
        figures = np.array([row.figure.mean for row in rows])
        best = (np.maximum if table.larger_is_better else np.minimum).accumulate(figures) if rows else figures
        trials = [row.combination + 1 for row in rows]
        panels[0].scatter(trials, figures, s=18, color=MUTED, lw=0)
        panels[0].step(trials, best, where="post", color=PALETTE[2], lw=1.9)
        panels[0].set(xlabel="trial", title="Best so far")
        for panel, key in zip(panels[1:], table.keys, strict=False):
            values = [row.settings[key] for row in rows]
            numbers = all(isinstance(value, int | float) for value in values)
            panel.scatter(
                values if numbers else [plain(value_text(v), 18) for v in values],
                figures,
                s=22,
                color=PALETTE[0],
                alpha=0.8,
                lw=0,
            )
            if numbers and values and min(values) > 0 and max(values) / min(values) >= 50:
                panel.set_xscale("log")
            panel.set(xlabel=plain(key))
        for panel in panels[: len(table.keys) + 1]:
            _as_percent(panel.yaxis, table)
            panel.tick_params(length=0)
            panel.grid(axis="y", color=LINE)
        for panel in panels[len(table.keys) + 1 :]:
            panel.set_visible(False)
        figure.suptitle(_measured(table), x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def _measured(table: SweepTable) -> str:
    title = title_of(table.metric)
    return f"{title[0].upper()}{title[1:]} on {SAMPLES[table.chosen_on]}"


def _as_percent(axis: Any, table: SweepTable) -> None:
    from matplotlib.ticker import PercentFormatter

    if table.metric in SHARES:
        axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
