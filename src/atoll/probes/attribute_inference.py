"""An attribute of samples that are known but for it, by the gradients that its values would make.

Shapes: C candidates, V values of the attribute, F features that say it, U = C V unknowns, S entries of a sketch of the
D parameters, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from atoll.core.probe import ATTRIBUTE, Guess, Hidden, Known, Probe, Samples, Sight, Work
from atoll.probes.rows import Row, rows_of

MOST = 2048
"""Unknowns of one row that are solved for at once; further candidates are taken as the usual guess has them."""
CHUNK = 64
"""Gradients that are made at once."""
DECAY = 1e-3
"""Weight decay of the regression that guesses the attribute from everything else."""
OTHERS = 200
"""Samples from elsewhere that stand for those of the client that nobody asks about."""
EVIDENCE = 61
"""Noise levels that are tried."""


def attribute_inference() -> Probe:
    """Solve for shares of an attribute's values whose gradients add up to the one that was seen.

    The update of a client whose records are known but for one column is matched by the gradients that each value of the
    column would make (Lyu and Chen 2021, arXiv:2108.06910, who search by the cosine). For one step this is
    linear: N g = sum_i sum_v a_iv grad L(x_i with v, y_i), with a_iv = 1 for the true value. Shares begin with what a
    regression on samples from elsewhere says of the column by all others, which is the part of such attacks that needs
    no update (Jayaraman and Evans 2022, arXiv:2209.01292). By how much they move, the noise decides that makes the seen
    gradient likeliest (MacKay 1992, Neural Computation 4(3), 415-447). Gradients of several steps are those halfway.
    """

    def run(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
        if work.candidates is None or work.hidden is None:
            return []
        prior_CV = imputed(known, work.candidates, work.hidden)
        score_CV = prior_CV.clone()
        for row in rows_of(known, sights):
            behind_C = torch.nonzero(work.hidden.row_C == row.place).flatten()[: MOST // prior_CV.shape[1]]
            if len(behind_C):
                own = Samples(work.candidates.x[behind_C], work.candidates.y[behind_C])
                score_CV[behind_C] = _solved(known, row, own, work.hidden, prior_CV[behind_C], work.rng)
            if work.is_over():
                break
        return [Guess(score_CV=score_CV)]

    return Probe(
        goal=ATTRIBUTE,
        run=run,
        why_not=_why_not,
        assumes="the server knows records of clients but for one column, and whose they are",
    )


def _why_not(known: Known, sights: Sequence[Sight]) -> str | None:
    if known.tokens or len(known.input_shape) != 1:
        return "samples are no rows of a table, in which one column could be unknown"
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in known.model.modules()):
        return "batch norm mixes samples, so that no gradient is that of one of them"
    if not any(num for sight in sights for num in sight.num_samples_R):
        return "clients do not say how many samples are behind what they send"
    return None


def with_value(x: Tensor, hidden: Hidden, value: int) -> Tensor:
    """Return samples whose attribute has this value."""
    filled = x.clone()
    filled[:, hidden.columns_F] = hidden.values_VF[value].to(x.dtype)
    return filled


def imputed(known: Known, candidates: Samples, hidden: Hidden) -> Tensor:
    """Return how likely each value is by all other columns, as samples from elsewhere have it; no update is needed."""
    own = known.elsewhere
    value_N = torch.cdist(own.x[:, hidden.columns_F].double(), hidden.values_VF.double()).argmin(1)

    def inputs(samples: Samples) -> Tensor:
        rest = samples.x.double().clone()
        rest[:, hidden.columns_F] = 0
        y = samples.y if samples.y.is_floating_point() else nn.functional.one_hot(samples.y.long(), known.num_classes)
        return torch.cat([rest, y.double().reshape(len(rest), -1), torch.ones(len(rest), 1, dtype=torch.float64)], 1)

    train, weights = inputs(own), torch.zeros(inputs(own).shape[1], len(hidden.values_VF), dtype=torch.float64)
    weights.requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(train @ weights, value_N) + DECAY * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return (inputs(candidates) @ weights.detach()).softmax(1)


def _solved(known: Known, row: Row, own: Samples, hidden: Hidden, prior_CV: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the shares of values that explain a row, (C, V)."""
    num_values, rest = prior_CV.shape[1], max(0, row.num_samples - len(own.x))
    middle_D = row.model_M[: len(row.delta_D)] + (row.delta_D / 2 if row.num_steps > 1 else 0)
    size = 2 * prior_CV.numel() + 2 * OTHERS
    place_D = torch.from_numpy(rng.integers(0, size, len(middle_D)))
    sign_D = torch.from_numpy(rng.choice([-1.0, 1.0], len(middle_D)))

    def sketch(rows: Tensor) -> Tensor:
        """Add up parameters at random, with random signs: sums stay sums, and there is less to solve."""
        found = torch.zeros(len(rows), size, dtype=torch.float64)
        return found.index_add_(1, place_D, rows.double() * sign_D)

    tried = [Samples(with_value(own.x, hidden, value), own.y) for value in range(num_values)]
    made_CVS = torch.stack([sketch_gradients(known, middle_D, each, sketch) for each in tried], 1)
    seen_S = sketch(row.mean_gradient().unsqueeze(0))[0] * (len(own.x) + rest)
    left_S = seen_S - (prior_CV.unsqueeze(2) * made_CVS).sum((0, 1))
    spread_CV = (prior_CV * (1 - prior_CV)).clamp(min=1e-12).sqrt()
    moves_CVS = (made_CVS - (prior_CV.unsqueeze(2) * made_CVS).sum(1, keepdim=True)) * spread_CV.unsqueeze(2)
    moves_US = moves_CVS.flatten(0, 1)
    if rest:  # samples that nobody asks about: as many as that from elsewhere, whose sum spreads like theirs
        others = Samples(known.elsewhere.x[:OTHERS], known.elsewhere.y[:OTHERS])
        other_NS = sketch_gradients(known, middle_D, others, sketch)
        left_S -= rest * other_NS.mean(0)
        moves_US = torch.cat([moves_US, (other_NS - other_NS.mean(0)) * (rest / len(other_NS)) ** 0.5])
    moved_U = _likeliest(moves_US.T, left_S)[: prior_CV.numel()]
    share_CV = prior_CV + spread_CV * moved_U.view(prior_CV.shape)
    return share_CV + (1 - share_CV.sum(1, keepdim=True)) * prior_CV  # along which no gradient changes


