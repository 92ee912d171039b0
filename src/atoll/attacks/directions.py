"""Attacks that move from the honest mean in a direction, up to a bound. Shapes: H honest clients, D parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from atoll.attacks.crafting import ALL_UPDATES, replace_bad_rows
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update

Direction = Literal["unit", "std", "sign"]
DIRECTIONS: dict[Direction, Callable[[Tensor], Tensor]] = {
    "unit": lambda honest_HD: -honest_HD.mean(0) / honest_HD.mean(0).norm().clamp(min=1e-30),
    "std": lambda honest_HD: -honest_HD.std(0, correction=0),
    "sign": lambda honest_HD: -honest_HD.mean(0).sign(),
}
"""(honest_HD) -> p (D,): minus the unit mean, minus the standard deviations, minus the signs of the mean."""


def along_direction(direction: Direction, max_gamma: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    """Send mean + gamma p, with the gamma that `max_gamma` returns for the centred honest updates and p."""

    def vector(honest_HD: Tensor) -> Tensor:
        exact_HD = honest_HD.double()
        mean_D, step_D = exact_HD.mean(0), DIRECTIONS[direction](exact_HD)
        gamma = max_gamma(exact_HD - mean_D, step_D) if bool(step_D.any()) else 0.0
        return (mean_D + gamma * step_D).to(honest_HD.dtype)

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        return replace_bad_rows(updates, bad_C, vector)

    return Attack(collude=collude, knows=ALL_UPDATES)
