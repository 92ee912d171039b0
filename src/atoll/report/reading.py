"""Reading run directories: what was planned, what was measured, and the numbers that papers quote."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atoll.core.coordinator import FAILURES, Reason
from atoll.core.errors import PlanError, RunError, nearest
from atoll.core.parts import Part
from atoll.core.plan import Plan

Json = dict[str, Any]
Against = Literal["round", "seconds", "simulated_seconds", "bytes"]

AXES: dict[str, str] = {
    "round": "round",
    "seconds": "seconds",
    "simulated_seconds": "simulated_seconds",
    "bytes": "bytes_up",
}
"""What a curve is drawn against, and the column of metrics.jsonl that holds it."""

TARGETS = (0.90, 0.95, 0.97, 0.99)
"""Test accuracies that are asked for everywhere."""

NONE = "–"
"""Stands for a number that is not there."""

HOLDS = "a run directory holds plan.toml, run.json and metrics.jsonl; make one with: atoll run plan.toml --out DIR"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run directory says; `rows` are the rounds in order, and what the run did not write is None."""

    path: Path
    plan: Plan
    info: Json
    rows: tuple[Json, ...]
    partition: Json | None = None
    clients: Json | None = None
    confusion: Json | None = None
    result: Json | None = None


def read_run(path: Path | str) -> RunRecord:
    """Read a run directory, also of a run that goes on or was killed."""
    path = Path(path)
    if not path.is_dir():
        problem = "is a file: give the directory that holds it" if path.is_file() else "does not exist"
        raise RunError(f"{path} {problem}; {HOLDS}")
    missing = [name for name in ("plan.toml", "run.json") if not (path / name).is_file()]
    if missing:
        raise RunError(f"{path} is not a run directory: there is no {' and no '.join(missing)} in it; {HOLDS}")
    try:
        plan = Plan.from_toml(_text(path / "plan.toml"))
    except PlanError as error:
        raise RunError(f"{path / 'plan.toml'} cannot be read by this version of Atoll: {error}") from error
    info = _table(path / "run.json")
    assert info is not None
    return RunRecord(
        path=path,
        plan=plan,
        info=info,
        rows=_rows(path / "metrics.jsonl"),
        partition=_checked(path / "partition.json", _partition_problem),
        clients=_checked(path / "clients.json", _clients_problem),
        confusion=_checked(path / "confusion.json", _confusion_problem),
        result=_table(path / "result.json"),
    )


def dig(table: Any, dotted: str) -> Any:
    """The value at a dotted path of nested tables, or None.

    >>> dig({"test": {"accuracy": 0.9}}, "test.accuracy")
    0.9
    """
    for key in dotted.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table


def number(table: Any, dotted: str) -> float | None:
    """The finite number at a dotted path, or None."""
    value = dig(table, dotted)
    return float(value) if _is_number(value) and math.isfinite(value) else None


def series(record: RunRecord, measure: str, against: Against = "round") -> tuple[list[float], list[float]]:
    """The points of a curve: the rounds that have both numbers, such as `test.accuracy` against uplink `bytes`."""
    if against not in AXES:
        raise RunError(f"curves cannot be drawn against '{against}': {nearest(against, AXES)}")
    pairs = [(number(row, AXES[against]), number(row, measure)) for row in record.rows]
    points = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def rounds_to(record: RunRecord, accuracy: float) -> float | None:
    """Rounds until the test accuracy reaches a target, or None where it never does.

    The rule of McMahan et al. 2017 (arXiv:1602.05629, section 3): make the curve monotone by taking the best accuracy
    so far, then interpolate linearly between the evaluated rounds where it crosses the target.
    """
    before: tuple[float, float] | None = None
    for x, y in zip(*series(record, "test.accuracy"), strict=True):
        if y >= accuracy:
            if before is None:
                return x
            x0, y0 = before
            return x0 + (accuracy - y0) / (y - y0) * (x - x0)
        before = (x, max(y, before[1]) if before else y)
    return None