def sketch_gradients(known: Known, params_D: Tensor, samples: Samples, sketch: Any) -> Tensor:
    """Return the sketch of each sample's own gradient, (N, S)."""

    def loss(params_D: Tensor, x: Tensor, y: Tensor) -> Tensor:
        views = known.spec.without_buffers.views(params_D)
        outputs: Tensor = functional_call(known.model, views, (x.unsqueeze(0),))
        return known.loss(outputs, y.unsqueeze(0)).sum()

    each, found = vmap(grad(loss), (None, 0, 0), randomness="different"), list[Tensor]()
    for start in range(0, len(samples.x), CHUNK):
        x, y = samples.x[start : start + CHUNK], samples.y[start : start + CHUNK]
        found.append(sketch(each(params_D, x, y)))
    return torch.cat(found)


def _likeliest(moves_SU: Tensor, left_S: Tensor) -> Tensor:
    """Return the mean of unit Gaussian unknowns given sums of them in noise, whose level is the likeliest, (U,)."""
    side_SJ, scale_J, along_JU = torch.linalg.svd(moves_SU, full_matrices=False)
    seen_J, power_J = side_SJ.T @ left_S, scale_J.square()
    outside = float((left_S.square().sum() - seen_J.square().sum()).clamp(min=0))
    num_outside, best, level = len(left_S) - len(seen_J), -np.inf, 0.0
    for noise in (float(power_J.mean()) * np.logspace(-15, 6, EVIDENCE)).tolist():
        total_J = power_J + noise
        evidence = -float((seen_J.square() / total_J + total_J.log()).sum()) - outside / noise
        evidence -= num_outside * float(np.log(noise))
        if evidence > best:
            best, level = evidence, noise
    found_U: Tensor = along_JU.T @ (scale_J * seen_J / (power_J + level))
    return found_U
