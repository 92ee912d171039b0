"""Models that an attacker trains itself, all at once, the way that the federation trains.

Shapes: S shadow models, P samples of the attacker's pool, N samples of a shadow, B samples of a batch, T versions, M
values of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from atoll.core.errors import DataError
from atoll.core.params import float_buffers
from atoll.core.probe import Known, Samples, Sight, Work

SLICE = 512
"""Samples whose losses are computed at once."""
STACKED = 16
"""Shadows that are trained at once; time is looked at between."""
LEAST_LOSS = 1e-15
"""Losses below it are confidences that a double cannot tell from 1."""


Views = dict[str, Tensor]


class OutOfTime(DataError):
    """The time of a probe is over before it has anything to say."""


class Shadows(NamedTuple):
    """What shadow models say of an attacker's pool."""

    phi_STP: Tensor
    """Scaled confidence of each shadow, in each version, in each sample of the pool."""
    inside_SP: Tensor
    """Which samples each was trained on."""


def scaled_confidence(loss_N: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(-loss) (Carlini et al. 2022, arXiv:2112.03570, section VI-A).

    >>> [round(value, 3) for value in scaled_confidence(-torch.tensor([0.2, 0.9]).log()).tolist()]
    [-1.386, 2.197]
    """
    return -torch.expm1(loss_N.clamp(LEAST_LOSS, 700)).log()


def losses(known: Known, model_M: Tensor, samples: Samples) -> Tensor:
    """Return a model's loss of each sample, in double precision, as it is evaluated.

    Where batch-norm statistics stay with clients, a model can be run in training mode only.
    """
    found = []
    travels = known.spec.views(model_M)
    known.model.train(any(name not in travels for name, _ in float_buffers(known.model)))
    with torch.no_grad():
        for start in range(0, len(samples.x), SLICE):
            x, y = samples.x[start : start + SLICE], samples.y[start : start + SLICE]
            found.append(known.loss(functional_call(known.model, travels, (x,)).double(), y))
    known.model.train()
    return torch.cat(found)


def client_sizes(known: Known, sight: Sight) -> list[int]:
    """Return the number of samples of each client behind a sight; the mean where sums hide it."""
    mean = max(1, round(known.num_train / known.num_clients))
    pairs = zip(sight.num_samples_R, sight.num_clients_R, strict=True)
    return [size for num, clients in pairs for size in ([num] if clients == 1 and num else [mean] * clients)]


def train_stacked(
    known: Known,
    start_SM: Tensor,
    pool: Samples,
    index_SN: Tensor,
    version: int,
    rng: np.random.Generator,
    is_over: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Do one client's task for each of S models, from where each is, on its own N samples of the pool; return them.

    Batches are drawn as clients draw them: shuffled passes, in steps of the plan's batch size with its step size.
    OutOfTime if they cannot all be taken.
    """
    model_SM, num = start_SM.clone(), index_SN.shape[1]
    views = known.spec.views(model_SM)
    trained = {slot.name: views.pop(slot.name) for slot in known.spec.trainable}
    held = {name: b.expand(len(model_SM), *b.shape).clone() for name, b in known.model.named_buffers()} | views
    size, lr = known.batch_size(num), known.lr(version)
    step, left_SN = _mapped(known), index_SN[:, :0]
    for _ in range(known.num_steps(num)):
        if is_over():
            raise OutOfTime("there was no time for a probe to train models of its own: give it more")
        if not left_SN.shape[1]:
            shuffled = rng.permuted(np.tile(np.arange(num), (len(index_SN), 1)), axis=1)
            left_SN = index_SN.gather(1, torch.from_numpy(shuffled))
        batch_SB, left_SN = left_SN[:, :size], left_SN[:, size:]
        slopes, after = step(trained, held, pool.x[batch_SB], pool.y[batch_SB])
        with torch.no_grad():
            for name, values in trained.items():
                values.sub_(slopes[name], alpha=lr)
            for name, values in held.items():
                values.copy_(after[name])
    return model_SM


def _mapped(known: Known) -> Callable[..., tuple[Views, Views]]:
    """Return gradients of the mean loss and buffers after it, for a stack of models; mapped if its layers can be."""

    def loss(trained: Views, held: Views, x_B: Tensor, y_B: Tensor) -> tuple[Tensor, Views]:
        moving = {name: values.clone() for name, values in held.items()}
        return known.loss(functional_call(known.model, {**trained, **moving}, (x_B,)), y_B).mean(), moving

    one = grad(loss, has_aux=True)
    stacked = vmap(one, randomness="different")

    def step(*stack: Any) -> tuple[Views, Views]:
        try:
            slopes, after = stacked(*stack)
        except RuntimeError:  # such as recurrent layers, which have no mapped form
            rows = [one(*tree_map(lambda values, s=s: values[s], stack)) for s in range(len(stack[-1]))]
            slopes, after = tree_map(lambda *values: torch.stack(values), *rows)
        return slopes, after

    return step


def train_shadows(
    known: Known, sights: Sequence[Sight], pool: Samples, inside_SP: Tensor, work: Work, *, versions: bool = False
) -> Shadows | None:
    """Train shadow federations from the first model that the server sent; None if there is no time for any.

    Each deals its samples of the pool to as many clients as took part, of the sizes that the server saw, and averages
    their models round after round. With `versions` its confidences are noted after each round, not only at the end.
    """
    done = list[Tensor]()
    for start in range(0, len(inside_SP), STACKED):
        try:
            done.append(_federations(known, sights, pool, inside_SP[start : start + STACKED], work, versions))
        except OutOfTime:
            break
    if not done:
        return None
    phi_STP = torch.cat(done)
    return Shadows(phi_STP, inside_SP[: len(phi_STP)])


def _federations(
    known: Known, sights: Sequence[Sight], pool: Samples, inside_SP: Tensor, work: Work, versions: bool
) -> Tensor:
    shards = [_dealt(np.flatnonzero(row), known.num_clients, work.rng) for row in inside_SP.numpy()]
    model_SM = sights[0].model_M.expand(len(inside_SP), -1).clone()
    found = list[Tensor]()
    for sight in sights:
        sizes = client_sizes(known, sight)
        chosen = [work.rng.permutation(known.num_clients)[: len(sizes)] for _ in shards]
        total_SM, total = torch.zeros_like(model_SM), 0
        for place in range(len(chosen[0])):
            own = [shards[s][chosen[s][place]] for s in range(len(shards))]
            size = min(len(each) for each in own)
            index_SN = torch.from_numpy(np.stack([each[:size] for each in own]))
            total_SM += size * train_stacked(known, model_SM, pool, index_SN, sight.version, work.rng, work.is_over)
            total += size
        model_SM = total_SM / total
        if versions or sight is sights[-1]:
            found.append(torch.stack([scaled_confidence(losses(known, each, pool)) for each in model_SM]))
    return torch.stack(found, 1)


def _dealt(indices: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Deal samples to clients, at least one each."""
    shuffled = rng.permutation(indices)
    if len(shuffled) < num_clients:
        shuffled = rng.choice(shuffled, num_clients)
    return np.array_split(shuffled, num_clients)


def halves(num_shadows: int, num: int, rng: np.random.Generator) -> Tensor:
    """Return which of `num` samples are in which shadow: in each pair of shadows each sample is in one of them."""
    first = rng.random((num_shadows // 2, num)).argsort(1) < num / 2
    return torch.from_numpy(np.stack([first, ~first], 1).reshape(-1, num))
