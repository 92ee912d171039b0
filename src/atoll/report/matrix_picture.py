"""Heat maps of attacks against defences. Shapes: A attacks, R rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.report.figures import INK, LINE, MUTED, Array, _colour_bar, _figure, _ramp, _style, plain
from atoll.report.matrix import NO_ATTACK, Matrix, Measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, LETTER = 0.42, 0.085
"""Inches that a row and a letter take."""
LONG = 34
"""Names are cut after so many letters, and written aslant from half of that on."""


def matrix_picture(matrix: Matrix, measure: Measure = "accuracy") -> Figure:
    """One heat map for each number of bad clients: attacks down, defences across, in % and the mean over seeds."""
    accuracy = measure == "accuracy"
    rows = [NO_ATTACK, *matrix.attacks] if accuracy else [a for a in matrix.attacks if a in matrix.targeted]
    grids = []
    for f in matrix.f:
        values_AR = _numbers([[matrix.mean(measure, row, rule, f) for rule in matrix.defences] for row in rows])
        marks = [[str(matrix.problem(row, rule, f) or "") for rule in matrix.defences] for row in rows]
        grids.append((f"{f} bad client{'s' * (f != 1)}", values_AR, marks))
    what = "Test accuracy" if accuracy else "Attack success"
    return heat_maps(grids, rows, matrix.defences, what, "attack")


def worst_picture(matrix: Matrix) -> Figure:
    """The accuracy that each defence keeps under the attack that is worst for it: numbers of bad clients down."""
    rows = [str(f) for f in matrix.f]
    values_FR = _numbers([[matrix.worst(rule, f).accuracy for rule in matrix.defences] for f in matrix.f])
    marks = [
        [_worst_mark(matrix, rule, f) for rule in matrix.defences]
        for f in matrix.f
    ]  # fmt: skip
    return heat_maps(
        [("under the worst attack", values_FR, marks)], rows, matrix.defences, "Test accuracy", "bad clients"
    )


def _worst_mark(matrix: Matrix, defence: str, f: int) -> str:
    """What to write where no attack gave a number, and whether the worst is the worst of some attacks only."""
    return next((m for attack in matrix.attacks if (m := matrix.problem(attack, defence, f))), "")


def _numbers(rows: list[list[float | None]]) -> Array:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)


def heat_maps(
    grids: Sequence[tuple[str, Array, list[list[str]]]],
    rows: Sequence[str],
    columns: Sequence[str],
    what: str,
    down: str,
) -> Figure:
    """Heat maps one below the other: of each its title, its values in [0, 1] and marks; NaN is an empty cell."""
    names, across = [plain(name, LONG) for name in rows], [plain(name, LONG) for name in columns]
    longest = max(map(len, across))
    aslant: dict[str, Any] = {"rotation": 20, "ha": "right"} if 2 * longest > LONG else {}
    wide = LETTER * max(map(len, names)) + max(0.9, min(LETTER * longest, 1.45)) * len(columns)
    below = 0.3 + (0.055 * longest if aslant else 0)
    with _style():
        from matplotlib.ticker import PercentFormatter

        figure = _figure(max(5.5, wide + 1.9), (ROW * len(rows) + 0.55) * len(grids) + below + 0.35)
        panels = figure.subplots(len(grids), 1, squeeze=False, sharex=True)[:, 0]
        for panel, (title, values_AR, marks) in zip(panels, grids, strict=True):
            image = panel.imshow(values_AR, cmap=_ramp(), vmin=0, vmax=1, aspect="auto", interpolation="none")
            panel.set_title(f"{what}, {title}, in %")
            panel.set_yticks(range(len(rows)), names)
            panel.set_xticks(range(len(columns)), across, **aslant)
            panel.set_ylabel(down)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            _written(panel, values_AR, marks)
        bar = PercentFormatter(1.0, symbol=" %")
        _colour_bar(image, what.lower(), ax=list(panels), pad=0.02, fraction=0.04, aspect=25, format=bar)
    return figure


def _written(panel: Axes, values_AR: Array, marks: list[list[str]]) -> None:
    """Write each number into its cell; a star says that some of what it stands for gave none."""
    from matplotlib.patches import Rectangle

    for (row, column), value in np.ndenumerate(values_AR):
        mark = marks[row][column]
        empty = bool(np.isnan(value))
        if empty:
            corner = (column - 0.5, row - 0.5)
            panel.add_patch(Rectangle(corner, 1, 1, fill=False, hatch="////", edgecolor=LINE, lw=0))
        text = (mark or "no number") if empty else f"{100 * value:.1f}{'*' * bool(mark)}"
        colour = MUTED if empty else "white" if value > 0.55 else INK
        size = 8 if empty else 9.5
        panel.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
