"""Copy one honest client. Shapes: C clients, H honest ones, D parameters."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from atoll.attacks.crafting import ALL_UPDATES, replace_bad_rows
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Update
from atoll.core.options import at_least


def mimic(row: Annotated[int, at_least(0)] | None = None) -> Attack:
    """Copy the update of one honest client, so that it counts many times: the one farthest from the mean.

        argmax_i |<z, x_i - mean>|,   z the direction in which honest updates vary most

    (Karimireddy et al. 2022, arXiv:2006.09365, section 3.2.) The paper chooses one client for all rounds; attacks have
    no memory here, so that it is chosen anew in each round. `row` chooses an honest update by its number in the cohort,
    which is always the same client if all clients take part.
    """

    def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
        if bool(bad_C.all()):
            return updates
        chosen = _farthest_row(updates.delta_D[~bad_C]) if row is None else row % int((~bad_C).sum())
        return replace_bad_rows(updates, bad_C, lambda honest_HD: honest_HD[chosen])

    return Attack(collude=collude, knows=ALL_UPDATES)


def _farthest_row(honest_HD: Tensor) -> int:
    """Return the row farthest from the mean along the first principal direction, by the inner products of the rows."""
    centred_HD = honest_HD.double() - honest_HD.double().mean(0)
    _, eigenvector_HH = torch.linalg.eigh(centred_HD @ centred_HD.T)
    return int(eigenvector_HH[:, -1].abs().argmax())  # <z, a_i> is the i-th entry times the singular value
