"""How far clients pull apart: gradients, minima and drift. Shapes: C clients, D parameters, S samples of some clients.

F_k is the plan's loss, averaged over all that client k trains on, and F = sum_k p_k F_k with p_k = n_k / n over the
clients given. All is float64 and without randomness: dropout is off and batch norm uses the statistics in the vector,
whose gradient counts as 0. What an algorithm adds to the loss, and attacks, play no part.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import functional_call

from atoll.core.errors import PlanError
from atoll.train.dropout import CounterDropout
from atoll.train.job import Job
from atoll.train.losses.cross_entropy import plain_cross_entropy

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[str, int, int], None]
"""Is told what is measured, how many clients are done, and of how many."""

BATCH, LINEAR_BATCH = 100, 4000
"""Samples that are differentiated together, so that memory does not grow with a client; a linear layer needs little."""
TOLERANCE = 1e-5
"""The gradient norm at which a minimum counts as found."""
KEEP_CONVEX = (nn.Sequential, nn.Flatten, nn.Identity, nn.Linear, CounterDropout)


def silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


class Smooth(NamedTuple):
    """A job's loss as a function of a flat float64 vector, with its slope and its curvature."""

    job: Job
    model: nn.Module
    batch: int

    def value(self, params_D: Tensor, part_S: Array, num: int) -> Tensor:
        """What these samples add to a mean over `num` samples."""
        federation, index_S = self.job.federation, torch.from_numpy(part_S)
        x = federation.features(federation.take(index_S))
        x = x.double() if x.dtype.is_floating_point else x
        named = self.job.spec.views(params_D)
        named |= {slot.name: named[slot.name].detach() for slot in self.job.spec.buffers}
        outputs = functional_call(self.model, named, (x,))
        return self.job.loss(outputs, federation.train_y[index_S]).sum() / num

    def slope(self, params_D: Tensor, indices_S: Array) -> tuple[float, Tensor]:
        """The mean loss of some samples, and its gradient."""
        loss, grad_D = 0.0, torch.zeros_like(params_D)
        for start in range(0, len(indices_S), self.batch):
            leaf_D = params_D.detach().requires_grad_()
            share = self.value(leaf_D, indices_S[start : start + self.batch], len(indices_S))
            grad_D += torch.autograd.grad(share, leaf_D)[0]
            loss += share.item()
        return loss, grad_D

    def bend(self, params_D: Tensor, indices_S: Array, along_D: Tensor) -> Tensor:
        """The Hessian of the mean loss of some samples times a vector: the gradient of (gradient . vector)."""
        product_D = torch.zeros_like(params_D)
        for start in range(0, len(indices_S), self.batch):
            leaf_D = params_D.detach().requires_grad_()
            share = self.value(leaf_D, indices_S[start : start + self.batch], len(indices_S))
            (grad_D,) = torch.autograd.grad(share, leaf_D, create_graph=True)
            product_D += torch.autograd.grad(grad_D @ along_D, leaf_D)[0]
        return product_D


def _smooth(job: Job) -> Smooth:
    """A float64 copy of the model, so that the job's own stays as it is."""
    batch = LINEAR_BATCH if is_convex(job) else BATCH
    smooth = Smooth(job, copy.deepcopy(job.model).double().eval(), batch)
    try:
        smooth.value(job.first_D.double(), np.zeros(1, dtype=np.int64), 1)
    except RuntimeError as error:
        raise PlanError(
            f"the model cannot be measured in float64: {error}; let it compute in the dtype of its parameters"
        ) from error
    return smooth


def shares(job: Job, clients: Sequence[int]) -> Array:
    """p_k = n_k / n of the given clients, (C,)."""
    if not len(clients):
        raise PlanError("there is no client to measure: name at least one")
    num_C = np.array([job.federation.num_samples(client) for client in clients], dtype=float)
    return np.asarray(num_C / num_C.sum())


def _slopes(
    job: Job, params_D: Tensor, clients: Sequence[int], progress: Progress = silent
) -> Iterator[tuple[float, Tensor]]:
    smooth, params_D = _smooth(job), params_D.double()
    for done, client in enumerate(clients, 1):
        yield smooth.slope(params_D, job.federation.train_indices(client))
        progress("gradients", done, len(clients))


def losses(job: Job, params_D: Tensor, clients: Sequence[int]) -> Tensor:
    """F_k of each client, (C,)."""
    return torch.tensor([loss for loss, _ in _slopes(job, params_D, clients)], dtype=torch.float64)


def gradients(job: Job, params_D: Tensor, clients: Sequence[int]) -> Tensor:
    """The gradient of F_k of each client, (C, D): for few clients, since all are held at once."""
    return torch.stack([grad_D for _, grad_D in _slopes(job, params_D, clients)])


