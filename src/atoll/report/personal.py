"""Outcomes of personal methods beside training alone and one model for all. Shapes: C clients of all seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from atoll.commit.finish import without_nan
from atoll.report.figures import Array
from atoll.report.main_figure import SHARES, title_of
from atoll.report.matrix import aligned
from atoll.report.reading import NONE, human_bytes, human_seconds
from atoll.report.spread import Spread, figure_text, over_seeds
from atoll.train.metrics import spread

ALONE, GLOBAL = "local", "fedavg"
"""The two that every table has: training alone, and one model for all."""

COLUMNS: Mapping[str, tuple[str, str]] = {
    "mean": ("{figure}", "mean over clients of the {figure} on the samples that each holds out"),
    "gain": ("over alone", "by how much that is better than alone with the same seed"),
    "worst": ("worst tenth", "the same over the tenth of clients that fares worst"),
    "better": ("better off", "share of clients that fare better than alone; ties are not better"),
    "shared": ("shared model", "the {figure} of the model that all share, on the same samples"),
    "bytes_up": ("up", "bytes that a client sends in a round"),
    "travels": ("travel", "values that a client sends in a round, before codecs"),
    "kept": ("kept", "values that a client keeps from round to round"),
    "rounds": ("rounds", "rounds of the run; fewer where steps of adaptation follow"),
    "steps": ("local steps", "steps of a client, training and adaptation; no more than alone"),
    "gradients": ("gradients", "backward passes in each of these steps"),
    "seconds": ("time", "time of a run on this machine, beside other runs"),
}
"""Column -> its title, and what it holds."""

Status = Literal["done", "refused", "failed"]


@dataclass(frozen=True, kw_only=True)
class MethodRun:
    """One method with one seed."""

    method: str
    seed: int
    status: Status = "done"
    why: str = ""
    """Why the plan was refused or the run failed."""
    own: tuple[float | None, ...] = ()
    """The main figure of each measured client's model, in the order of the clients of this seed."""
    shared: tuple[float | None, ...] | None = None
    rounds: int = 0
    steps: float = 0.0
    """Local steps a measured client, training and adaptation."""
    exact: bool = True
    """Whether clients were asked as expected, so that their steps are counted and not estimated."""
    gradients: int = 0
    travels: int = 0
    kept: int = 0
    bytes_up: float = 0.0
    """Bytes that a client sends in a round."""
    seconds: float = 0.0
    directory: str = ""
    """Run directory, relative to that of the table."""


class Clients(NamedTuple):
    """The clients of one seed."""

    measured: tuple[int, ...]
    num_clients: int
    others: Mapping[str, int]
    """Reason for which clients are not measured -> their number."""


class Row(NamedTuple):
    """A method over seeds; shares, figures and counts as numbers."""

    mean: Spread
    gain: Spread
    """By how much the mean is better than alone, seed by seed."""
    worst: Spread
    better: Spread
    shared: Spread | None
    bytes_up: Spread
    travels: Spread
    kept: Spread
    rounds: Spread
    steps: Spread
    gradients: Spread
    seconds: Spread


