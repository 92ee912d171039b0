"""FLTrust."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregators.columns import inner_products, row_norms, weighted_sum
from atoll.core.aggregator import Aggregator, as_rows, keep_rows, over_vectors
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update


def fltrust() -> Aggregator:
    """Weigh each update by its cosine with the server's own update, and scale all to the same norm.

        t_i = max(0, cos(x_i, x_0)),   sum_i t_i x_i |x_0| / |x_i|  /  sum_i t_i

    (Cao et al. 2021, arXiv:2012.13995, equations 2 to 4.) x_0 is the update that the server trains, as a client does,
    on `server.samples` of the training set. Any n and any number of bad clients are allowed: the result is never longer
    than x_0. If no update has a positive cosine, the result is 0. Weights n_k are ignored.
    """

    def add_server_update(acc: State, own: Update) -> State:
        return acc | {f"own.{name}": row for name, row in as_rows(own).items() if name != "weight"}

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        if "own.delta" not in acc:
            raise PlanError("fltrust compares with the server's own update: set server.samples, e.g. to 100")
        cohort = {name: rows for name, rows in acc.items() if not name.startswith("own.")}
        return over_vectors(cohort, lambda name, rows_CD: _trust_mean(rows_CD, acc[f"own.{name}"].reshape(-1))), memory

    return keep_rows(finish, min_updates=1, needs="", bounded=True)._replace(add_server_update=add_server_update)


def _trust_mean(rows_CD: Tensor, own_D: Tensor) -> Tensor:
    """Return the mean of the rows by their trust scores, each row scaled to the norm of the server's own update."""
    norm_C, own_norm = row_norms(rows_CD), own_D.double().norm()
    scale_C = torch.where(norm_C > 0, own_norm / norm_C, 0.0)
    score_C = (inner_products(rows_CD, own_D) * scale_C).clamp(min=0)  # the cosine times |x_0|^2, which cancels out
    total = score_C.sum()
    return weighted_sum(score_C * scale_C / total, rows_CD) if float(total) > 0 else torch.zeros_like(own_D)
