"""Updates as integer vectors of bounded norm, so that sums are exact and noise can be added to the integers.

A vector is clipped, scaled so that the clip is `levels` steps of a grid, and truncated towards zero. No entry grows, so
the norm in steps is at most `levels` in spite of rounding errors. Sums are exact and do not depend on their order.

Shapes: C clients, D parameters, V = D + extra vectors.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from atoll.core.aggregator import Aggregator
from atoll.core.errors import AtollError, PlanError
from atoll.core.messages import Aggregate, State, Update
from atoll.core.params import ParamSpec
from atoll.privacy.noise import discrete_gaussian

LEVELS = 1 << 24
"""Steps of the grid to a clip unless a mechanism sets another number: every integer up to here is a float32."""
MARGIN = 1 - 2.0**-20
"""Safety factor of the scaling: it is short by more than the sum of the float errors, each of them below 2^-24."""
LEAST_DELTA, LARGEST_DELTA = 1e-300, 0.01
"""Range of delta: below, accountants underflow; above, it is no longer a small probability of failure."""
LONGEST = 1e30
"""Norm from which on an update counts as zeros: scaling factors would leave the range of float32."""
CLIENT_DATA = (
    "one client's data, or none in its place (zero-out): how many clients there are is the same, and no secret"
)
"""Neighbours of mechanisms that do not hide which clients take part."""
BIT = "privacy.within"
"""Name of the extra entry that counts whether an update was within the clip."""


def lengths(update: Update) -> Tensor:
    """Return the norm of each whole update, extra vectors included, in float64 (C,); NaN or infinite if an entry is."""
    squares_C = sum(
        torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64).square() for rows in _blocks(update)
    )
    assert isinstance(squares_C, Tensor)
    return squares_C.sqrt()


def bounded(update: Update, clip: float, levels: int, spec: ParamSpec | None = None) -> Update:
    """Clip each update to a norm of `levels` steps of the grid clip / levels, and truncate to whole steps.

    With a `spec` each layer, and each extra vector, is clipped separately to clip / sqrt(their number). An update that
    is not finite, or longer than LONGEST, becomes zeros.
    """
    length_C = lengths(update)
    good_C = length_C < LONGEST
    segments = [] if spec is None else [(slot.offset, slot.size) for slot in spec.slots]
    num = max(1, len(segments) + (len(update.aux) if segments else 0))

    def scaled(rows: Tensor, length_C: Tensor) -> Tensor:
        share = clip / math.sqrt(num)
        factor_C = (share / length_C).clamp(max=1.0).nan_to_num(0.0) * (MARGIN * levels / clip)
        steps = rows * factor_C.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1))
        if not bool(good_C.all()):
            steps[~good_C] = 0
        return steps.to(torch.int32)  # truncates towards zero

    def scaled_alone(rows: Tensor) -> Tensor:
        flat_C = rows.flatten(1)
        return scaled(rows, torch.linalg.vector_norm(flat_C, dim=1, dtype=torch.float64))

    weight = torch.ones_like(update.weight)
    if not segments:
        aux = {name: scaled(rows, length_C) for name, rows in update.aux.items()}
        return Update(scaled(update.delta_D, length_C), weight, aux)
    layers = [scaled_alone(update.delta_D.narrow(1, offset, size)) for offset, size in segments]
    return Update(torch.cat(layers, dim=1), weight, {name: scaled_alone(rows) for name, rows in update.aux.items()})


def noisy_share(vector_V: Tensor, clip: float, levels: int, sigma: float, key: bytes) -> np.ndarray:
    """Return one client's part of a private sum: clipped, on the grid, with discrete Gaussian noise, int64 (V,).

    `sigma` is the standard deviation of the noise in steps. Nothing else may leave the client: the result as it is, or
    modulo 2^32 or 2^64 under the masks of secure aggregation.
    """
    stacked = Update(vector_V[None], vector_V.new_ones(1), {})
    steps_V = bounded(stacked, clip, levels).delta_D[0].numpy()
    noisy_V: np.ndarray = steps_V + discrete_gaussian(key, sigma, len(steps_V))
    return noisy_V


def integer_sum() -> Aggregator:
    """Return an aggregator that adds integers exactly in int64; only the mechanism may release the sum."""

    def add(acc: State, update: Update) -> State:
        sums = {"delta": _total(update.delta_D)}
        sums |= {f"aux.{name}": _total(rows) for name, rows in update.aux.items()}
        return merge(acc, sums)

    def merge(left: State, right: State) -> State:
        return {name: left[name] + right[name] for name in left} if left else right

    def finish(acc: State, memory: State) -> tuple[Aggregate, State]:
        raise AtollError("a private sum is released by its mechanism alone; this is a bug")

    return Aggregator(add=add, merge=merge, finish=finish)


def _total(rows: Tensor) -> Tensor:
    """Return the sum over clients in int64; int32 entries are at most LEVELS, so that blocks of them fit int32 sums."""
    if rows.dtype != torch.int32:
        return rows.sum(0)
    block = (1 << 30) // LEVELS
    parts = [rows[start : start + block].sum(0, dtype=torch.int32) for start in range(0, max(1, len(rows)), block)]
    return torch.stack(parts).sum(0, dtype=torch.int64) if len(parts) > 1 else parts[0].to(torch.int64)


def packed(acc: State) -> np.ndarray:
    """Return all sums as one int64 vector (V,), in alphabetical order of their names."""
    return torch.cat([acc[name].reshape(-1) for name in sorted(acc)]).numpy()


def unpacked(sums_V: np.ndarray, acc: State, scale: float, dtype: torch.dtype, num_clients: int) -> Aggregate:
    """Undo `packed` with the layout of `acc`, and multiply by `scale`, the size of a step."""
    tensors: State = {}
    rest_V = torch.from_numpy(sums_V).to(torch.float64) * scale
    for name in sorted(acc):
        size = acc[name].numel()
        tensors[name], rest_V = rest_V[:size].view(acc[name].shape).to(dtype), rest_V[size:]
    aux = {name.removeprefix("aux."): value for name, value in tensors.items() if name != "delta"}
    return Aggregate(tensors["delta"], aux, float(num_clients), num_clients)


def check_noise(name: str, delta: float, epsilon: float | None, **sizes: float) -> None:
    """Refuse settings without protection, or that an accountant cannot compute with; `sizes` are options by name."""
    for option, value in sizes.items():
        if not 1e-6 <= value <= 1e6:
            raise PlanError(f"{name}: {option} must be in [1e-6, 1e6], got {value}; 1 is a usual value")
    if not LEAST_DELTA <= delta <= LARGEST_DELTA:
        raise PlanError(
            f"{name}: delta must be a probability in [{LEAST_DELTA:g}, {LARGEST_DELTA:g}], got {delta}; choose it "
            "below one over the number of protected clients or samples, e.g. 1e-5"
        )
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise PlanError(f"{name}: epsilon must be above 0, got {epsilon}; leave it out for no limit")


def _blocks(update: Update) -> list[Tensor]:
    return [update.delta_D, *update.aux.values()]
