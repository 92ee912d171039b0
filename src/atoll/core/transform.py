"""Transform: encode the vector of an update for the wire, and decode it again.

Shapes: V, the packed vector of an update. A transform passes a smaller or cheaper vector (the carrier) to the next one
and puts the tensors that it needs for decoding into its side. Memory such as error feedback is an argument and a
result.
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
    """Context of `encode`: the layout of the parameters in the vector, the attempt, and a generator for this client."""

    spec: ParamSpec
    attempt: int
    rng: np.random.Generator


def no_memory(num_values: int) -> State:
    """Return an empty memory, for transforms that keep nothing between rounds."""
    return {}


def any_norm(l2_in: float) -> float:
    """Return infinity: the norm of the result is not bounded."""
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
    """Whether a sum of carriers decodes to the sum of the vectors."""
    sensitivity: Callable[[float], float] = any_norm
    """Largest L2 norm of the input -> largest L2 norm of the decoded vector."""
    against_known: bool = False
    """Whether its input is the difference to the last broadcast; allowed only in a downlink."""
    preserves_norm: bool = True
    """Whether a bound on the norm of the carrier also bounds the decoded vector."""
    unbiased: bool = False
    """Whether the mean of the decoded vector, over `encoding.rng`, is the vector."""
    contractive: bool = False
    """Whether the error is at most as long as the vector, without memory: |decoded - v| <= |v|."""


class Chain(NamedTuple):
    """Transforms that are applied one after another, and decoded in reverse order."""

    transforms: tuple[Transform, ...]

    @property
    def linear(self) -> bool:
        """Whether every step is linear, as secure sums require."""
        return all(t.linear for t in self.transforms)

    def sensitivity(self, l2_in: float = math.inf) -> float:
        """Return the largest L2 norm of a decoded vector for inputs of norm at most `l2_in`."""
        for number, transform in enumerate(self.transforms, 1):
            l2_in = transform.sensitivity(l2_in)
            if not transform.preserves_norm and number < len(self.transforms):
                return math.inf
        return l2_in

    def encode(self, vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Payload, State]:
        """Apply every step; the names of its memory start with the number of the step.

        A vector of another device is brought to the processor, where codecs work and payloads are packed.
        """
        carrier, sides = vector_V.cpu(), []
        new_memory: State = {}
        for number, transform in enumerate(self.transforms):
            prefix = f"{number}."
            step_memory = {k.removeprefix(prefix): v for k, v in memory.items() if k.startswith(prefix)}
            if not step_memory:
                step_memory = transform.init(carrier.numel())
            carrier, side, step_memory = transform.encode(carrier, step_memory, encoding)
            sides.append(side)
            new_memory |= {f"{prefix}{k}": v for k, v in step_memory.items()}
        return Payload(carrier, tuple(sides)), new_memory

    def decode(self, payload: Payload) -> Tensor:
        """Decode every step, the last one first."""
        vector = payload.carrier
        for transform, side in zip(reversed(self.transforms), reversed(payload.sides), strict=True):
            vector = transform.decode(vector, side)
        return vector


def needs_floats(name: str, vector_V: Tensor) -> None:
    """Refuse a carrier that an earlier step has packed or rounded."""
    if vector_V.dtype not in (torch.float32, torch.float64):
        raise PlanError(
            f"{name} needs float32 or float64 values but got {vector_V.dtype}: "
            f"put {name} earlier in the chain, before steps that pack or round the values"
        )


def chain(*transforms: Transform) -> Chain:
    """Compose transforms: the first one encodes the update, the last one produces the payload's carrier."""
    return Chain(transforms)
