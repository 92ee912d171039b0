"""Train a backdoor into the model."""

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
    replacement: with boost = cohort / server.lr / bad clients the model becomes the attacker's.) The trigger covers the
    corner of highest row and column, or the last `size` features of a flat sample; `value` is its value after the
    scaling of the data. For a single-shot attack set `attackers.start_round` and `attackers.num_rounds = 1`.
    """

    def data(x: Tensor, y: Tensor, known: Knowledge) -> tuple[Tensor, Tensor]:
        check_class("backdoor: attack.target", target, known)
        if not x.dtype.is_floating_point or y.dim() > 1:
            raise PlanError(
                "backdoor needs numeric features and one label per sample, which token data do not have: use sign_flip"
            )
        ends = torch.floor(torch.arange(len(y) + 1, dtype=torch.float64) * share + 1e-9)
        chosen = (ends[1:] > ends[:-1]).to(x.device)  # spread evenly over a batch of any length
        mask = chosen.view(-1, *[1] * (x.dim() - 1))
        return torch.where(mask, with_trigger(x, size, value), x), torch.where(chosen, target, y)

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=boost * honest.delta_D)

    return Attack(
        data=data,
        update=update if boost != 1 else None,
        knows="its own data and update; to replace the model, the size of a cohort",
        trigger=lambda x: with_trigger(x, size, value),
        target=target,
        needs_classes=True,
    )


def with_trigger(x: Tensor, size: int, value: float) -> Tensor:
    """Return a copy of the samples with the trigger painted on."""
    painted = x.clone()
    corner = painted[..., -size:, -size:] if x.dim() > 2 else painted[..., -size:]
    corner.fill_(value)
    return painted
