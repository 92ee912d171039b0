"""Clients that took no part in training: how they fare after steps of adaptation, as text, table and figure."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

from atoll.report.figures import INK, PALETTE, new_figure, plot_style
from atoll.report.main_figure import SHARES, shown, title_of
from atoll.report.reading import NONE, RunRecord, count_text, dig, number
from atoll.report.shell import html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = {"mean": "mean", "worst_decile": "worst tenth", "loss": "loss"}
"""Figures of new clients, and their titles."""


def new_clients_text(name: str, figures: Mapping[int, Mapping[str, float]]) -> str:
    """Say how new clients fare, in one line.

    >>> new_clients_text("accuracy", {0: {"mean": 0.5}, 1: {"mean": 0.625}, 5: {"mean": 0.75}})
    'new clients: accuracy 50.00 % on arrival, 62.50 % after 1 step, 75.00 % after 5 steps'
    """
    pieces = [f"{shown(name, each['mean'])} {_when(steps)}" for steps, each in figures.items()]
    return f"new clients: {title_of(name)} {', '.join(pieces)}"


def _when(steps: int) -> str:
    return f"after {steps:,} step{'s' * (steps != 1)}" if steps else "on arrival"


def has_new_clients(record: RunRecord) -> bool:
    """Return whether new clients were measured at the end of a run."""
    return bool(_rows(record))


def _rows(record: RunRecord) -> dict[int, dict[str, float | None]]:
    """Return steps of adaptation -> the figures after them that are finite numbers."""
    table = dig(record.result, "new_clients.after_steps")
    rows = {int(steps): each for steps, each in table.items() if steps.isdecimal()} if isinstance(table, dict) else {}
    return {steps: {name: number(rows[steps], name) for name in COLUMNS} for steps in sorted(rows)}


def _metric(record: RunRecord) -> str:
    name = dig(record.result, "new_clients.metric")
    return name if isinstance(name, str) else "accuracy"


def new_clients_table(record: RunRecord) -> str:
    """Return the figures of new clients as an HTML table, a row for each number of steps."""
    name, lines = _metric(record), []
    for steps, each in _rows(record).items():
        names = (name, name, "loss")
        pairs = zip(names, each.values(), strict=True)
        lines.append([f"{steps:,}", *(NONE if value is None else shown(which, value) for which, value in pairs)])
    titles = [f"{title_of(name)}, {title}" if key != "loss" else title for key, title in COLUMNS.items()]
    return html_table(["steps", *map(escape, titles)], [[escape(cell) for cell in line] for line in lines])


def new_clients_note(record: RunRecord) -> str:
    """Return what the figures of new clients are of."""
    num = number(dig(record.result, "new_clients.after_steps"), f"{min(_rows(record))}.num_clients")
    return (
        f"{count_text(None if num is None else int(num))} clients, picked by seed, took no part in training. Each gets "
        "what was learnt, takes so many steps on samples of its own, and is tested on others of its own."
    )


def new_clients_picture(record: RunRecord) -> Figure:
    """Draw the main figure of new clients against the steps that they have taken."""
    name, rows = _metric(record), _rows(record)
    with plot_style():
        from matplotlib.ticker import PercentFormatter

        figure = new_figure(6.4, 3.8)
        panel = figure.subplots()
        for key, colour, dash in (("mean", PALETTE[0], "-"), ("worst_decile", PALETTE[1], "--")):
            points = [(place, each[key]) for place, each in enumerate(rows.values()) if each[key] is not None]
            xs, ys = [place for place, _ in points], [value for _, value in points]
            panel.plot(xs, ys, color=colour, ls=dash, lw=1.9, marker="o", ms=4, label=COLUMNS[key])  # type: ignore[arg-type]
        panel.set_xticks(range(len(rows)), [f"{steps:,}" for steps in rows])
        panel.set(xlabel="steps on the client's own samples", ylabel=title_of(name), xlim=(-0.3, len(rows) - 0.7))
        if name in SHARES:
            panel.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        panel.set_title(f"New clients: {title_of(name)} after steps of adaptation")
        panel.grid(axis="y")
        panel.tick_params(length=0)
        panel.legend(labelcolor=INK, fontsize=9)
    return figure
