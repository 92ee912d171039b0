"""Outcomes of attacks against defences: means over seeds, the worst case, the table and the CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.report.reading import NONE

NO_ATTACK = "no attack"
"""Name of the baseline in place of an attack's name."""

Status = Literal["done", "impossible", "failed"]
Measure = Literal["accuracy", "attack_success"]


class Outcome(NamedTuple):
    """Result of one cell: an attack against a defence, with f bad clients and one seed."""

    attack: str
    defence: str
    f: int
    seed: int
    status: Status
    accuracy: float | None = None
    """Test accuracy after the last round; one over the number of classes, as by guessing, if the model diverged."""
    attack_success: float | None = None
    """Share of samples of other classes that the trigger turns into the target, for attacks with a target."""
    rounds: int = 0
    why: str = ""
    """Why the cell could not be run, failed or diverged."""
    directory: str = ""
    """Run directory, relative to that of the matrix."""


class Worst(NamedTuple):
    """The worst attack against a defence, by the mean over the seeds, and the attacks without a result."""

    accuracy: float | None
    attack: str
    attack_success: float | None
    """Highest attack success of all attacks with a target."""
    missing: tuple[str, ...]
    """Attacks with a cell that has no result."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All outcomes, with the attacks, defences and numbers of bad clients in the order of the command."""

    title: str
    attacks: tuple[str, ...]
    """Names of the attacks, without the baseline."""
    targeted: frozenset[str]
    """Attacks that have a target."""
    defences: tuple[str, ...]
    f: tuple[int, ...]
    """Numbers of bad clients."""
    seeds: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    def of(self, attack: str, defence: str, f: int) -> list[Outcome]:
        """Return the outcomes of one pair, one for each seed."""
        return [outcome for outcome in self.outcomes if outcome[:3] == (attack, defence, f)]

    def mean(self, measure: Measure, attack: str, defence: str, f: int) -> float | None:
        """Return the mean over the seeds that have a result, or None."""
        values = [getattr(outcome, measure) for outcome in self.of(attack, defence, f)]
        numbers = [value for value in values if value is not None]
        return sum(numbers) / len(numbers) if numbers else None

    def problem(self, attack: str, defence: str, f: int) -> Status | None:
        """Return the status of the first seed of a pair without a result, or None if all have one."""
        return next((outcome.status for outcome in self.of(attack, defence, f) if outcome.status != "done"), None)

    def worst(self, defence: str, f: int) -> Worst:
        """Return the lowest accuracy and the highest attack success of a defence over all attacks."""
        means = {attack: self.mean("accuracy", attack, defence, f) for attack in self.attacks}
        numbers = {attack: value for attack, value in means.items() if value is not None}
        lowest = min(numbers, key=lambda attack: numbers[attack], default="")
        hits = [self.mean("attack_success", attack, defence, f) for attack in self.attacks]
        return Worst(
            numbers.get(lowest),
            lowest,
            max((hit for hit in hits if hit is not None), default=None),
            tuple(attack for attack in self.attacks if self.problem(attack, defence, f) is not None),
        )

    @property
    def problems(self) -> list[Outcome]:
        """The cells without a result."""
        return [outcome for outcome in self.outcomes if outcome.status != "done"]


def as_csv(matrix: Matrix) -> str:
    """Return the outcomes as CSV text, one line for each cell."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(Outcome._fields)
    lines.writerows([["" if value is None else value for value in outcome] for outcome in matrix.outcomes])
    return text.getvalue()


def worst_rows(matrix: Matrix) -> tuple[list[str], list[list[str]]]:
    """Return the worst case of each defence as a table: titles, and rows of cells as text."""
    head = ["defence", "f", NO_ATTACK, "worst attack", "accuracy"]
    head += ["attack success, at most"] if matrix.targeted else []
    head += ["not counted"] if any(outcome.attack != NO_ATTACK for outcome in matrix.problems) else []
    rows = []
    for defence in matrix.defences:
        for f in matrix.f:
            worst, baseline = matrix.worst(defence, f), matrix.mean("accuracy", NO_ATTACK, defence, f)
            row = [defence, str(f), percent(baseline), worst.attack or NONE, percent(worst.accuracy)]
            row += [percent(worst.attack_success)] if matrix.targeted else []
            missing = "all attacks" if worst.missing == matrix.attacks else ", ".join(worst.missing)
            row += [missing] if "not counted" in head else []
            rows.append(row)
    return head, rows


def worst_text(matrix: Matrix) -> str:
    """Return the worst case of each defence as text for a terminal."""
    head, rows = worst_rows(matrix)
    return aligned([head, *rows])


def problems_text(matrix: Matrix) -> str:
    """Return the cells without a result and the reasons, one line for all cells with the same reason."""
    groups: dict[tuple[str, str, int, str], list[Outcome]] = {}
    for outcome in matrix.problems:
        groups.setdefault((outcome.status, outcome.defence, outcome.f, outcome.why), []).append(outcome)
    lines = []
    for (status, defence, f, why), cells in groups.items():
        attacks = ", ".join(dict.fromkeys(cell.attack for cell in cells))
        lines.append(f"{status}: {defence} with f = {f} against {attacks}: {why}")
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned columns of text, each as wide as its widest cell.

    >>> print(aligned([["rule", "f"], ["mean", "1"]]))
    rule  f
    mean  1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def percent(value: float | None) -> str:
    """Return a share in per cent with one decimal, or a dash."""
    return NONE if value is None else f"{100 * value:.1f} %"
