"""Heat maps of attacks against defences. Shapes: A attacks, R rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.report.figures import INK, LINE, MUTED, Array, colour_bar, heat_ramp, new_figure, plain, plot_style
from atoll.report.matrix import NO_ATTACK, Matrix, Measure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, LETTER = 0.42, 0.085
"""Height of a row and width of a letter, in inches."""
LONG = 34
"""Maximum number of letters of a name; names longer than half of that are rotated."""


def matrix_picture(matrix: Matrix, measure: Measure = "accuracy") -> Figure:
    """Draw a heat map for each number of bad clients: attacks down, defences across, means over seeds in %."""
    accuracy = measure == "accuracy"
    rows = [NO_ATTACK, *matrix.attacks] if accuracy else [a for a in matrix.attacks if a in matrix.targeted]
    grids = []
    for f in matrix.f:
        values_AR = _numbers([[matrix.mean(measure, row, rule, f) for rule in matrix.defences] for row in rows])
        marks = [[str(matrix.problem(row, rule, f) or "") for rule in matrix.defences] for row in rows]
        grids.append((f"{f} bad client{'s' * (f != 1)}", values_AR, marks))
    measured = "Test accuracy" if accuracy else "Attack success"
    return heat_maps(grids, rows=rows, columns=matrix.defences, measured=measured, row_label="attack")


def worst_picture(matrix: Matrix) -> Figure:
    """Draw the accuracy of each defence under its worst attack, with the numbers of bad clients down."""
    rows = [str(f) for f in matrix.f]
    values_FR = _numbers([[matrix.worst(rule, f).accuracy for rule in matrix.defences] for f in matrix.f])
    marks = [[_worst_mark(matrix, rule, f) for rule in matrix.defences] for f in matrix.f]
    return heat_maps(
        [("under the worst attack", values_FR, marks)],
        rows=rows,
        columns=matrix.defences,
        measured="Test accuracy",
        row_label="bad clients",
    )


def _worst_mark(matrix: Matrix, defence: str, f: int) -> str:
    """Return the status of the first attack without a result, or "" if the worst case covers all attacks."""
    return next((m for attack in matrix.attacks if (m := matrix.problem(attack, defence, f))), "")


def _numbers(rows: list[list[float | None]]) -> Array:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], dtype=float)


def heat_maps(
    grids: Sequence[tuple[str, Array, list[list[str]]]],
    rows: Sequence[str],
    columns: Sequence[str],
    measured: str,
    row_label: str,
) -> Figure:
    """Draw heat maps below each other, each with title, values in [0, 1] and marks; NaN is an empty cell."""
    row_names, column_names = [plain(name, LONG) for name in rows], [plain(name, LONG) for name in columns]
    longest = max(map(len, column_names))
    rotation: dict[str, Any] = {"rotation": 20, "ha": "right"} if 2 * longest > LONG else {}
    width = LETTER * max(map(len, row_names)) + max(0.9, min(LETTER * longest, 1.45)) * len(columns)
    margin = 0.3 + (0.055 * longest if rotation else 0)
    with plot_style():
        from matplotlib.ticker import PercentFormatter

        figure = new_figure(max(5.5, width + 1.9), (ROW * len(rows) + 0.55) * len(grids) + margin + 0.35)
        panels = figure.subplots(len(grids), 1, squeeze=False, sharex=True)[:, 0]
        for panel, (title, values_AR, marks) in zip(panels, grids, strict=True):
            image = panel.imshow(values_AR, cmap=heat_ramp(), vmin=0, vmax=1, aspect="auto", interpolation="none")
            panel.set_title(f"{measured}, {title}, in %")
            panel.set_yticks(range(len(rows)), row_names)
            panel.set_xticks(range(len(columns)), column_names, **rotation)
            panel.set_ylabel(row_label)
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
            _write_numbers(panel, values_AR, marks)
        shares = PercentFormatter(1.0, symbol=" %")
        colour_bar(image, measured.lower(), ax=list(panels), pad=0.02, fraction=0.04, aspect=25, format=shares)
    return figure


def _write_numbers(panel: Axes, values_AR: Array, marks: list[list[str]]) -> None:
    """Write each number into its cell; a star marks a number that lacks some results."""
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