@dataclass(frozen=True, kw_only=True)
class Dissimilarity:
    """How far the gradients of clients disagree at one vector; see `dissimilarity`."""

    loss: float
    """F."""
    norm: float
    """||grad F||."""
    norm_C: Array
    """||grad F_k||."""
    b: float
    """B."""
    diversity: float


def dissimilarity(job: Job, params_D: Tensor, clients: Sequence[int], progress: Progress = silent) -> Dissimilarity:
    """Bounded dissimilarity and gradient diversity; nothing of size (C, D) is held.

    B^2 = sum_k p_k ||grad F_k||^2 / ||grad F||^2, and B = 1 where both are 0 (Li et al. 2020, arXiv:1812.06127,
    definition 3). The diversity is sum_k ||grad F_k||^2 / ||sum_k grad F_k||^2 without weights (Yin et al. 2018,
    arXiv:1706.05699, definition 1); for C clients of equal size it is B^2 / C.
    """
    share_C, norm_C = shares(job, clients), np.zeros(len(clients))
    mean_D = torch.zeros_like(job.first_D, dtype=torch.float64)
    total_D, loss = mean_D.clone(), 0.0
    for row, (loss_k, grad_D) in enumerate(_slopes(job, params_D, clients, progress)):
        mean_D += share_C[row] * grad_D
        total_D += grad_D
        norm_C[row] = grad_D.norm()
        loss += share_C[row] * loss_k
    norm, square = float(mean_D.norm()), float(share_C @ norm_C**2)
    return Dissimilarity(
        loss=float(loss),
        norm=norm,
        norm_C=norm_C,
        b=1.0 if square == norm == 0 else math.sqrt(ratio(square, norm**2)),
        diversity=ratio(float((norm_C**2).sum()), float(total_D @ total_D)),
    )


def ratio(a: float, b: float) -> float:
    """Return a / b, with 0 / 0 = 0 and a / 0 = infinity."""
    return a / b if b else math.inf * a if a else 0.0


@dataclass(frozen=True, kw_only=True)
class Gamma:
    """F* - sum_k p_k F_k*, and how far to trust it; see `gamma`."""

    value: float
    convex: bool
    norm: float
    """The largest gradient norm that is left."""
    num_solved: int
    """How many solves met the tolerance."""
    num_solves: int
    """The clients, and all their data together."""
    tolerance: float

    @property
    def kind(self) -> Literal["solved", "estimate"]:
        """`solved` if the losses are convex and every solve met the tolerance; an estimate is no bound."""
        return "solved" if self.convex and self.num_solved == self.num_solves else "estimate"


def gamma(
    job: Job,
    params_D: Tensor,
    clients: Sequence[int],
    *,
    convex: bool,
    budget: int,
    tolerance: float = TOLERANCE,
    progress: Progress = silent,
) -> Gamma:
    """Gamma = F* - sum_k p_k F_k* (Li et al. 2020, arXiv:1907.02189, section 3).

    Each minimum is sought by at most `budget` steps of L-BFGS on all samples, from the given vector, until the gradient
    norm is at most `tolerance`. Where a minimum is not attained, such as the cross entropy of separable data or of a
    client that lacks a class, its infimum is approached from above. `is_convex` says what to pass as `convex`.
    """
    smooth, params_D = _smooth(job), params_D.double()
    parts = [job.federation.train_indices(client) for client in clients]
    weights = [1.0, *-shares(job, clients)]
    value, norms = 0.0, list[float]()
    for weight, indices_S in zip(weights, [np.concatenate(parts), *parts], strict=True):
        what = "steps to a client's minimum" if norms else "steps to the minimum of all samples"

        def stepped(num_steps: int, what: str = what) -> None:
            progress(what, num_steps, budget)

        lowest, norm = _minimum(smooth, params_D, indices_S, budget, tolerance, stepped)
        value += weight * lowest
        norms.append(norm)
        progress("minima", len(norms), len(weights))
    return Gamma(
        value=float(value),
        convex=convex,
        norm=max(norms),
        num_solved=sum(norm <= tolerance for norm in norms),
        num_solves=len(norms),
        tolerance=tolerance,
    )


