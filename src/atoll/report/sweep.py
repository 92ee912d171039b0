"""Outcomes of a sweep: settings of a plan beside each other, over seeds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from atoll.commit.finish import without_nan
from atoll.core.parts import Part
from atoll.report.main_figure import title_of
from atoll.report.matrix import aligned
from atoll.report.reading import NONE, human_bytes, human_seconds
from atoll.report.spread import Spread, figure_text, over_seeds

Status = Literal["done", "refused", "failed"]
ChosenOn = Literal["validation", "holdout", "test"]

SAMPLES: dict[ChosenOn, str] = {
    "validation": "clients' validation samples",
    "holdout": "clients' held-out samples",
    "test": "the test set",
}
"""What the best is chosen on -> in words."""

LEFT_OUT = "left out"
"""Text of a setting that a combination removes from the plan."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One combination of settings with one seed."""

    combination: int
    """Its place in the sweep's list of combinations."""
    seed: int
    status: Status = "done"
    why: str = ""
    """Why the plan was refused or the run failed."""
    figure: float | None = None
    """The main figure on the samples that the best is chosen on."""
    test: float | None = None
    """The main figure on the test set, after the last round."""
    rounds: int = 0
    bytes_up: int = 0
    """Bytes that all clients sent."""
    seconds: float = 0.0
    directory: str = ""
    """Run directory, relative to that of the sweep."""


