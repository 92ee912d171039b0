"""Inner product manipulation. Shapes: C clients, H honest ones, D parameters."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atoll.attacks.crafting import ALL_AND_RULE, ALL_UPDATES, point_on_line, replace_bad_rows, strongest_factor
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update


def ipm(factor: float | Literal["optimised"] = 0.5) -> Attack:
    """Send -factor times the mean of the honest updates (Xie et al. 2020, arXiv:1903.03936).

    A small factor is hard to detect and still makes the inner product with the true direction negative; "optimised"
    searches the factor that moves the aggregate most.
    """

    def line(honest_HD: Tensor) -> tuple[Tensor, Tensor]:
        mean_D = honest_HD.mean(0)
        return torch.zeros_like(mean_D), -mean_D

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        scale = strongest_factor(updates, bad_C, known, line) if isinstance(factor, str) else factor
        return replace_bad_rows(updates, bad_C, point_on_line(line, scale))

    return Attack(collude=collude, knows=ALL_AND_RULE if factor == "optimised" else ALL_UPDATES)
