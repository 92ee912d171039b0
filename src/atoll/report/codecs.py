"""Codecs side by side: what accuracy costs in bytes. Runs that differ in their seed alone are drawn as one codec."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atoll.report.compare import table_of
from atoll.report.figures import INK, PALETTE, _figure, _style, plain
from atoll.report.reading import NONE, RunRecord, human_bytes, number, part_text, rounds_to, series, share_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Codec(NamedTuple):
    """Runs with one uplink and one downlink."""

    name: str
    records: list[RunRecord]

    def mean(self, values: Sequence[float | None]) -> float | None:
        """The mean over the runs, or None where one of them has no value."""
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known and len(known) == len(values) else None


def codecs_of(records: Sequence[RunRecord]) -> list[Codec]:
    """The runs by codec, in the order in which codecs first occur; fewer than two are nothing to compare."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(_name(record), []).append(record)
    return [Codec(name, runs) for name, runs in found.items()] if len(found) > 1 else []


def _name(record: RunRecord) -> str:
    ways = {"up": record.plan.uplink, "down": record.plan.downlink}
    told = [f"{way}: {', '.join(map(part_text, parts))}" for way, parts in ways.items() if parts]
    return "; ".join(told) or "none"


def codec_table(records: Sequence[RunRecord]) -> str:
    """What each codec saves and what it costs, as a section of the page; nothing if there are no two codecs."""
    codecs = codecs_of(records)
    if not codecs:
        return ""
    goals = _targets(codecs)
    head = ["codec", "runs", "bytes an update", "fewer than plain", "final accuracy"]
    head += [f"{what} to {share_text(goal)}" for goal in goals for what in ("rounds", "uplink")]
    rows = []
    for codec in codecs:
        size = codec.mean([bytes_an_update(record) for record in codec.records])
        plain_size = codec.mean([_plain_bytes(record) for record in codec.records])
        accuracies = [series(record, "test.accuracy")[1] for record in codec.records]
        final = codec.mean([each[-1] if each else None for each in accuracies])
        row = [
            f"<code>{escape(codec.name)}</code>",
            str(len(codec.records)),
            NONE if size is None else f"{size:,.0f}",
            NONE if size is None or plain_size is None else f"{plain_size / size:.1f}x",
            NONE if final is None else f"{100 * final:.2f} %",
        ]
        for goal in goals:
            rounds = codec.mean([rounds_to(record, goal) for record in codec.records])
            spent = codec.mean([bytes_to(record, goal) for record in codec.records])
            row += [NONE if rounds is None else f"{rounds:,.1f}", NONE if spent is None else human_bytes(spent)]
        rows.append(row)
    note = "Means over runs that differ in their seed alone. Plain is the model's float32 numbers, 4 bytes each."
    return f'<section><h2>Codecs</h2>{table_of(head, rows, text=1)}<p class="note">{note}</p></section>'


def _targets(codecs: Sequence[Codec]) -> list[float]:
    """What plans stop at, or else the highest whole percent that every run reached."""
    records = [record for codec in codecs for record in codec.records]
    asked = sorted({record.plan.stop.accuracy for record in records if record.plan.stop.accuracy})
    best = [max(series(record, "test.accuracy")[1], default=0.0) for record in records]
    reached = int(100 * min(best)) / 100
    return asked or ([reached] if reached > 0 else [])


def bytes_an_update(record: RunRecord) -> float | None:
    """The mean size of what a client sent, in bytes."""
    clients = sum(int(row.get("clients", 0)) for row in record.rows)
    sent = number(record.rows[-1], "bytes_up") if record.rows else None
    return sent / clients if sent and clients else None


def _plain_bytes(record: RunRecord) -> float | None:
    num_params = number(record.info, "model.num_params")
    return 4 * num_params if num_params else None


def bytes_to(record: RunRecord, accuracy: float) -> float | None:
    """Uplink bytes of the rounds until a test accuracy is reached, or None where it never is."""
    rounds = rounds_to(record, accuracy)
    sent = [(0.0, 0.0), *((number(row, "round"), number(row, "bytes_up")) for row in record.rows)]
    known = np.array([(x, y) for x, y in sent if x is not None and y is not None])
    return None if rounds is None else float(np.interp(rounds, known[:, 0], known[:, 1]))


def codec_picture(records: Sequence[RunRecord]) -> Figure:
    """Test accuracy against the bytes that clients sent, one colour a codec, one line a run."""
    with _style():
        figure = _figure(8.4, 4.8)
        panel = figure.subplots()
        codecs = codecs_of(records) or [Codec(_name(records[0]), list(records))]
        for index, codec in enumerate(codecs):
            for number_of_run, record in enumerate(codec.records):
                xs, ys = series(record, "test.accuracy", "bytes")
                best = 100 * np.maximum.accumulate(np.array(ys))
                label = plain(codec.name, 70) if number_of_run == 0 else None
                panel.plot(np.array(xs) / 1e6, best, color=PALETTE[index % len(PALETTE)], lw=1.5, label=label)
        panel.set_xscale("log")
        panel.grid(axis="both")
        panel.tick_params(length=0, which="both")
        panel.set_title("Best test accuracy so far against what clients sent")
        panel.set(xlabel="uplink of all clients (MB)", ylabel="test accuracy (%)")
        panel.legend(loc="lower right", labelcolor=INK, fontsize=8.5)
    return figure