class Row(NamedTuple):
    """A combination of settings over the seeds that have a result."""

    combination: int
    settings: Mapping[str, Any]
    figure: Spread
    """The main figure on the samples that the best is chosen on."""
    test: Spread | None
    rounds: float
    bytes_up: float
    seconds: float
    num_seeds: int
    """Seeds that have a result."""


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """All runs of a sweep, with the combinations in the order of the grid or the search."""

    title: str
    metric: str
    """The plan's main figure, such as accuracy."""
    larger_is_better: bool
    chosen_on: ChosenOn
    keys: tuple[str, ...]
    """The settings that vary."""
    combinations: tuple[Mapping[str, Any], ...]
    seeds: tuple[int, ...]
    runs: tuple[SweepRun, ...]
    protection: str = ""
    """What protects clients of the plan, which a choice between runs does not respect; "" if nothing does."""
    is_search: bool = False
    """Whether the combinations were searched for, not listed."""

    def row(self, combination: int) -> Row | None:
        """Return the numbers of a combination, or None if no seed has a result."""
        done = [run for run in self.of(combination) if run.status == "done" and run.figure is not None]
        if not done:
            return None
        tests = [run.test for run in done if run.test is not None]
        return Row(
            combination=combination,
            settings=self.combinations[combination],
            figure=over_seeds([run.figure for run in done if run.figure is not None]),
            test=over_seeds(tests) if len(tests) == len(done) else None,
            rounds=sum(run.rounds for run in done) / len(done),
            bytes_up=sum(run.bytes_up for run in done) / len(done),
            seconds=sum(run.seconds for run in done) / len(done),
            num_seeds=len(done),
        )

    def of(self, combination: int) -> list[SweepRun]:
        """Return the runs of a combination, one for each seed."""
        return [run for run in self.runs if run.combination == combination]

    def ranked(self) -> list[Row]:
        """Return the combinations that have numbers, best first; those that lack seeds come after all others."""
        rows = [row for place in range(len(self.combinations)) if (row := self.row(place)) is not None]
        sign = -1 if self.larger_is_better else 1
        return sorted(rows, key=lambda row: (len(self.seeds) - row.num_seeds, sign * row.figure.mean))

    @property
    def best(self) -> Row | None:
        """The best combination, or None if none has a result."""
        return next(iter(self.ranked()), None)

    @property
    def problems(self) -> list[SweepRun]:
        """The runs without a result."""
        return [run for run in self.runs if run.status != "done"]

    def why(self, combination: int) -> str:
        """Return why runs of a combination have no result; "" if all have one."""
        reasons: dict[str, list[int]] = {}
        for run in self.of(combination):
            if run.status != "done":
                reasons.setdefault(f"{run.status}: {run.why}", []).append(run.seed)
        whole = len(self.seeds)
        return "; ".join(
            why if len(seeds) == whole else f"seed {', '.join(map(str, seeds))} {why}" for why, seeds in reasons.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, as in sweep.json."""
        best = self.best
        return without_nan(  # type: ignore[no-any-return]
            {
                "title": self.title,
                "metric": self.metric,
                "larger_is_better": self.larger_is_better,
                "chosen_on": self.chosen_on,
                "seeds": list(self.seeds),
                "keys": list(self.keys),
                "notes": notes(self),
                "best": None if best is None else plain_settings(best.settings),
                "combinations": [_plain(self, place) for place in range(len(self.combinations))],
                "runs": [asdict(run) for run in self.runs],
            }
        )


def _plain(table: SweepTable, place: int) -> dict[str, Any]:
    row = table.row(place)
    figures: dict[str, Any] = {}
    if row is not None:
        figures = {**row._asdict(), "figure": row.figure._asdict(), "test": row.test._asdict() if row.test else None}
        del figures["combination"]
    return {**figures, "settings": plain_settings(table.combinations[place]), "why": table.why(place)}


def value_text(value: object) -> str:
    """Return a setting's value as text.

    >>> value_text(0.1), value_text("fedprox"), value_text({"name": "fedprox", "mu": 0.1}), value_text(None)
    ('0.1', 'fedprox', 'fedprox (mu 0.1)', 'left out')
    """
    if value is None:
        return LEFT_OUT
    if isinstance(value, Part):
        return value_text(value.to_dict())
    if callable(value):
        return f"{value.__module__}:{getattr(value, '__qualname__', type(value).__name__)}"
    if isinstance(value, Mapping) and "name" in value:
        options = ", ".join(f"{key} {value_text(option)}" for key, option in value.items() if key != "name")
        return f"{value['name']} ({options})" if options else str(value["name"])
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON holds them; functions become their names."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=value_text))
    return plain


def value_key(value: object) -> str:
    """Return a text that only equal values share, also where `value_text` rounds.

    >>> value_key(0.1) == value_key(0.10000001), value_text(0.1) == value_text(0.10000001)
    (False, True)
    """
    return json.dumps(value, sort_keys=True, default=value_text)


def label(settings: Mapping[str, Any]) -> str:
    """Return a combination of settings as text.

    >>> label({"local.lr": 0.1, "algorithm": "fedprox"})
    'local.lr 0.1, algorithm fedprox'
    """
    return ", ".join(f"{key} {value_text(value)}" for key, value in settings.items())


def table_rows(table: SweepTable) -> tuple[list[str], list[list[str]]]:
    """Return the titles, and a row of cells as text for each combination: best first, those without numbers last."""
    figure, apart = title_of(table.metric), table.chosen_on != "test"
    by = {"validation": f"validation {figure}", "holdout": f"held-out {figure}", "test": f"test {figure}"}
    head = [*table.keys, by[table.chosen_on], *([f"test {figure}"] if apart else []), "rounds", "up", "time"]
    head += ["without a result"] if table.problems else []
    rows = []
    for row in table.ranked():
        numbers = [figure_text(table.metric, row.figure)]
        numbers += [NONE if row.test is None else figure_text(table.metric, row.test)] if apart else []
        numbers += [f"{row.rounds:g}", human_bytes(row.bytes_up), human_seconds(row.seconds)]
        rows.append([*_values(table, row.combination), *numbers, table.why(row.combination)][: len(head)])
    for place in range(len(table.combinations)):
        if table.row(place) is None:
            nothing = [NONE] * (len(head) - len(table.keys) - 1)
            rows.append([*_values(table, place), *nothing, table.why(place)])
    return head, rows


def _values(table: SweepTable, place: int) -> list[str]:
    return [value_text(table.combinations[place].get(key)) for key in table.keys]


def table_text(table: SweepTable) -> str:
    """Return the table and what must be known to read it, for a terminal."""
    head, rows = table_rows(table)
    return "\n".join([aligned([head, *rows]), "", *notes(table)])


def notes(table: SweepTable) -> list[str]:
    """Return what must be known to read the table, a sentence or two each."""
    num = len(table.seeds)
    over = f"mean and standard deviation over {num} seeds" if num > 1 else "of one seed, so that luck is not told apart"
    better = "larger" if table.larger_is_better else "smaller"
    lines = [f"Figures are {over}; a {better} {title_of(table.metric)} is better. Times and bytes are those of a run."]
    lines.append(chosen_text(table))
    if any(key.partition(".")[0] in ("data", "partition") for key in table.keys):
        lines.append("Data or partition vary: the figures of such combinations are of different samples.")
    if any(row.num_seeds < num for row in table.ranked()):
        lines.append("Combinations that lack the result of a seed come after all others.")
    if table.protection:
        lines.append(
            f"The plan has {table.protection}, which covers one run: a choice between runs looks at each of them, and "
            "no guarantee covers it. Make it on data that need no protection."
        )
    return lines


def chosen_text(table: SweepTable) -> str:
    """Return on what the best was chosen, and what that means for its figure."""
    samples = SAMPLES[table.chosen_on]
    if table.chosen_on == "test":
        return (
            f"The best is chosen on {samples}, so that its figure there is too good to be reported as a result: set "
            "evaluation.validation, e.g. to 0.1, to choose on samples of the clients instead."
        )
    return (
        f"The best is chosen on {samples} (evaluation.{table.chosen_on}), which no client trains on; the test set has "
        "no part in the choice."
    )


def as_csv(table: SweepTable) -> str:
    """Return the runs as CSV text, one line each; times are left out, so that equal sweeps give equal files."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    fields = ("seed", "status", "figure", "test", "rounds", "bytes_up", "why", "directory")
    lines.writerow([*table.keys, *fields, "metric", "chosen_on"])
    for run in table.runs:
        values = [getattr(run, field) for field in fields]
        plain = ["" if value is None else value for value in values]
        lines.writerow([*_values(table, run.combination), *plain, table.metric, table.chosen_on])
    return text.getvalue()


def finite(value: float | None) -> float | None:
    """Return a number, or None if it is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None


def shown_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest of some values, never the same number twice.

    >>> shown_range([2.0, 1.0]), shown_range([1.0])
    ((1.0, 2.0), (0.5, 1.5))
    """
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 0.5, high + 0.5)
