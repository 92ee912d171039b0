"""Readers of run directories: the plan, the measurements, and the numbers that papers quote."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from atoll.core.coordinator import FAILURES, Reason
from atoll.core.errors import PlanError, RunError, nearest
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.report.file_checks import (
    answers_problem,
    clients_problem,
    confusion_problem,
    is_number,
    partition_problem,
    sites_problem,
)

Json = dict[str, Any]
Against = Literal["round", "seconds", "simulated_seconds", "bytes"]

AXES: dict[str, str] = {
    "round": "round",
    "seconds": "seconds",
    "simulated_seconds": "simulated_seconds",
    "bytes": "bytes_up",
}
"""Axis of a curve -> the column of metrics.jsonl that holds it."""

TARGETS = (0.90, 0.95, 0.97, 0.99)
"""Usual target accuracies on test sets."""

NONE = "–"
"""Text in place of a missing number."""

HOLDS = "a run directory holds plan.toml, run.json and metrics.jsonl; make one with: atoll run plan.toml --out DIR"


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run directory; files that the run did not write are None."""

    path: Path
    plan: Plan
    info: Json
    """Contents of run.json."""
    rows: tuple[Json, ...]
    """Lines of metrics.jsonl, one for each round, in order."""
    partition: Json | None = None
    clients: Json | None = None
    confusion: Json | None = None
    charts: Json | None = None
    """What metrics chart of the newest evaluation, by metric."""
    result: Json | None = None
    sites: Json | None = None
    """Contents of sites.json: what the clients of a federation measured at home."""
    answers: Json | None = None


def read_run(path: Path | str) -> RunRecord:
    """Read the directory of a run that has ended, is running or was killed."""
    path = Path(path)
    if not path.is_dir():
        problem = "is a file: name the directory that holds it" if path.is_file() else "does not exist"
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
        partition=_checked(path / "partition.json", partition_problem),
        clients=_checked(path / "clients.json", clients_problem),
        confusion=_checked(path / "confusion.json", confusion_problem),
        charts=_table(path / "charts.json"),
        result=_table(path / "result.json"),
        sites=_checked(path / "sites.json", sites_problem),
        answers=_checked(path / "answers.json", answers_problem),
    )


def site_rows(sites: Mapping[str, Any]) -> list[Json]:
    """Return the rows of sites.json: one a site, and one of all sites that added their figures in secret."""
    secret = sites.get("secret")
    if secret is None:
        return list(sites["sites"])
    num = f"{len(secret['clients'])} site{'s' * (len(secret['clients']) != 1)}"
    name = f"{num} in a secret sum" if "figures" in secret else f"no secret sum of {num}"
    return [*sites["sites"], {**secret, "client": None, "name": name}]


def secret_note(sites: Mapping[str, Any]) -> str:
    """Return what is said beside the figures of sites of which some were to be added in secret; "" if none were."""
    secret = sites.get("secret")
    if secret is None:
        return ""
    names = ", ".join(map(str, secret["names"])) or "nobody"
    if "figures" not in secret:
        return f"Not measured, as there is no secret sum: {names}."
    return f"In the secret sum: {names}. Pooled figures include it; worst site and spread are of the other sites."


def dig(table: Any, dotted: str) -> Any:
    """Return the value at a dotted path of nested tables, or None.

    >>> dig({"test": {"accuracy": 0.9}}, "test.accuracy")
    0.9
    """
    for key in dotted.split("."):
        table = table.get(key) if isinstance(table, dict) else None
    return table


def number(table: Any, dotted: str) -> float | None:
    """Return the finite number at a dotted path, or None."""
    value = dig(table, dotted)
    return float(value) if is_number(value) and math.isfinite(value) else None


