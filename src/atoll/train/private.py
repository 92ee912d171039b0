"""Private steps: Poisson batches, clipped per-sample gradients, exact noise (Abadi et al. 2016, arXiv:1607.00133).

Shapes: G clients, B samples of a batch, T trained parameters. The sum of a batch's clipped gradients, in units of the
clip, is rounded to a grid of 2^-k, whole noise is added, and the result is divided by the expected size of a batch. One
sample more or less moves the rounded sum by at most SENSITIVITY + 2^-k sqrt(T), and the noise's deviation is `sigma`
times that. k is such that the second term is at most 2^-12.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from atoll.core.algorithm import Batch, LocalTask
from atoll.core.errors import PlanError
from atoll.core.messages import Task
from atoll.privacy.noise import coins, derived, narrow_gaussian
from atoll.train.clipping import finite, layer_inputs, layer_sums, sum_squares, summed
from atoll.train.job import Job

SENSITIVITY = 1 + 2.0**-10
"""How far a sample can move the sum, in units of the clip: 1, and a thousandth for errors of float arithmetic."""
AT_ONCE = 1 << 25
"""How many numbers the gradients of some samples may take together."""
LARGEST = 2.0**30
"""Steps of the grid that a sum in int32 can have: there is room for its noise then. In int64 it is the square."""
TINY = 1e-12
"""The least clip: that of a client whose gradient is zero."""

Sums = list[Tensor]
"""A sum for each trained tensor, in the order of the layout."""


def grid_of(job: Job) -> float:
    """The step of the grid, in units of the clip."""
    return 2.0 ** -math.ceil(12 + math.log2(job.spec.num_trainable) / 2)


def deviation_of(job: Job) -> float:
    """The deviation of the noise, in steps of the grid."""
    assert job.private is not None
    grid = grid_of(job)
    return job.private.sigma * (SENSITIVITY + grid * math.sqrt(job.spec.num_trainable)) / grid


def poisson_batches(job: Job, task: Task) -> list[np.ndarray]:
    """Index lists, one a step: each sample is in each batch by a secret coin of its own."""
    indices = job.federation.train_indices(task.client)
    rate = Fraction(min(job.batch_size, len(indices)), len(indices))
    keys = (_key(job, "batch", task, step) for step in range(job.num_steps(task.client, task.work)))
    return [indices[coins(key, rate, len(indices))] for key in keys]


def noise_of(job: Job, task: Task, step: int) -> Tensor:
    """The noise of one step (T,), whole numbers of steps of the grid."""
    drawn = narrow_gaussian(_key(job, "noise", task, step), deviation_of(job), job.spec.num_trainable)
    wide = 2 * job.batch_size > LARGEST * grid_of(job)
    return torch.from_numpy(drawn.astype(np.int64) if wide else drawn).to(job.device)


def _key(job: Job, purpose: str, task: Task, step: int) -> bytes:
    return derived(job.secret, purpose, task.attempt, task.client, step)


def released(job: Job, sums: Sums, noise: Tensor, unit: Tensor) -> Sums:
    """What leaves a step: sums in units of the clip, put on the grid, with noise, times `unit`: clip over batch size.

    The sum with the noise is one of integers, and exact; what follows sees nothing else. That it would not fit is only
    possible for a batch of twice the expected size; cutting it off first moves no two sums further apart.
    """
    grid, lead, most = grid_of(job), unit.shape, LARGEST if noise.dtype is torch.int32 else LARGEST**2
    scale = (unit * grid).to(job.spec.dtype)
    found = []
    for slot, value in zip(job.spec.trainable, sums, strict=True):
        steps = (value / grid).round().clamp(-most, most).to(noise.dtype)
        noisy = noise.narrow(-1, slot.offset, slot.size).view(value.shape) + steps
        found.append(noisy.to(job.spec.dtype) * scale.reshape(lead + (1,) * (value.dim() - len(lead))))
    return found


def clip_of(job: Job, plain: Callable[[], Sums], size: Tensor) -> Tensor:
    """The clip of this step: the plan's, or a share of the length of the client's own mean gradient."""
    assert job.private is not None
    if not job.private.share:
        return torch.full_like(size, job.private.clip)
    squares = [value.flatten(size.dim()).square().sum(-1) for value in plain()]
    return (job.private.share * torch.stack(squares).sum(0).sqrt() / size).clamp(min=TINY)


def weights_of(square_B: Tensor, real_B: Tensor, clip: Tensor | None) -> Tensor:
    """What each sample's gradient is multiplied by: 1 / max(length, clip), or 1 without a clip.

    Padding counts for nothing, and neither does a sample whose gradient is not finite.
    """
    counts_B = real_B & square_B.isfinite()
    if clip is None:
        return counts_B.to(square_B.dtype)
    return counts_B / torch.maximum(square_B.nan_to_num(0.0).sqrt(), clip.unsqueeze(-1))


def layered_sums(
    job: Job, forward: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]], lead: tuple[int, ...], batch: Batch
) -> tuple[Tensor, Callable[[Tensor | None], Sums]]:
    """Losses, and clip -> sums, of models whose layers all have rules: one backward pass to the layers' outputs.

    `forward` gives losses and the layers' inputs for shifts of the layers' outputs; `lead` is the shape of the losses.
    """
    shifts = [batch.weight.new_zeros(*lead, *layer.shape).requires_grad_() for layer in job.layers]
    with torch.enable_grad():
        losses, inputs = forward(shifts)
        slopes = torch.autograd.grad(losses.sum(), shifts, materialize_grads=True)
    parts = layer_sums(job.model, job.layers, inputs, list(slopes))
    square_B = sum_squares(parts)

    def sums(clip: Tensor | None) -> Sums:
        named = summed(job.layers, parts, weights_of(square_B, batch.weight > 0, clip))
        return [named[slot.name] for slot in job.spec.trainable]

    return losses.detach(), sums


def stacked_gradients(
    job: Job,
    named: Callable[[list[Tensor], Tensor], dict[str, Tensor]],
    batch: Batch,
    seed_G: Tensor,
    leaves: list[Tensor],
    noise_GT: Tensor,
    num_samples_G: Tensor,
) -> tuple[Tensor, Sums]:
    """The losses, and the private gradients, of one step of G clients whose model has rules for all its layers."""

    def one(rows: list[Tensor], shifts: list[Tensor], batch: Batch, seed: Tensor) -> tuple[Tensor, list[Tensor]]:
        outputs, inputs = layer_inputs(job.model, job.layers, named(rows, seed), batch.x, shifts)
        return job.loss(outputs, batch.y), inputs

    alone = len(seed_G) == 1
    rows, batch, seed, noise, num = leaves, batch, seed_G, noise_GT, num_samples_G
    if alone:  # fewer operations, and no products of stacks
        rows, batch = [leaf[0] for leaf in leaves], Batch(*(each[0] for each in batch))
        seed, noise, num = seed_G[0], noise_GT[0], num_samples_G[0]
    step = one if alone else vmap(one)
    losses, sums = layered_sums(job, lambda shifts: step(rows, shifts, batch, seed), tuple(batch.weight.shape), batch)
    size = num.clamp(max=job.batch_size)
    clip = clip_of(job, lambda: sums(None), size)
    grads = released(job, sums(clip), noise, clip.double() / size)
    loss = (losses * batch.weight).sum(-1)
    return (loss.unsqueeze(0), [grad.unsqueeze(0) for grad in grads]) if alone else (loss, grads)


def private_gradient(
    job: Job, leaves: dict[str, Tensor], batch: Batch, order: LocalTask, noise: Tensor, seed: int
) -> tuple[Tensor, list[Tensor]]:
    """The loss, and the private gradient, of one client's step: samples are taken a few at a time."""
    size = order.num_samples.clamp(max=job.batch_size)
    width = _width(job, len(batch.y))
    starts = range(0, len(batch.y), width)
    parts = [(start, Batch(*(each[start : start + width] for each in batch))) for start in starts]

    def sums(clip: Tensor | None) -> tuple[Tensor, Sums]:
        total = [torch.zeros_like(leaf) for leaf in leaves.values()]
        loss = torch.zeros((), dtype=job.spec.dtype, device=job.device)
        for start, part in parts:
            losses, found = _part(job, leaves, part, order, seed, start)
            loss = loss + (losses * part.weight).sum()
            total = [left + right for left, right in zip(total, found(clip), strict=True)]
        return loss, total

    clip = clip_of(job, lambda: sums(None)[1], size)
    loss, found = sums(clip)
    return loss, released(job, found, noise, clip.double() / size)