def targets_of(records: Sequence[RunRecord]) -> list[float]:
    """The accuracies worth asking for: the usual ones that some run reached, and those that plans stop at.

    Where none of these was reached, the highest multiple of 5 % that every tested run reached.
    """
    best = [max(ys) for record in records if (ys := series(record, "test.accuracy")[1])]
    asked = {*TARGETS, *(record.plan.stop.accuracy for record in records if record.plan.stop.accuracy)}
    reached = sorted(target for target in asked if any(b >= target for b in best))
    fallback = math.floor(20 * min(best, default=0.0) + 1e-9) / 20
    return reached or ([fallback] if fallback > 0 else [])


def contributions(record: RunRecord) -> dict[str, float]:
    """What each client has added over the recorded rounds; empty where it was not computed."""
    totals: dict[str, float] = {}
    for row in record.rows:
        shares = dig(row, "contribution.clients")
        for client in shares if isinstance(shares, dict) else ():
            totals[client] = totals.get(client, 0.0) + (number(shares, client) or 0.0)
    return totals


def lost_tasks(record: RunRecord) -> dict[str, int]:
    """How many tasks gave no update, by what became of them."""
    last = record.rows[-1] if record.rows else {}
    return {kind: int(n) for kind in ("failed", "rejected", "abandoned") if (n := number(last, kind))}


def diverged(record: RunRecord) -> list[int]:
    """The rounds that had updates but no finite training loss."""
    had_updates = [row for row in record.rows if row.get("clients") and "train_loss" in row]
    return [row["round"] for row in had_updates if number(row, "train_loss") is None]


def own_data(record: RunRecord) -> bool:
    """Whether clients brought their own data, as over a network; then the plan's partition dealt nothing out."""
    return bool(dig(record.info, "engine.name") == "network")


def partition_text(record: RunRecord) -> str:
    """How samples came to their clients, as one reads it."""
    return "data of the clients' own" if own_data(record) else part_text(record.plan.partition)


def failure(record: RunRecord) -> str:
    """What to do about a run that ended without doing what its plan asks for; "" for any other."""
    reason = ended(record)
    return FAILURES[Reason(reason)] if reason in FAILURES else ""


def ended(record: RunRecord) -> str:
    """Why the run ended, or "" where it goes on or was killed; an end from before a resume is none."""
    done = record.rows[-1]["round"] if record.rows else 0
    if record.result is None or (number(record.result, "rounds") or 0) < done:
        return ""
    return str(record.result.get("reason") or "no reason given")


def labels(records: Sequence[RunRecord]) -> list[str]:
    """What to call each run: its name, with the directory or a number where names repeat."""
    names = [record.plan.name or str(record.info.get("name") or "") or _folder(record) for record in records]
    if len(set(names)) < len(names):
        names = [
            name if names.count(name) == 1 or name == _folder(record) else f"{name} ({_folder(record)})"
            for name, record in zip(names, records, strict=True)
        ]
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            names[index] = f"{name} #{seen[name]}"
    return names


def class_names(record: RunRecord, num_classes: int) -> list[str]:
    """The names of the classes, or their numbers where there are no names."""
    for found in (dig(record.info, "data.class_names"), dig(record.partition, "class_names")):
        if isinstance(found, list) and len(found) == num_classes:
            return [str(name) for name in found]
    return [str(index) for index in range(num_classes)]


def human_bytes(count: float) -> str:
    """A number of bytes in decimal units.

    >>> human_bytes(7968400)
    '7.97 MB'
    """
    power = 0
    while abs(count) >= 999.5 and power < 5:
        count, power = count / 1000, power + 1
    return f"{_three_digits(count)} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}" if power else f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """A duration, in the two units that matter.

    >>> human_seconds(75)
    '1 min 15 s'
    """
    if seconds < 0.9995:
        return f"{_three_digits(seconds * 1000)} ms" if seconds > 0 else "0 s"
    if seconds < 59.95:
        return f"{_three_digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def privacy_text(price: Json) -> str:
    """What a run has spent so far, as one reads it.

    >>> privacy_text({"epsilon": 1.5, "delta": 1e-05, "unit": "client", "accountant": "pld"})
    'epsilon 1.50 (delta 1e-05, client)'
    """
    epsilon = "infinite" if price["epsilon"] is None else f"{price['epsilon']:.2f}"
    text = f"epsilon {epsilon} (delta {price['delta']:g}, {price['unit']})"
    return f"{text} {price['warning']}" if "warning" in price else text