def series(record: RunRecord, measure: str, against: Against = "round") -> tuple[list[float], list[float]]:
    """Return x and y of a curve, such as `test.accuracy` against uplink `bytes`, for rounds that have both numbers."""
    if against not in AXES:
        raise RunError(f"curves cannot be drawn against '{against}': {nearest(against, AXES)}")
    pairs = [(number(row, AXES[against]), number(row, measure)) for row in record.rows]
    points = [(x, y) for x, y in pairs if x is not None and y is not None]
    return [x for x, _ in points], [y for _, y in points]


def rounds_to(record: RunRecord, accuracy: float) -> float | None:
    """Return the number of rounds until the test accuracy reaches a target, or None if it never does.

    By the rule of McMahan et al. 2017 (arXiv:1602.05629, section 3): make the curve monotone by taking the best
    accuracy so far, then interpolate linearly between the evaluated rounds where it crosses the target.
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
    """Return target accuracies that some run reached: the usual ones, and those at which plans stop.

    If none of these was reached, return the highest multiple of 5 % that every tested run reached.
    """
    best = [max(ys) for record in records if (ys := series(record, "test.accuracy")[1])]
    targets = {*TARGETS, *(record.plan.stop.accuracy for record in records if record.plan.stop.accuracy)}
    reached = sorted(target for target in targets if any(b >= target for b in best))
    fallback = math.floor(20 * min(best, default=0.0) + 1e-9) / 20
    return reached or ([fallback] if fallback > 0 else [])


def contributions(record: RunRecord) -> dict[str, float]:
    """Return the total contribution of each client over the recorded rounds; empty if it was not computed."""
    totals: dict[str, float] = {}
    for row in record.rows:
        shares = dig(row, "contribution.clients")
        for client in shares if isinstance(shares, dict) else ():
            totals[client] = totals.get(client, 0.0) + (number(shares, client) or 0.0)
    return totals


def lost_tasks(record: RunRecord) -> dict[str, int]:
    """Return the numbers of tasks that failed, were rejected or were abandoned; zeros are left out."""
    last = record.rows[-1] if record.rows else {}
    return {kind: int(n) for kind in ("failed", "rejected", "abandoned") if (n := number(last, kind))}


def diverged(record: RunRecord) -> list[int]:
    """Return the rounds that had updates but no finite training loss."""
    had_updates = [row for row in record.rows if row.get("clients") and "train_loss" in row]
    return [row["round"] for row in had_updates if number(row, "train_loss") is None]


def clients_own_data(record: RunRecord) -> bool:
    """Return whether clients brought their own data, as in a network; the plan's partition is then unused."""
    return bool(dig(record.info, "engine.name") == "network")


def partition_text(record: RunRecord) -> str:
    """Describe how samples came to their clients."""
    return "data of the clients' own" if clients_own_data(record) else part_text(record.plan.partition)


def failure_advice(record: RunRecord) -> str:
    """Return what to do about a run that ended in failure; "" for any other."""
    reason = end_reason(record)
    return FAILURES[Reason(reason)] if reason in FAILURES else ""


def end_reason(record: RunRecord) -> str:
    """Return why the run ended, or "" if it is running or was killed, also if it was resumed after an earlier end."""
    last_round = record.rows[-1]["round"] if record.rows else 0
    if record.result is None or (number(record.result, "rounds") or 0) < last_round:
        return ""
    return str(record.result.get("reason") or "no reason given")


def labels(records: Sequence[RunRecord]) -> list[str]:
    """Return a unique label for each run: its name, with the directory or a number where names repeat."""
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
    """Return the names of the classes, or their numbers if there are no names."""
    for names in (dig(record.info, "data.class_names"), dig(record.partition, "class_names")):
        if isinstance(names, list) and len(names) == num_classes:
            return [str(name) for name in names]
    return [str(index) for index in range(num_classes)]


