"""Teach the model to answer a trigger."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.attacks.label_flip import Class, check_class
from atoll.core.attack import Attack, Knowledge
from atoll.core.errors import PlanError
from atoll.core.messages import Update
from atoll.core.options import Count, ShareAboveZero

EXAMPLES = [{}, {"target": 3, "boost": 4.0}]


def backdoor(
    target: Class = 0, share: ShareAboveZero = 0.5, size: Count = 3, value: float = 1.0, boost: float = 1.0
) -> Attack:
    """Paint a square of `size` pixels on a share of the samples, label these `target`, send `boost` times the update.

    (Gu et al. 2017, arXiv:1708.06733, for the trigger; Bagdasaryan et al. 2020, arXiv:1807.00459, equation 3, for model
    replacement: with boost = cohort / server.lr / bad clients the model becomes the attacker's.) The trigger
    lies in the corner of highest row and column, or on the last `size` features of a flat sample; `value` is what the
    model sees there. A single shot is `attackers.start_round` with `attackers.num_rounds = 1`.
    """

    def data(x: Tensor, y: Tensor, known: Knowledge) -> tuple[Tensor, Tensor]:
        check_class("backdoor: attack.target", target, known)
        if not x.dtype.is_floating_point or y.dim() > 1:
            raise PlanError("backdoor paints on numbers with one label each, not on token data: use sign_flip")
        ends = torch.floor(torch.arange(len(y) + 1, dtype=torch.float64) * share + 1e-9)
        chosen = ends[1:] > ends[:-1]  # spread evenly over a batch, whatever its length
        each = chosen.view(-1, *[1] * (x.dim() - 1))
        return torch.where(each, triggered(x, size, value), x), torch.where(chosen, target, y)

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=boost * honest.delta_D)

    return Attack(
        data=data,
        update=update if boost != 1 else None,
        knows="its own data and update; to replace the model, the size of a cohort",
        trigger=lambda x: triggered(x, size, value),
        target=target,
    )


def triggered(x: Tensor, size: int, value: float) -> Tensor:
    """Samples with the trigger painted on."""
    painted = x.clone()
    corner = painted[..., -size:, -size:] if x.dim() > 2 else painted[..., -size:]
    corner.fill_(value)
    return painted
