"""FLTrust."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import along, combined, lengths
from atoll.core.aggregator import Aggregator, as_rows, individuals, over_vectors
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update


def fltrust() -> Aggregator:
    """Weigh each update by how well it points where the server's own update points, and give all the same length.

        t_i = max(0, cos(x_i, x_0)),   sum_i t_i x_i |x_0| / |x_i|  /  sum_i t_i

    (Cao et al. 2021, arXiv:2012.13995, equations 2 to 4.) x_0 is what the server trains, as a client does, on
    `server.samples` of the training set. Nobody is trusted beyond that: any n and any number of bad clients will do,
    and the result is never longer than x_0. If nobody points that way, nothing moves. Weights n_k are ignored.
    """

    def trust(acc: State, own: Update) -> State:
        return acc | {f"own.{name}": row for name, row in as_rows(own).items() if name != "weight"}

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        if "own.delta" not in acc:
            raise PlanError("fltrust compares with the server's own update: set server.samples, e.g. to 100")
        cohort = {name: rows for name, rows in acc.items() if not name.startswith("own.")}
        return over_vectors(cohort, lambda name, rows_CD: _trusted(rows_CD, acc[f"own.{name}"].reshape(-1))), memory

    return individuals(finish, min_updates=1, needs="", bounded=True)._replace(trust=trust)


def _trusted(rows_CD: Tensor, own_D: Tensor) -> Tensor:
    """The mean of the rows, stretched to the length of the server's own, by their trust scores."""
    length_C, own = lengths(rows_CD), own_D.double().norm()
    scale_C = torch.where(length_C > 0, own / length_C, 0.0)
    score_C = (along(rows_CD, own_D) * scale_C).clamp(min=0)  # the cosine times |x_0|^2, which cancels out
    total = score_C.sum()
    return combined(score_C * scale_C / total, rows_CD) if float(total) > 0 else torch.zeros_like(own_D)