def _minimum(
    smooth: Smooth,
    params_D: Tensor,
    indices_S: Array,
    budget: int,
    tolerance: float,
    stepped: Callable[[int], None],
) -> tuple[float, float]:
    """The loss that L-BFGS comes down to, and the gradient norm there; `stepped` hears how many steps are done."""
    num_steps = itertools.count(1)

    def slope(at_D: Array) -> tuple[float, Array]:
        loss, grad_D = smooth.slope(torch.from_numpy(at_D), indices_S)
        return loss, grad_D.numpy()

    largest = tolerance / math.sqrt(len(params_D))  # of one entry: then the norm is within the tolerance
    remembered = min(50, max(5, 2_000_000 // len(params_D)))  # steps: many help, as far as memory goes
    options = {"maxiter": budget, "maxfun": 20 * budget, "maxcor": remembered, "gtol": largest, "ftol": 0.0}
    found = minimize(
        slope,
        params_D.numpy(),
        jac=True,
        method="L-BFGS-B",
        options=options,
        callback=lambda at_D: stepped(next(num_steps)),
    )
    return float(found.fun), float(np.linalg.norm(found.jac))


def is_convex(job: Job) -> bool:
    """Whether every client's loss is surely convex: cross entropy on one linear layer, with nothing else that bends.

    The model is made of `nn.Sequential`, `nn.Flatten`, `nn.Identity` and dropout around one `nn.Linear`. Others may be
    convex too, but that cannot be seen from outside.
    """
    modules = list(job.model.modules())
    num_linear = sum(type(module) is nn.Linear for module in modules)
    return (
        job.loss is plain_cross_entropy and num_linear == 1 and all(type(module) in KEEP_CONVEX for module in modules)
    )


class FirstOrder(NamedTuple):
    """What client drift is made of, to first order in the step size."""

    grad_D: Tensor
    """grad F."""
    bent_D: Tensor
    """sum_k p_k H_k grad F_k."""
    central_D: Tensor
    """H grad F with H = sum_k p_k H_k: what one holder of all data would have in its place."""


def first_order(job: Job, params_D: Tensor, clients: Sequence[int], progress: Progress = silent) -> FirstOrder:
    """The gradient of F and the Hessian products that `drift` predicts from."""
    smooth, params_D = _smooth(job), params_D.double()
    parts = [job.federation.train_indices(client) for client in clients]
    grad_D, bent_D = torch.zeros_like(params_D), torch.zeros_like(params_D)
    for done, (share, indices_S) in enumerate(zip(shares(job, clients), parts, strict=True), 1):
        own_D = smooth.slope(params_D, indices_S)[1]
        grad_D += share * own_D
        bent_D += share * smooth.bend(params_D, indices_S, own_D)
        progress("curvature", done, len(parts))
    return FirstOrder(grad_D, bent_D, smooth.bend(params_D, np.concatenate(parts), grad_D))


def pseudo_gradient(
    job: Job, params_D: Tensor, clients: Sequence[int], *, lr: float, steps: int, progress: Progress = silent
) -> Tensor:
    """sum_k p_k (w - w_k^E) / (lr E) after E = `steps` full gradient steps of each client from the same vector w.

    It is summed as the mean of the gradients on the way, which is the same and loses no digits to a small lr.
    """
    smooth, params_D = _smooth(job), params_D.double()
    mean_D = torch.zeros_like(params_D)
    for done, (share, client) in enumerate(zip(shares(job, clients), clients, strict=True), 1):
        at_D, indices_S = params_D.clone(), job.federation.train_indices(client)
        for _ in range(steps):
            grad_D = smooth.slope(at_D, indices_S)[1]
            mean_D += share / steps * grad_D
            at_D -= lr * grad_D
        progress("drift", done, len(clients))
    return mean_D


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Norms of the bias that local steps give the pseudo-gradient; see `drift`."""

    lr: float
    steps: int
    measured: float
    predicted: float
    gap: float
    """||measured - predicted|| / ||measured||."""
    between: float
    """The part of the prediction that is there because clients differ."""
    gradient: float
    """||grad F||."""


def drift(
    job: Job,
    params_D: Tensor,
    clients: Sequence[int],
    first: FirstOrder,
    *,
    lr: float,
    steps: int,
    progress: Progress = silent,
) -> Drift:
    """The bias of the pseudo-gradient against grad F(w), measured and predicted to first order in lr.

    w_k^j = w - lr j grad F_k + O(lr^2), so the gradient at step j is grad F_k - lr j H_k grad F_k + O(lr^2);
    its mean over j = 0 .. E-1, weighted by p_k, is grad F - lr (E-1)/2 sum_k p_k H_k grad F_k + O(lr^2).

    One holder of all data has the bias -lr (E-1)/2 H grad F in E steps of its own; `between` is what clients add to
    that, lr (E-1)/2 ||sum_k p_k (H_k - H)(grad F_k - grad F)||: 0 where their Hessians or their gradients agree.
    """
    factor = lr * (steps - 1) / 2
    measured_D = pseudo_gradient(job, params_D, clients, lr=lr, steps=steps, progress=progress) - first.grad_D
    measured = float(measured_D.norm())
    return Drift(
        lr=lr,
        steps=steps,
        measured=measured,
        predicted=factor * float(first.bent_D.norm()),
        gap=ratio(float((measured_D + factor * first.bent_D).norm()), measured),
        between=factor * float((first.bent_D - first.central_D).norm()),
        gradient=float(first.grad_D.norm()),
    )