def _width(job: Job, num: int) -> int:
    """How many samples are taken at once; all where dropout goes by the place in the batch."""
    if job.layers and job.dropout_seeds:
        return max(1, num)
    return max(1, AT_ONCE // (sum(layer.footprint for layer in job.layers) or job.spec.num_trainable))


def _part(
    job: Job, leaves: dict[str, Tensor], batch: Batch, order: LocalTask, seed: int, start: int
) -> tuple[Tensor, Callable[[Tensor | None], Sums]]:
    """Losses, and clip -> sums, of some samples of a batch."""
    if job.layers:

        def forward(shifts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            outputs, inputs = layer_inputs(job.model, job.layers, leaves, batch.x, shifts)
            return job.loss(outputs, batch.y), inputs

        return layered_sums(job, forward, (len(batch.y),), batch)

    def alone(leaves: dict[str, Tensor], x: Tensor, y: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
        one = Batch(x.unsqueeze(0), y.unsqueeze(0), x.new_ones(1, dtype=job.spec.dtype))
        named = leaves | dict.fromkeys(job.dropout_seeds, seed)
        loss = job.loss(order.outputs(named, one.x), one.y).sum()
        if job.algorithm.local_loss is not None:
            loss = job.algorithm.local_loss(loss, named, one, order)
        return loss, loss.detach()

    seeds_B = seed + (start + 1 + torch.arange(len(batch.y), device=job.device)) * 0x5851F42D4C957F2D
    mapped = vmap(grad(alone, has_aux=True), in_dims=(None, 0, 0, 0), randomness="different")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # some operations go sample by sample
            each, losses = mapped(leaves, batch.x, batch.y, seeds_B)
    except RuntimeError as error:
        raise PlanError(
            f"privacy by sample maps a model over samples, which this one does not allow: {error!s:.200}; "
            "use tensor operations that do not look at values, as torch.func.vmap asks for"
        ) from error
    square_B = torch.stack([grads.flatten(1).square().sum(1) for grads in each.values()]).sum(0)

    def sums(clip: Tensor | None) -> Sums:
        weight_B = weights_of(square_B, batch.weight > 0, clip)
        return [torch.tensordot(weight_B, finite(grads), 1) for grads in each.values()]

    return losses, sums


def unprotected(*args: object) -> Tensor:
    """Stands for what an algorithm may not look at while steps are private."""
    raise PlanError(
        "this algorithm asks for the plain gradient of a batch, which nothing protects: "
        "use one that does not, such as fedavg, fedprox or scaffold, or protect whole clients, e.g. by central"
    )