@dataclass(frozen=True, kw_only=True)
class PersonalTable:
    """All runs, with the methods in the order of the command."""

    title: str
    metric: str
    larger_is_better: bool
    rounds: int
    seeds: tuple[int, ...]
    methods: tuple[str, ...]
    clients: Mapping[int, Clients]
    """Seed -> its clients, for seeds whose clients have trained alone."""
    runs: tuple[MethodRun, ...]
    protection: str = ""
    """What protects clients of the plan, which the table does not respect; "" if nothing does."""
    _by_name: dict[str, dict[int, MethodRun]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for run in self.runs:
            self._by_name.setdefault(run.method, {})[run.seed] = run

    def done(self, method: str) -> list[MethodRun]:
        """Return the runs of a method that can be compared with training alone."""
        runs = self._by_name.get(method, {}).values()
        return [run for run in runs if run.status == "done" and run.seed in self.clients]

    def gains(self, run: MethodRun) -> Array:
        """Return by how much each client fares better than alone with the same seed, (C,); NaN if it has no figure."""
        alone_C = figures(self._by_name[ALONE][run.seed].own)
        return (figures(run.own) - alone_C) * (1 if self.larger_is_better else -1)

    def row(self, method: str) -> Row | None:
        """Return the numbers of a method, or None if no run of it can be compared."""
        runs = self.done(method)
        if not runs:
            return None
        shared = [run.shared for run in runs if run.shared is not None]
        return Row(
            mean=over_seeds([mean_of(run.own) for run in runs]),
            gain=over_seeds([float(self.gains(run).mean()) for run in runs]),
            worst=over_seeds([self._worst(run.own) for run in runs]),
            better=over_seeds([float((self.gains(run) > 0).mean()) for run in runs]),
            shared=over_seeds([mean_of(each) for each in shared]) if shared else None,
            **{
                name: over_seeds([float(getattr(run, name)) for run in runs])
                for name in ("bytes_up", "travels", "kept", "rounds", "steps", "gradients", "seconds")
            },
        )

    def ranked(self) -> list[str]:
        """Return the methods that have numbers: training alone, one model for all, then the others from the best on."""
        rows = {method: row for method in self.methods if (row := self.row(method)) is not None}
        sign = -1 if self.larger_is_better else 1

        def key(method: str) -> tuple[bool, float]:
            mean = rows[method].mean.mean
            return math.isnan(mean), sign * mean

        first = [method for method in (ALONE, GLOBAL) if method in rows]
        return first + sorted((method for method in rows if method not in first), key=key)

    @property
    def problems(self) -> list[MethodRun]:
        """The runs without numbers."""
        return [run for run in self.runs if run.status != "done" or run.seed not in self.clients]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, as in personal.json."""
        rows = {method: row for method in self.methods if (row := self.row(method)) is not None}
        return without_nan(  # type: ignore[no-any-return]
            {
                "title": self.title,
                "metric": self.metric,
                "larger_is_better": self.larger_is_better,
                "rounds": self.rounds,
                "seeds": list(self.seeds),
                "protection": self.protection,
                "notes": notes(self),
                "clients": {str(seed): clients._asdict() for seed, clients in self.clients.items()},
                "methods": {method: _plain(row) for method, row in rows.items()},
                "runs": [asdict(run) for run in self.runs],
            }
        )

    def _worst(self, own: tuple[float | None, ...]) -> float:
        own_C = figures(own)
        if np.isnan(own_C).any():
            return math.nan
        return spread(own_C, own_C, larger_is_better=self.larger_is_better)["worst_decile"]


def figures(values: Sequence[float | None]) -> Array:
    """Return figures as an array, NaN for those that are missing."""
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def mean_of(values: Sequence[float | None]) -> float:
    """Return the mean over clients, NaN if one has no figure: leaving it out would flatter."""
    return float(figures(values).mean())


def _plain(row: Row) -> dict[str, Any]:
    return {name: None if value is None else value._asdict() for name, value in row._asdict().items()}


def table_rows(table: PersonalTable) -> tuple[list[str], list[list[str]]]:
    """Return the titles, and a row of cells as text for each method that has numbers."""
    figure = title_of(table.metric)
    head = ["method", *(title.format(figure=figure) for title, _ in COLUMNS.values())]
    rows = []
    for method in table.ranked():
        row = table.row(method)
        assert row is not None
        star = "*" * (len(table.done(method)) < len(table.seeds))
        about = "" if all(run.exact for run in table.done(method)) else "≈ "
        cells = [
            figure_text(table.metric, row.mean),
            NONE if method == ALONE else gain_text(table.metric, row.gain),
            figure_text(table.metric, row.worst),
            _share_text(row.better),
            NONE if row.shared is None else figure_text(table.metric, row.shared),
            human_bytes(row.bytes_up.mean),
            f"{row.travels.mean:,.0f}",
            f"{row.kept.mean:,.0f}",
            f"{row.rounds.mean:g}",
            f"{about}{row.steps.mean:,.4g}",
            f"{row.gradients.mean:g}",
            human_seconds(row.seconds.mean),
        ]
        rows.append([f"{method}{star}", *cells])
    return head, rows


def gain_text(metric: str, value: Spread) -> str:
    """Return a difference of figures over seeds as text, of shares in percentage points.

    >>> gain_text("accuracy", Spread(0.015, 0.002)), gain_text("rmse", Spread(-0.1, None))
    ('+1.50 ± 0.20 points', '-0.1')
    """
    if math.isnan(value.mean):
        return "not finite"
    if metric in SHARES:
        deviation = "" if value.std is None else f" ± {100 * value.std:.2f}"
        return f"{100 * value.mean:+.2f}{deviation} points"
    return f"{value.mean:+.4g}" + ("" if value.std is None else f" ± {value.std:.2g}")


def _share_text(value: Spread) -> str:
    deviation = "" if value.std is None else f" ± {100 * value.std:.1f}"
    return f"{100 * value.mean:.1f}{deviation} %"


def table_text(table: PersonalTable) -> str:
    """Return the table and what must be known to read it, for a terminal."""
    head, rows = table_rows(table)
    return "\n".join([aligned([head, *rows]), "", *notes(table)])


def notes(table: PersonalTable) -> list[str]:
    """Return what must be known to read the table, a sentence or two each."""
    num = len(table.seeds)
    over = f"mean and standard deviation over {num} seeds" if num > 1 else "of one seed"
    better = "larger" if table.larger_is_better else "smaller"
    lines = [
        f"Figures are {over}; a {better} {title_of(table.metric)} is better. With a seed all methods have the same "
        f"samples and batches, and no more local steps than training alone ({ALONE}), which sends nothing."
    ]
    if not all(run.exact for run in table.runs):
        lines.append("≈: clients were not asked as expected, so that cohorts differ and steps are estimated.")
    lines += [_clients_text(seed, clients) for seed, clients in table.clients.items()]
    for method in unequal(table):
        lines.append(
            f"{method} took more local steps than training alone, because clients were not asked as expected: do not "
            "compare it."
        )
    if any(len(table.done(method)) < num for method in table.ranked()):
        lines.append("A star: some seeds have no result.")
    if table.protection:
        lines.append(
            f"The plan has {table.protection}, which this table does not respect: it looks at each client's model and "
            "samples. It is the researcher's, on data that need no protection, and no guarantee covers it."
        )
    return lines


def unequal(table: PersonalTable) -> list[str]:
    """Return the methods whose clients took more local steps than alone."""
    rows = {method: row for method in table.ranked() if (row := table.row(method)) is not None}
    most = rows[ALONE].steps.mean if ALONE in rows else math.inf
    return [method for method, row in rows.items() if row.steps.mean > most * (1 + 1e-9)]


def _clients_text(seed: int, clients: Clients) -> str:
    others = ", ".join(f"{reason} {num}" for reason, num in clients.others.items())
    measured = f"Seed {seed}: {len(clients.measured)} of {clients.num_clients} clients are measured"
    return f"{measured}; others: {others}." if others else f"{measured}."


def problems_text(table: PersonalTable) -> str:
    """Return the methods without a result and the reasons, one line for all seeds with the same reason."""
    return "\n".join(f"{status}: {method}{seeds}: {why}" for status, method, seeds, why in problem_rows(table))


def problem_rows(table: PersonalTable) -> list[tuple[str, str, str, str]]:
    """Return status, method, seeds unless it is all of them, and reason of what has no result."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for run in table.problems:
        status, why = (run.status, run.why) if run.status != "done" else ("failed", f"{ALONE} has no result to compare")
        groups.setdefault((status, run.method, why), []).append(run.seed)
    return [
        (status, method, "" if len(seeds) == len(table.seeds) else f" (seed {', '.join(map(str, seeds))})", why)
        for (status, method, why), seeds in groups.items()
    ]
