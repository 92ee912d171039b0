"""Figures of the cost of privacy: epsilon against rounds, and accuracy against epsilon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.report.figures import INK, MUTED, PALETTE, new_figure, note_if_empty, plain, plot_style
from atoll.report.reading import RunRecord, labels, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {"pld": "epsilon (loss distributions)", "rdp": "epsilon (Renyi divergences)"}


def spending_picture(record: RunRecord) -> Figure:
    """Draw the epsilon of a run after each round, and its accuracy against epsilon."""
    points = [(row["round"], number(row, "privacy.epsilon")) for row in record.rows]
    rounds = [x for x, y in points if y is not None]
    kind = record.rows[-1]["privacy"]["accountant"] if record.rows else "pld"
    budget = number(record.info, "privacy.budget")
    return outlook_picture(rounds, {kind: [y for _, y in points if y is not None]}, budget, [record])


def outlook_picture(
    rounds: Sequence[int], epsilons: Mapping[Any, Sequence[float]], budget: float | None, records: Sequence[RunRecord]
) -> Figure:
    """Draw epsilon against rounds, with the budget, and test accuracy against epsilon of past runs."""
    with plot_style():
        figure = new_figure(10.5, 4.4)
        spending, accuracy = figure.subplots(1, 2)
        for index, (kind, values) in enumerate(epsilons.items()):
            look: dict[str, Any] = {"marker": "o" if len(rounds) <= 30 else "", "color": PALETTE[index]}
            spending.plot(rounds, values, lw=1.9, ms=3.5, label=NAMES.get(kind, kind), **look)
        if budget is not None:
            spending.axhline(budget, color=INK, lw=1.2, ls="--", label=f"budget {budget:g}")
        spending.set(xlabel="Round", ylabel="epsilon spent (no unit)", ylim=(0, None))
        spending.set_title("Epsilon by round")
        for index, (record, name) in enumerate(zip(records, labels(records), strict=True)):
            _plot_accuracy(accuracy, record, plain(name), PALETTE[index % len(PALETTE)])
        accuracy.set(xlabel="epsilon spent (no unit)")
        accuracy.set_title("Test accuracy by epsilon")
        for panel in (spending, accuracy):
            panel.grid(axis="y")
            panel.tick_params(length=0)
            if panel.lines:
                panel.legend(loc="best", labelcolor=INK, fontsize=8.5)
            note_if_empty(panel, "not measured" if records else "name directories of past runs to see it here")
    return figure


def _plot_accuracy(panel: Axes, record: RunRecord, name: str, colour: str) -> None:
    """Plot the test accuracy of a run against its epsilon."""
    from matplotlib.ticker import PercentFormatter

    pairs = [(number(row, "privacy.epsilon"), number(row, "test.accuracy")) for row in record.rows]
    points = [(x, y) for x, y in pairs if x is not None and y is not None]
    if points:
        panel.plot([x for x, _ in points], [y for _, y in points], lw=1.9, marker="o", ms=3, color=colour, label=name)
    else:
        panel.plot([], [], color=MUTED, label=f"{name}: not private, or not tested")
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    panel.set_ylabel("test accuracy")