def statement_text(statement: Json) -> str:
    """What a guarantee means, as lines to be read."""
    budget = statement.get("budget")
    lines = [
        *([str(statement["warning"])] if "warning" in statement else []),
        f"unit: {statement['unit']}; neighbours: {statement['neighbours']}; delta {statement['delta']:g}"
        + (f"; budget: epsilon {budget:g}" if budget is not None else "; no budget"),
        *(f"- {text}" for text in statement.get("assumptions", [])),
    ]
    return "\n".join(lines)


def model_text(plan: Plan) -> str:
    """The model, or the models that are dealt out to clients in turn, as one reads it."""
    return ", ".join(part_text(part) for part in plan.models or (plan.model,))


def part_text(part: Part) -> str:
    """A part as one reads it: fedprox (mu 0.1), dirichlet (alpha 0.1) | rotation, or nnm (f 2, rule krum (f 2))."""
    if part.name == "mixture":
        return " | ".join(part_text(Part.of(each)) for each in part.options.get("parts", []))
    nested = {key: value for key, value in part.options.items() if isinstance(value, dict) and "name" in value}
    inner = {key: part_text(Part.of(value)) for key, value in nested.items()}
    options = ", ".join(f"{key} {value}" for key, value in {**part.options, **inner}.items())
    return f"{part.name} ({options})" if options else part.name


def count_text(value: object) -> str:
    """A whole number with its thousands apart, or a dash."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else NONE


def share_text(target: float) -> str:
    """A share in per cent, such as 97.5 %."""
    return f"{100 * target:.4g} %"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _folder(record: RunRecord) -> str:
    return record.path.resolve().name or "run"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}; check that you may read it") from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: it is not UTF-8 text ({error.reason} at byte {error.start})") from error


def _table(path: Path) -> Json | None:
    """A JSON object, or None where the file does not exist."""
    if not path.is_file():
        return None
    try:
        table = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: {error}; restore it, or run the plan again") from error
    if not isinstance(table, dict):
        raise RunError(f"{path} is damaged: it must hold a JSON object, got {type(table).__name__}")
    return table


def _checked(path: Path, problem: Any) -> Json | None:
    table = _table(path)
    if table is not None and (why := problem(table)):
        raise RunError(f"{path} is damaged: {why}; remove it to go without, or run the plan again")
    return table


def _rows(path: Path) -> tuple[Json, ...]:
    """The rounds in order. A kill may cut the last line; a run that was resumed replaces the rounds it did again."""
    if not path.is_file():
        return ()
    lines = [(n, line) for n, line in enumerate(_bytes(path).split(b"\n"), 1) if line.strip()]
    rows: list[Json] = []
    for n, line in lines:
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            if n == lines[-1][0]:
                break
            raise RunError(f"{path}, line {n} is not JSON: {error}; remove that line, or run the plan again") from error
        if not isinstance(row, dict) or not isinstance(row.get("round"), int):
            raise RunError(f'{path}, line {n} is not a round: it needs "round": a whole number; got {line[:60]!r}')
        while rows and rows[-1]["round"] >= row["round"]:
            rows.pop()
        rows.append(row)
    return tuple(rows)


def _matrix_problem(rows: Any, name: str) -> str:
    if not (isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows)):
        return f'"{name}" must be a list of lists of numbers'
    if len({len(row) for row in rows}) > 1:
        return f'the rows of "{name}" must be equally long: got lengths {sorted({len(row) for row in rows})}'
    if not all(_is_number(value) and math.isfinite(value) and value >= 0 for row in rows for value in row):
        return f'"{name}" must hold counts of 0 or more'
    return ""


def _partition_problem(table: Json) -> str:
    return _matrix_problem(table.get("counts"), "counts")


def _confusion_problem(table: Json) -> str:
    problem = _matrix_problem(table.get("matrix"), "matrix")
    if not problem and len(table["matrix"]) != len(table["matrix"][0]):
        return f'"matrix" must be square: got {len(table["matrix"])} rows of {len(table["matrix"][0])}'
    return problem


def _clients_problem(table: Json) -> str:
    accuracy = table.get("accuracy")
    if not (isinstance(accuracy, list) and accuracy and all(_is_number(a) and 0 <= a <= 1 for a in accuracy)):
        return '"accuracy" must be a list of shares in [0, 1], one a client'
    return ""
