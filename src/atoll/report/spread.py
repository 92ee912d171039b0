"""Figures over seeds: mean and standard deviation, and their text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from atoll.report.main_figure import SHARES


class Spread(NamedTuple):
    """A number over seeds."""

    mean: float
    std: float | None
    """The sample standard deviation; None for one seed."""


def over_seeds(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation.

    >>> over_seeds([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0)
    """
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def figure_text(metric: str, value: Spread) -> str:
    """Return a figure over seeds as text, shares in percent.

    >>> figure_text("accuracy", Spread(0.5, 0.01)), figure_text("rmse", Spread(0.69587, None))
    ('50.00 ± 1.00 %', '0.6959')
    """
    if math.isnan(value.mean):
        return "not finite"
    if metric in SHARES:
        deviation = "" if value.std is None else f" ± {100 * value.std:.2f}"
        return f"{100 * value.mean:.2f}{deviation} %"
    return f"{value.mean:.4g}" + ("" if value.std is None else f" ± {value.std:.2g}")
