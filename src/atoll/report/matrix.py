"""The outcomes of attacks against defences: means over seeds, the worst case, the table and the CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.report.reading import NONE

NO_ATTACK = "no attack"
"""What the baseline is called, where the name of an attack would stand."""

Status = Literal["done", "impossible", "failed"]
Measure = Literal["accuracy", "attack_success"]


class Outcome(NamedTuple):
    """How one cell ended: an attack against a defence, with f bad clients and one seed."""

    attack: str
    defence: str
    f: int
    seed: int
    status: Status
    accuracy: float | None = None
    """Test accuracy after the last round; that of guessing, one over the number of classes, if the model diverged."""
    attack_success: float | None = None
    """Share of samples of other classes that the trigger turns into the target, where the attack has one."""
    rounds: int = 0
    why: str = ""
    """Why it could not be run, failed or diverged."""
    directory: str = ""
    """Its run directory, seen from that of the matrix."""


class Worst(NamedTuple):
    """The attack that hurts a defence most, by the mean over the seeds, and what could not be counted."""

    accuracy: float | None
    attack: str
    attack_success: float | None
    """The highest of any attack that has a target."""
    missing: tuple[str, ...]
    """Attacks of which a cell gave no number."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All outcomes, with the order in which attacks, defences and numbers of bad clients were given."""

    title: str
    attacks: tuple[str, ...]
    """The baseline is not among them."""
    targeted: frozenset[str]
    """Attacks that have a target."""
    defences: tuple[str, ...]
    f: tuple[int, ...]
    seeds: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    def of(self, attack: str, defence: str, f: int) -> list[Outcome]:
        """The outcomes of one pair, one a seed."""
        return [each for each in self.outcomes if each[:3] == (attack, defence, f)]

    def mean(self, measure: Measure, attack: str, defence: str, f: int) -> float | None:
        """The mean over the seeds that gave a number, or None."""
        found = [getattr(each, measure) for each in self.of(attack, defence, f)]
        numbers = [value for value in found if value is not None]
        return sum(numbers) / len(numbers) if numbers else None

    def problem(self, attack: str, defence: str, f: int) -> Status | None:
        """What became of the seeds of a pair that gave no number, or None if all did."""
        return next((each.status for each in self.of(attack, defence, f) if each.status != "done"), None)

    def worst(self, defence: str, f: int) -> Worst:
        """The lowest accuracy and the highest attack success of a defence under any of the attacks."""
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
        """The cells that gave no number."""
        return [each for each in self.outcomes if each.status != "done"]


def as_csv(matrix: Matrix) -> str:
    """One line a cell."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(Outcome._fields)
    lines.writerows([["" if value is None else value for value in each] for each in matrix.outcomes])
    return text.getvalue()


def worst_rows(matrix: Matrix) -> tuple[list[str], list[list[str]]]:
    """The worst case of each defence as a table: its titles and its cells as text."""
    head = ["defence", "f", NO_ATTACK, "worst attack", "accuracy"]
    head += ["attack success, at most"] if matrix.targeted else []
    head += ["not counted"] if any(each.attack != NO_ATTACK for each in matrix.problems) else []
    rows = []
    for defence in matrix.defences:
        for f in matrix.f:
            worst, plain = matrix.worst(defence, f), matrix.mean("accuracy", NO_ATTACK, defence, f)
            row = [defence, str(f), percent(plain), worst.attack or NONE, percent(worst.accuracy)]
            row += [percent(worst.attack_success)] if matrix.targeted else []
            missing = "all attacks" if worst.missing == matrix.attacks else ", ".join(worst.missing)
            row += [missing] if "not counted" in head else []
            rows.append(row)
    return head, rows


def worst_text(matrix: Matrix) -> str:
    """The worst case of each defence, for a terminal."""
    head, rows = worst_rows(matrix)
    return aligned([head, *rows])


def problems_text(matrix: Matrix) -> str:
    """What gave no number and why, in one line for all cells that share the reason."""
    alike: dict[tuple[str, str, int, str], list[Outcome]] = {}
    for each in matrix.problems:
        alike.setdefault((each.status, each.defence, each.f, each.why), []).append(each)
    lines = []
    for (status, defence, f, why), cells in alike.items():
        who = ", ".join(dict.fromkeys(each.attack for each in cells))
        lines.append(f"{status}: {defence} with f = {f} against {who}: {why}")
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, each as wide as its widest cell.

    >>> print(aligned([["rule", "f"], ["mean", "1"]]))
    rule  f
    mean  1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def percent(value: float | None) -> str:
    """A share with one digit after the point."""
    return NONE if value is None else f"{100 * value:.1f} %"