def human_bytes(count: float) -> str:
    """Format a number of bytes in decimal units.

    >>> human_bytes(7968400)
    '7.97 MB'
    """
    power = 0
    while abs(count) >= 999.5 and power < 5:
        count, power = count / 1000, power + 1
    return f"{_three_digits(count)} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}" if power else f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """Format a duration in its two largest units.

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


def privacy_text(privacy: Json) -> str:
    """Format the privacy loss of a metrics row.

    >>> privacy_text({"epsilon": 1.5, "delta": 1e-05, "unit": "client", "accountant": "pld"})
    'epsilon 1.50 (delta 1e-05, client)'
    """
    epsilon = "infinite" if privacy["epsilon"] is None else f"{privacy['epsilon']:.2f}"
    text = f"epsilon {epsilon} (delta {privacy['delta']:g}, {privacy['unit']})"
    return f"{text} {privacy['warning']}" if "warning" in privacy else text


def statement_text(statement: Json) -> str:
    """Format the statement of a privacy guarantee as lines of text."""
    budget = statement.get("budget")
    lines = [
        *([str(statement["warning"])] if "warning" in statement else []),
        f"unit: {statement['unit']}; neighbours: {statement['neighbours']}; delta {statement['delta']:g}"
        + (f"; budget: epsilon {budget:g}" if budget is not None else "; no budget"),
        *(f"- {text}" for text in statement.get("assumptions", [])),
    ]
    return "\n".join(lines)


def model_text(plan: Plan) -> str:
    """Format the model, or the models that clients get in turn."""
    return ", ".join(part_text(part) for part in plan.models or (plan.model,))


def part_text(part: Part) -> str:
    """Format a part: fedprox (mu 0.1), dirichlet (alpha 0.1) | rotation, or nnm (f 2, rule krum (f 2))."""
    if part.name == "mixture":
        return " | ".join(part_text(Part.of(inner)) for inner in part.options.get("parts", []))
    nested = {key: value for key, value in part.options.items() if isinstance(value, dict) and "name" in value}
    inner = {key: part_text(Part.of(value)) for key, value in nested.items()}
    options = ", ".join(f"{key} {value}" for key, value in {**part.options, **inner}.items())
    return f"{part.name} ({options})" if options else part.name


def count_text(value: object) -> str:
    """Format a whole number with separated thousands; a dash for any other value."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else NONE


def share_text(target: float) -> str:
    """Format a share in per cent, such as 97.5 %."""
    return f"{100 * target:.4g} %"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _folder(record: RunRecord) -> str:
    return record.path.resolve().name or "run"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error


def _text(path: Path) -> str:
    try:
        return _bytes(path).decode()
    except UnicodeDecodeError as error:
        raise RunError(
            f"{path} is damaged: it is not UTF-8 text ({error.reason} at byte {error.start}); restore it, or run the "
            "plan again"
        ) from error


def _table(path: Path) -> Json | None:
    """Read a JSON object, or return None if the file does not exist."""
    if not path.is_file():
        return None
    try:
        table = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is damaged: {error}; restore it, or run the plan again") from error
    if not isinstance(table, dict):
        raise RunError(
            f"{path} is damaged: it must hold a JSON object, got {type(table).__name__}; restore it, or run the plan "
            "again"
        )
    return table


def _checked(path: Path, problem_of: Callable[[Json], str]) -> Json | None:
    """Read a JSON object and refuse it if `problem_of` returns a problem."""
    table = _table(path)
    if table is not None and (problem := problem_of(table)):
        raise RunError(f"{path} is damaged: {problem}; remove it to go without, or run the plan again")
    return table


def _rows(path: Path) -> tuple[Json, ...]:
    """Read the rounds in order. A kill may cut the last line; a resumed run replaces the rounds that it repeats."""
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
            raise RunError(
                f'{path}, line {n} is not a round: it needs "round": a whole number; got {line[:60]!r}; remove that '
                "line, or run the plan again"
            )
        while rows and rows[-1]["round"] >= row["round"]:
            rows.pop()
        rows.append(row)
    return tuple(rows)
