"""Updates as whole numbers of bounded length, so that sums are exact and noise can be added to the integers.

A vector is clipped, scaled so that the clip is `levels` steps of a grid, and cut off towards zero: no entry grows, so
that the length in steps is at most `levels`, whatever the floats did. Sums are exact, in any order of clients.

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
"""Steps of the grid to a clip where nothing limits them: every whole number up to here is a float32."""
MARGIN = 1 - 2.0**-20
"""What scaling is short by: more than its float errors add up to, each of them below 2^-24."""
LEAST_DELTA, LARGEST_DELTA = 1e-300, 0.01
"""What an accountant can compute with, and what can still be called the chance of a failure."""
LONGEST = 1e30
"""Longer updates count as none: beyond, factors leave the range of float32."""
CLIENT_DATA = (
    "one client's data, or none in its place (zero-out): how many clients there are is the same, and no secret"
)
"""The neighbours of mechanisms that do not hide who takes part."""
BIT = "privacy.within"
"""The extra entry that says whether an update was within the clip."""


def lengths(update: Update) -> Tensor:
    """The length of each whole update, extra vectors included, in float64 (C,); NaN or infinite if an entry is."""
    squares_C = sum(
        torch.linalg.vector_norm(rows.flatten(1), dim=1, dtype=torch.float64).square() for rows in _blocks(update)
    )
    assert isinstance(squares_C, Tensor)
    return squares_C.sqrt()


def bounded(update: Update, clip: float, levels: int, spec: ParamSpec | None = None) -> Update:
    """Clip each update to a length of `levels` steps of the grid clip / levels, and cut off to whole steps.

    With a `spec` each layer, and each extra vector, is clipped by itself to clip / sqrt(their number). An update that
    is not finite, or beyond all measure, counts as zeros.
    """
    length_C = lengths(update)
    good_C = length_C < LONGEST
    segments = [] if spec is None else [(slot.offset, slot.size) for slot in spec.slots]
    num = max(1, len(segments) + (len(update.aux) if segments else 0))

    def scaled(rows: Tensor, length_C: Tensor) -> Tensor:
        share = clip / math.sqrt(num)
        factor_C = (share / length_C).clamp(max=1.0).nan_to_num(0.0) * (MARGIN * levels / clip)
        found = rows * factor_C.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1))
        if not bool(good_C.all()):
            found[~good_C] = 0
        return found.to(torch.int32)  # which cuts off towards zero

    def alone(rows: Tensor) -> Tensor:
        flat_C = rows.flatten(1)
        return scaled(rows, torch.linalg.vector_norm(flat_C, dim=1, dtype=torch.float64))

    weight = torch.ones_like(update.weight)
    if not segments:
        aux = {name: scaled(rows, length_C) for name, rows in update.aux.items()}
        return Update(scaled(update.delta_D, length_C), weight, aux)
    layers = [alone(update.delta_D.narrow(1, offset, size)) for offset, size in segments]
    return Update(torch.cat(layers, dim=1), weight, {name: alone(rows) for name, rows in update.aux.items()})


def noisy_share(vector_V: Tensor, clip: float, levels: int, sigma: float, key: bytes) -> np.ndarray:
    """One client's whole part of a private sum: clip, grid, and discrete Gaussian noise of `sigma` steps, int64 (V,).

    This is all that may leave the client: as it is, or modulo 2^32 or 2^64 under the masks of secure aggregation.
    """
    one = Update(vector_V[None], vector_V.new_ones(1), {})
    steps_V = bounded(one, clip, levels).delta_D[0].numpy()
    found: np.ndarray = steps_V + discrete_gaussian(key, sigma, len(steps_V))
    return found


def integer_sum() -> Aggregator:
    """Add whole numbers up in int64, exactly. What comes of the sum is the mechanism's business."""

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
    """The sum over clients in int64; entries in int32 are at most LEVELS, so that some of them add up there first."""
    if rows.dtype != torch.int32:
        return rows.sum(0)
    most = (1 << 30) // LEVELS
    parts = [rows[start : start + most].sum(0, dtype=torch.int32) for start in range(0, max(1, len(rows)), most)]
    return torch.stack(parts).sum(0, dtype=torch.int64) if len(parts) > 1 else parts[0].to(torch.int64)


def packed(acc: State) -> np.ndarray:
    """All sums as one vector of int64 (V,), in the order of their names."""
    return torch.cat([acc[name].reshape(-1) for name in sorted(acc)]).numpy()


def unpacked(sums_V: np.ndarray, acc: State, scale: float, dtype: torch.dtype, num_clients: int) -> Aggregate:
    """Undo `packed`, in the run's own unit; `acc` gives the layout."""
    found: State = {}
    rest_V = torch.from_numpy(sums_V).to(torch.float64) * scale
    for name in sorted(acc):
        found[name], rest_V = rest_V[: acc[name].numel()].view(acc[name].shape).to(dtype), rest_V[acc[name].numel() :]
    aux = {name.removeprefix("aux."): value for name, value in found.items() if name != "delta"}
    return Aggregate(found["delta"], aux, float(num_clients), num_clients)


def check_noise(name: str, delta: float, epsilon: float | None, **lengths: float) -> None:
    """Refuse settings that protect nobody or cannot be computed."""
    for option, value in lengths.items():
        if not 1e-6 <= value <= 1e6:
            raise PlanError(f"{name}: {option} must be in [1e-6, 1e6], got {value}; 1 is a usual value")
    if not LEAST_DELTA <= delta <= LARGEST_DELTA:
        raise PlanError(
            f"{name}: delta is a probability in [{LEAST_DELTA:g}, {LARGEST_DELTA:g}], and less than one over the "
            f"number of those who are hidden: got {delta}; 1e-5 is usual"
        )
    if epsilon is not None and not 0 < epsilon < math.inf:
        raise PlanError(f"{name}: epsilon must be above 0, got {epsilon}; leave it out for no limit")


def _blocks(update: Update) -> list[Tensor]:
    return [update.delta_D, *update.aux.values()]
