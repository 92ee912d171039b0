"""Copy one honest client. Shapes: C clients, H honest ones, D parameters."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.attacks.crafting import ALL_UPDATES, replaced
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import at_least


def mimic(row: Annotated[int, at_least(0)] | None = None) -> Attack:
    """Send what one honest client sends, so that it counts many times: the one that sticks out most.

        argmax_i |<z, x_i - mean>|,   z the direction in which honest updates vary most

    (Karimireddy et al. 2022, arXiv:2006.09365, section 3.2.) They settle on one client for all rounds; an
    attack remembers nothing here, so it is picked anew in each. With `row` it is the honest update of that number in
    the cohort, which is always the same client where everybody takes part.
    """

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        if bool(bad_C.all()):
            return updates
        chosen = _sticks_out(updates.delta_D[~bad_C]) if row is None else row % int((~bad_C).sum())
        return replaced(updates, bad_C, lambda honest_HD: honest_HD[chosen])

    return Attack(collude=collude, knows=ALL_UPDATES)


def _sticks_out(honest_HD: Tensor) -> int:
    """The row farthest out along the first principal direction, from the inner products of the rows."""
    away_HD = honest_HD.double() - honest_HD.double().mean(0)
    _, vector_HH = torch.linalg.eigh(away_HD @ away_HD.T)
    return int(vector_HH[:, -1].abs().argmax())  # <z, a_i> is the i-th entry times the singular value
