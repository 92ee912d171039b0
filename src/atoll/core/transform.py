"""Transform: an update's vector -> what travels -> the vector again.

Shapes: V, the packed vector of an update. A transform hands a smaller or cheaper vector (the carrier) to the next one
and keeps what it needs to undo itself at its side. Memory such as error feedback is an argument and a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import PlanError
from atoll.core.messages import Payload, State
from atoll.core.params import ParamSpec


class Encoding(NamedTuple):
    """What a transform may look at: the layout of the parameters in the vector, the attempt, and its own randomness."""

    spec: ParamSpec
    attempt: int
    rng: np.random.Generator


def no_memory(num_values: int) -> State:
    """Remember nothing between rounds."""
    return {}


def any_norm(l2_in: float) -> float:
    """Say nothing about the norm of the result."""
    return math.inf


class Transform(NamedTuple):
    """One step of an uplink or downlink."""

    encode: Callable[[Tensor, State, Encoding], tuple[Tensor, State, State]]
    """(vector, memory, encoding) -> (carrier, side, memory)."""
    decode: Callable[[Tensor, State], Tensor]
    """(carrier, side) -> vector."""
    init: Callable[[int], State] = no_memory
    """Length of the vector -> first memory."""
    linear: bool = False
    """Sums of carriers decode to the sum of the vectors."""
    sensitivity: Callable[[float], float] = any_norm
    """Largest L2 norm of a decoded vector, given the largest L2 norm that comes in."""
    against_known: bool = False
    """Whether what comes in is the difference to what the receiver knows: only a downlink can do that."""
    same_norm: bool = True
    """Whether the carrier is as long as what is decoded: else a later step's bound on the carrier bounds nothing."""
    unbiased: bool = False
    """Whether the mean of what is decoded, over `encoding.rng`, is the vector."""
    contractive: bool = False
    """Whether the error is at most as long as the vector, where nothing is remembered: |decoded - v| <= |v|."""


class Chain(NamedTuple):
    """Transforms applied one after another, and undone in reverse."""

    transforms: tuple[Transform, ...]

    @property
    def linear(self) -> bool:
        """Whether every step is linear, as sums under a mask need."""
        return all(t.linear for t in self.transforms)

    def sensitivity(self, l2_in: float = math.inf) -> float:
        """Largest L2 norm of a decoded vector."""
        for number, transform in enumerate(self.transforms, 1):
            l2_in = transform.sensitivity(l2_in)
            if not transform.same_norm and number < len(self.transforms):
                return math.inf
        return l2_in

    def encode(self, vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Payload, State]:
        """Run every step; memory is kept under the step's number."""
        carrier, sides = vector_V, []
        after: State = {}
        for number, transform in enumerate(self.transforms):
            mine = {k.removeprefix(f"{number}."): v for k, v in memory.items() if k.startswith(f"{number}.")}
            if not mine:
                mine = transform.init(carrier.numel())
            carrier, side, mine = transform.encode(carrier, mine, encoding)
            sides.append(side)
            after |= {f"{number}.{k}": v for k, v in mine.items()}
        return Payload(carrier, tuple(sides)), after

    def decode(self, payload: Payload) -> Tensor:
        """Undo every step, last first."""
        vector = payload.carrier
        for transform, side in zip(reversed(self.transforms), reversed(payload.sides), strict=True):
            vector = transform.decode(vector, side)
        return vector


def needs_floats(name: str, vector_V: Tensor) -> None:
    """Refuse a carrier that is no longer a vector of full numbers."""
    if vector_V.dtype not in (torch.float32, torch.float64):
        raise PlanError(
            f"{name} needs float32 or float64 values but got {vector_V.dtype}: "
            f"put {name} earlier in the chain, before what packs the values"
        )


def chain(*transforms: Transform) -> Chain:
    """Compose transforms: the first sees the update, the last what travels."""
    return Chain(transforms)
