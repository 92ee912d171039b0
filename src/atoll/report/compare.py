"""Comparison of runs: their results, their costs, and the differences of their plans."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from atoll.core.coordinator import Reason
from atoll.report.figures import PALETTE
from atoll.report.reading import (
    NONE,
    RunRecord,
    count_text,
    dig,
    diverged,
    end_reason,
    human_bytes,
    human_seconds,
    lost_tasks,
    model_text,
    number,
    part_text,
    rounds_to,
    series,
    share_text,
    targets_of,
)
from atoll.report.shell import html_table


def comparison(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return sections that compare runs: results and costs, and the settings in which their plans differ."""
    last = [record.rows[-1] if record.rows else {} for record in records]
    accuracy = [series(record, "test.accuracy")[1] for record in records]
    columns: list[tuple[str, list[float | None], Callable[[float], str], int]] = [
        ("final accuracy", [ys[-1] if ys else None for ys in accuracy], lambda v: f"{100 * v:.2f} %", 1),
        ("best accuracy", [max(ys, default=None) for ys in accuracy], lambda v: f"{100 * v:.2f} %", 1),
        *(
            (
                f"rounds to {share_text(goal)}",
                [rounds_to(record, goal) for record in records],
                lambda v: f"{v:,.1f}",
                -1,
            )
            for goal in targets_of(records)
        ),
        ("rounds", [number(row, "round") for row in last], lambda v: f"{v:,.0f}", 0),
        ("wall time", [number(row, "seconds") for row in last], human_seconds, 0),
        ("uplink", [number(row, "bytes_up") for row in last], human_bytes, 0),
    ]
    lost = [sum(lost_tasks(record).values()) for record in records]
    if any(lost):
        columns.append(("lost tasks", [float(n) for n in lost], lambda v: f"{v:,.0f}", 0))
    cells = [_marked(values, show, better) for _, values, show, better in columns]
    rows = [
        [
            f'<span class="key" style="background:var(--c{index % len(PALETTE)})"></span>{escape(names[index])}'
            + (f'<br><span class="note">{state}</span>' if (state := _state(record)) else ""),
            *(escape(part_text(part)) for part in (record.plan.data, record.plan.algorithm)),
            escape(model_text(record.plan)),
            escape(count_text(record.info.get("num_clients"))),
            *(column[index] for column in cells),
        ]
        for index, record in enumerate(records)
    ]
    head = ["run", "data", "algorithm", "model", "clients", *(title for title, *_ in columns)]
    note = "Green is best. Rounds to a target follow McMahan et al. 2017: best so far, linear between evaluated rounds."
    return (
        f'<section><h2>Side by side</h2>{html_table(head, rows, text=4)}<p class="note">{note}</p></section>'
        f"<section><h2>What differs between the plans</h2>{_differences(records, names)}</section>"
    )


def _state(record: RunRecord) -> str:
    """Return "diverged", "not finished" or both, or "" for a run that ended well."""
    states = ["diverged"] if diverged(record) or end_reason(record) == Reason.DIVERGED else []
    return ", ".join(states if end_reason(record) else [*states, "not finished"])


def _marked(values: Sequence[float | None], show: Callable[[float], str], better: int) -> list[str]:
    """Return the cells of a column with the best marked; `better` is 1 for more, -1 for less, 0 for neither."""
    known = [better * value for value in values if value is not None]
    mark = better and len({*values}) > 1
    return [
        NONE if value is None
        else f'<span class="best">{escape(show(value))}</span>' if mark and better * value == max(known)
        else escape(show(value))
        for value in values
    ]  # fmt: skip


def _differences(records: Sequence[RunRecord], names: Sequence[str]) -> str:
    """Return a table of the settings in which the plans differ."""
    flat = [dict(_flat(record.plan.to_dict())) for record in records]
    for table, record in zip(flat, records, strict=True):
        table["name"] = ""
        table["ran on engine"] = json.dumps(dig(record.info, "engine.name"))
    keys = list(dict.fromkeys(key for table in flat for key in table))
    differing = [key for key in keys if len({table.get(key) for table in flat}) > 1]
    if not differing:
        return "<p>Nothing but their names: the plans are the same.</p>"
    rows = [
        [f"<code>{escape(key)}</code>", *(f"<code>{escape(table.get(key, NONE))}</code>" for table in flat)]
        for key in differing
    ]
    return html_table(["setting", *names], rows, text=len(names) + 1)


def _flat(table: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Yield the dotted keys of nested tables, with their values as JSON."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, json.dumps(value, ensure_ascii=False, default=str)
