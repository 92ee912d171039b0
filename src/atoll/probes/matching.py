"""Search for samples whose update is the one that was seen. Shapes: D parameters, M values of a model, N samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from atoll.core.probe import Guess, Known, Sight, Work, frozen_as
from atoll.probes.label_counts import labels_of, no_counts
from atoll.probes.rows import Row, rows_of

FIRST = 1e-3
"""Spread of the points at which searches begin, as a share of the features' range."""


class Search(NamedTuple):
    """How samples are searched for."""

    distance: Callable[[Tensor, Tensor], Tensor]
    """(gradient of the guess (D,), the one that was seen (D,)) -> how far they are apart."""
    descend: Callable[[Callable[[Tensor], Tensor], Tensor, Callable[[], bool]], Tensor]
    """(what is to become small, a first point, whether time is over) -> a point."""
    prior: Callable[[Tensor], Tensor] | None = None
    """Samples -> how unlikely they are, which is added to the distance while searching."""
    restarts: int = 1
    """Beginnings that are tried at most; the one that ends nearest is taken."""
    near: float = 0.0
    """The distance at which no other beginning is tried."""
    simulate: bool = False
    """Whether local steps are simulated one after another, in place of one step on all samples."""
    dtype: torch.dtype = torch.float32


def no_search(known: Known, sights: Sequence[Sight]) -> str | None:
    """Say why samples cannot be searched for; None if they can."""
    if known.tokens:
        return "inputs are tokens, not numbers"
    if not any(num for sight in sights for num in sight.num_samples_R):
        return "the server sees sums alone, which do not say how many samples are behind them"
    return no_counts(known, sights)


def search(known: Known, sights: Sequence[Sight], work: Work, how: Search) -> list[Guess]:
    """Search for the samples of each row that says how many they are, until time is over."""
    guesses = list[Guess]()
    for row in rows_of(known, sights):
        if row.num_samples:
            guesses.append(_search_row(known, row, work, how))
        if work.is_over():
            break
    return guesses


def _search_row(known: Known, row: Row, work: Work, how: Search) -> Guess:
    y, seen_D = labels_of(known, row), row.mean_gradient().to(how.dtype)
    if not seen_D.any():
        return Guess(row=row.place)  # nothing was learned, so nothing is told
    shape = (row.num_samples, *known.input_shape)
    best, best_x, tries = math.inf, torch.full(shape, (known.low + known.high) / 2), 0

    def distance(x: Tensor) -> Tensor:
        return how.distance(gradient_of(known, row, x, y, simulate=how.simulate), seen_D)

    def objective(x: Tensor) -> Tensor:
        return distance(x) if how.prior is None else distance(x) + how.prior(x)

    while tries < how.restarts and best > how.near and not (tries and work.is_over()):
        first = torch.from_numpy(work.rng.standard_normal(shape)).to(how.dtype) * FIRST
        found = how.descend(lambda point: objective(natural(known, point)), first, work.is_over)
        x = natural(known, found).detach().clamp(known.low, known.high)
        apart, tries = float(distance(x).detach()), tries + 1
        if apart < best:
            best, best_x = apart, x
    x = best_x.to(known.spec.dtype)
    notes = {"distance": best, "tries": float(tries)}
    return Guess(row=row.place, x=x, y=y, sure_N=torch.full((len(y),), -best), notes=notes)


def natural(known: Known, point: Tensor) -> Tensor:
    """Return the samples that a point stands for: around the middle of the range, and images with few fine details.

    Frequencies f of an image are scaled by 1/f, as they are in photographs (Field 1987, J. Opt. Soc. Am. A 4(12)): a
    search that takes steps in all of them alike finds large shapes first, and leaves what gradients do not show smooth.
    """
    middle, span = (known.low + known.high) / 2, known.high - known.low
    if len(known.input_shape) < 3:
        return middle + span * point
    height, width = known.input_shape[-2:]
    rows, columns = (torch.fft.fftfreq(height, dtype=point.dtype), torch.fft.rfftfreq(width, dtype=point.dtype))
    frequency = (rows.unsqueeze(1).square() + columns.square()).sqrt().clamp(min=1 / max(height, width))
    images: Tensor = torch.fft.irfft2(torch.fft.rfft2(point) / (4 * frequency), s=(height, width))
    return middle + span * images


def gradient_of(known: Known, row: Row, x: Tensor, y: Tensor, *, simulate: bool) -> Tensor:
    """Return the mean gradient of the steps that a client with these samples would take, differentiable in them.

    Without `simulate`, or where there is one step on all samples, it is that of one step. Batches are the samples in
    order, and the same in every epoch: what a server cannot know it takes to be so.
    """
    num = len(row.delta_D)
    first_D, statistics_S = row.model_M[:num].to(x.dtype).requires_grad_(), row.model_M[num:].to(x.dtype)
    steps, size = (row.num_steps, row.batch_size) if simulate else (1, len(x))
    params_D, total_D = first_D, torch.zeros_like(first_D)
    for step in range(steps):
        start = step % math.ceil(len(x) / size) * size
        batch = slice(start, start + size)
        loss = known.loss(_outputs(known, params_D, statistics_S, x[batch]), y[batch]).mean()
        (gradient_D,) = torch.autograd.grad(loss, params_D, create_graph=True)
        total_D, params_D = total_D + gradient_D, params_D - row.lr * gradient_D
    return total_D / steps


def _outputs(known: Known, params_D: Tensor, statistics_S: Tensor, x: Tensor) -> Tensor:
    """Return outputs in the precision of the samples; statistics are copies, as training mode moves them in place."""
    if not list(known.model.buffers()):
        return known.outputs(params_D, x)
    floats = {name: each for name, each in known.model.named_buffers() if each.is_floating_point()}
    buffers = {name: each.to(x.dtype, copy=True) for name, each in floats.items()}
    buffers |= known.spec.buffer_views(statistics_S.clone())
    tensors = frozen_as(known.model, x.dtype) | known.spec.without_buffers.views(params_D) | buffers
    outputs: Tensor = functional_call(known.model, tensors, (x,))
    return outputs


def squared_distance(guess_D: Tensor, seen_D: Tensor) -> Tensor:
    """Return |guess - seen|^2 / |seen|^2 (Zhu et al. 2019, arXiv:1906.08935, algorithm 1, but for the scale)."""
    return (guess_D - seen_D).square().sum() / seen_D.square().sum()


def cosine_distance(guess_D: Tensor, seen_D: Tensor) -> Tensor:
    """Return 1 - cos of the angle between them (Geiping et al. 2020, arXiv:2003.14053, eq. 4)."""
    lengths: Tensor = torch.linalg.vector_norm(guess_D) * torch.linalg.vector_norm(seen_D)
    return 1 - guess_D @ seen_D / lengths
