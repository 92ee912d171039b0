"""What attacks share that go from the honest mean in one direction as far as they dare. Shapes: H honest clients, D."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from atoll.attacks.crafting import ALL_UPDATES, replaced
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update

Direction = Literal["unit", "std", "sign"]
DIRECTIONS: dict[Direction, Callable[[Tensor], Tensor]] = {
    "unit": lambda honest_HD: -honest_HD.mean(0) / honest_HD.mean(0).norm().clamp(min=1e-30),
    "std": lambda honest_HD: -honest_HD.std(0, correction=0),
    "sign": lambda honest_HD: -honest_HD.mean(0).sign(),
}
"""Against the mean, against it by the spread of each coordinate, against its signs."""


def farthest(direction: Direction, reach: Callable[[Tensor, Tensor], Tensor]) -> Attack:
    """Send mean + gamma p, where `reach` says how large gamma may be for honest updates, less their mean, and p."""

    def vector(honest_HD: Tensor) -> Tensor:
        exact_HD = honest_HD.double()
        mean_D, step_D = exact_HD.mean(0), DIRECTIONS[direction](exact_HD)
        gamma = reach(exact_HD - mean_D, step_D) if bool(step_D.any()) else 0.0
        return (mean_D + gamma * step_D).to(honest_HD.dtype)

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        return replaced(updates, bad_C, vector)

    return Attack(collude=collude, knows=ALL_UPDATES)
