"""Comparison of codecs: accuracy against bytes. Runs that differ in their seed alone count as one codec."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atoll.report.figures import INK, PALETTE, new_figure, plain, plot_style
from atoll.report.reading import NONE, RunRecord, human_bytes, number, part_text, rounds_to, series, share_text
from atoll.report.shell import html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Codec(NamedTuple):
    """Runs with one uplink and one downlink."""

    name: str
    records: list[RunRecord]

    def mean(self, values: Sequence[float | None]) -> float | None:
        """Return the mean over the runs, or None if one of them has no value."""
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known and len(known) == len(values) else None


def codecs_of(records: Sequence[RunRecord]) -> list[Codec]:
    """Group runs by codec, in order of first occurrence; return nothing if there are fewer than two codecs."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(_name(record), []).append(record)
    return [Codec(name, runs) for name, runs in groups.items()] if len(groups) > 1 else []


def _name(record: RunRecord) -> str:
    directions = {"up": record.plan.uplink, "down": record.plan.downlink}
    texts = [f"{direction}: {', '.join(map(part_text, parts))}" for direction, parts in directions.items() if parts]
    return "; ".join(texts) or "none"


def codec_table(records: Sequence[RunRecord]) -> str:
    """Return a section with the savings and the costs of each codec; "" if there are fewer than two codecs."""
    codecs = codecs_of(records)
    if not codecs:
        return ""
    goals = _targets(codecs)
    head = ["codec", "runs", "bytes an update", "fewer than plain", "final accuracy"]
    head += [f"{quantity} to {share_text(goal)}" for goal in goals for quantity in ("rounds", "uplink")]
    rows = []
    for codec in codecs:
        size = codec.mean([bytes_an_update(record) for record in codec.records])
        plain_size = codec.mean([_plain_bytes(record) for record in codec.records])
        curves = [series(record, "test.accuracy")[1] for record in codec.records]
        final = codec.mean([accuracies[-1] if accuracies else None for accuracies in curves])
        row = [
            f"<code>{escape(codec.name)}</code>",
            str(len(codec.records)),
            NONE if size is None else f"{size:,.0f}",
            NONE if size is None or plain_size is None else f"{plain_size / size:.1f}x",
            NONE if final is None else f"{100 * final:.2f} %",
        ]
        for goal in goals:
            rounds = codec.mean([rounds_to(record, goal) for record in codec.records])
            uplink = codec.mean([bytes_to(record, goal) for record in codec.records])
            row += [NONE if rounds is None else f"{rounds:,.1f}", NONE if uplink is None else human_bytes(uplink)]
        rows.append(row)
    note = "Means over runs that differ in their seed alone. Plain is the model's float32 numbers, 4 bytes each."
    return f'<section><h2>Codecs</h2>{html_table(head, rows, text=1)}<p class="note">{note}</p></section>'


def _targets(codecs: Sequence[Codec]) -> list[float]:
    """Return the accuracies at which plans stop, or else the highest whole percent that every run reached."""
    records = [record for codec in codecs for record in codec.records]
    planned = sorted({record.plan.stop.accuracy for record in records if record.plan.stop.accuracy})
    best = [max(series(record, "test.accuracy")[1], default=0.0) for record in records]
    reached = int(100 * min(best)) / 100
    return planned or ([reached] if reached > 0 else [])


def bytes_an_update(record: RunRecord) -> float | None:
    """Return the mean size of an update on the uplink, in bytes."""
    clients = sum(int(row.get("clients", 0)) for row in record.rows)
    sent = number(record.rows[-1], "bytes_up") if record.rows else None
    return sent / clients if sent and clients else None


def _plain_bytes(record: RunRecord) -> float | None:
    num_params = number(record.info, "model.num_params")
    return 4 * num_params if num_params else None


def bytes_to(record: RunRecord, accuracy: float) -> float | None:
    """Return the uplink bytes of all clients until a test accuracy is reached, or None if it never is."""
    rounds = rounds_to(record, accuracy)
    sent = [(0.0, 0.0), *((number(row, "round"), number(row, "bytes_up")) for row in record.rows)]
    known = np.array([(x, y) for x, y in sent if x is not None and y is not None])
    return None if rounds is None else float(np.interp(rounds, known[:, 0], known[:, 1]))


def codec_picture(records: Sequence[RunRecord]) -> Figure:
    """Draw test accuracy against uplink bytes, with one colour for each codec and one line for each run."""
    with plot_style():
        figure = new_figure(8.4, 4.8)
        panel = figure.subplots()
        codecs = codecs_of(records) or [Codec(_name(records[0]), list(records))]
        for index, codec in enumerate(codecs):
            for run_index, record in enumerate(codec.records):
                xs, ys = series(record, "test.accuracy", "bytes")
                best = 100 * np.maximum.accumulate(np.array(ys))
                label = plain(codec.name, 70) if run_index == 0 else None
                panel.plot(np.array(xs) / 1e6, best, color=PALETTE[index % len(PALETTE)], lw=1.5, label=label)
        panel.set_xscale("log")
        panel.grid(axis="both")
        panel.tick_params(length=0, which="both")
        panel.set_title("Best test accuracy so far against what clients sent")
        panel.set(xlabel="uplink of all clients (MB)", ylabel="test accuracy (%)")
        panel.legend(loc="lower right", labelcolor=INK, fontsize=8.5)
    return figure
