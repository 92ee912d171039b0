"""Updates under secure aggregation: what a client adds to the sum, and what the sum says.

A client's vector is its update times its weight, then its weight, its number of samples, these times its loss, and the
share of its values that were cut, all as shares of a largest one, and a 1. The sum of the last counts the clients.
Extras that must arrive exactly follow as limbs, times the weight, with the weight as the first of them.

Shapes: V values of an update, E exact extras, K limbs of each, L = V + EXTRAS + 1 + (E + 1) K of what is added.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch

from atoll.core.messages import State, Update
from atoll.core.secagg import Secagg
from atoll.secagg.encoding import Encoding, decode, encode, finest
from atoll.secagg.limbs import from_limbs, num_limbs, to_limbs
from atoll.secagg.masks import Stream
from atoll.secagg.scheme import Scheme

EXTRAS = 4
"""Weight, samples, samples times loss, values that were cut."""
MOST_LOSS = 16.0
"""A larger training loss is told as this."""


class Secure(NamedTuple):
    """The built part of a plan that adds in secret."""

    settings: Secagg
    scheme: Scheme

    def encoding(self, num_clients: int) -> Encoding:
        """The finest encoding whose sum over so many clients cannot overflow."""
        return finest(self.settings.clip, num_clients, self.settings.modulus_bits)


class Largest(NamedTuple):
    """What shares are shares of; known to all."""

    weight: float
    samples: int


class Sum(NamedTuple):
    """What the sum over some clients says of them."""

    update: Update
    """Their weighted mean, with the sum of their weights."""
    num_clients: int
    samples: float
    loss: float
    """Mean training loss by samples."""
    cut: float
    """Share of values that were larger than the plan's clip."""


def length(update: Update, encoding: Encoding) -> int:
    """How many values a client adds."""
    return update.vector().numel() + EXTRAS + 1 + _num_exact(update, encoding)


def _num_exact(update: Update, encoding: Encoding) -> int:
    exact = update.exact()
    return (sum(value.numel() for value in exact.values()) + 1) * num_limbs(encoding) if exact else 0


def _exact_limbs(update: Update, weight: float, encoding: Encoding) -> np.ndarray:
    """The weight and the exact extras times the weight, as limbs; nothing if there are no such extras."""
    exact = update.exact()
    values = [exact[name].double().numpy().reshape(-1) * weight for name in sorted(exact)]
    return to_limbs(np.concatenate([[weight], *values]), encoding) if exact else np.empty(0, encoding.dtype)


def _mean_exact(limbs: np.ndarray, like: Update, encoding: Encoding) -> State:
    """The weighted means of exact extras, by name."""
    expected = like.exact()
    if not expected:
        return {}
    weight, *sums = from_limbs(limbs, encoding).tolist()
    means = torch.tensor(sums, dtype=torch.float64) / (weight or math.inf)
    parts = torch.split(means, [expected[name].numel() for name in sorted(expected)])
    return {
        name: part.view(expected[name].shape).to(expected[name].dtype)
        for name, part in zip(sorted(expected), parts, strict=True)
    }


def to_integers(
    update: Update, samples: int, loss: float, largest: Largest, encoding: Encoding, rounding: Stream
) -> np.ndarray:
    """What a client adds to the sum (L,); weights beyond the largest are cut."""
    vector_V = update.vector().double().numpy()
    weight, clip = min(float(update.weight) / largest.weight, 1.0), encoding.clip
    size, told = min(samples / largest.samples, 1.0), min(loss, MOST_LOSS) if math.isfinite(loss) else MOST_LOSS
    values = np.empty(vector_V.size + EXTRAS)
    np.clip(vector_V, -clip, clip, out=values[:-EXTRAS])
    cut = np.count_nonzero(values[:-EXTRAS] != vector_V) / vector_V.size
    values[:-EXTRAS] *= weight
    values[-EXTRAS:] = np.array([weight, size, size * told / MOST_LOSS, cut]) * clip
    integers = encode(values, 1.0, encoding, rounding)
    limbs = _exact_limbs(update, weight, encoding)
    return np.concatenate([integers, limbs]) if limbs.size else integers


def from_sum(total_L: np.ndarray, num_clients: int, like: Update, largest: Largest, encoding: Encoding) -> Sum | None:
    """What a sum says; None if it cannot be a sum of so many clients' vectors.

    No value of the mean is beyond the encoding's clip, whatever anybody added: so far one client can move it. Exact
    extras know no such bound.
    """
    start = total_L.size - _num_exact(like, encoding)
    mean, count = decode(total_L[:start], encoding)
    weight, size, size_loss, cut = (mean[-EXTRAS:] / encoding.clip).tolist()
    if round(count) != num_clients or not 0 < weight <= 1 or not 0 < size <= 1:
        return None
    vector_V = np.clip(mean[:-EXTRAS] / weight, -encoding.clip, encoding.clip)
    exact = _mean_exact(total_L[start:], like, encoding)
    update = like.rebuilt(torch.from_numpy(vector_V).to(like.delta_D.dtype), exact)
    total = torch.tensor(weight * num_clients * largest.weight, dtype=like.weight.dtype)
    return Sum(
        update._replace(weight=total),
        num_clients,
        round(size * num_clients * largest.samples),
        MOST_LOSS * size_loss / size,
        cut,
    )


def grid_integers(update: Update, encoding: Encoding) -> np.ndarray:
    """What a client adds whose update is whole numbers already: these, and a 1 (V + 1,)."""
    return np.append(update.vector().numpy(), 1).astype(encoding.dtype)


def from_grid_sum(total_L: np.ndarray, num_clients: int, like: Update, encoding: Encoding) -> State | None:
    """The sums of whole numbers by name, in int64; None if they cannot be those of so many clients."""
    signed_L = total_L.astype(encoding.dtype).view(f"<i{encoding.modulus_bits // 8}").astype(np.int64)
    if signed_L[-1] != num_clients:
        return None
    found = like.rebuilt(torch.from_numpy(signed_L[:-1]))
    return {"delta": found.delta_D, **{f"aux.{name}": value for name, value in found.aux.items()}}


def rounding_of(seed: int, attempt: int, client: int) -> Stream:
    """How a client's values are rounded in a simulation: by seed, so that a run can be repeated."""
    return Stream(hashlib.sha256(f"{seed}/secagg rounding/{attempt}/{client}".encode()).digest())
