"""Send selected layers. Shapes: V, the input vector; K, the values of it that are sent; R ranges of it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

import torch
from torch import Tensor

from atoll.core.errors import PlanError, nearest
from atoll.core.messages import State
from atoll.core.options import at_least
from atoll.core.params import ParamSpec
from atoll.core.transform import Encoding, Transform
from atoll.transforms.feedback import codec, needs_all_params

EXAMPLES = [{"patterns": ["*weight"]}, {"patterns": ["*bias"], "others_every": 2}]


def layers(
    patterns: list[str], others_every: Annotated[int, at_least(0, "0 is never")] = 0, error_feedback: bool = False
) -> Transform:
    """Send the tensors whose names match a pattern such as `"conv*"`, and the extra vectors; drop other changes.

    With `others_every = n` all tensors are sent in every n-th attempt (as in Chen et al. 2019, arXiv:1903.07424), and
    error feedback keeps the changes of the others until then. Bytes for float32: 4 K + 8 R + 8.
    """
    if not patterns:
        raise PlanError('layers: patterns must name tensors of the model, such as ["fc*"], got []')
    if error_feedback and not others_every:
        raise PlanError(
            "layers: with error_feedback the residual of other layers would never be sent: set others_every, or leave "
            "error_feedback out"
        )

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_all_params("layers", vector_V, encoding)
        num = vector_V.numel()
        sends_all = others_every > 0 and encoding.attempt % others_every == 0
        ranges = [(0, num)] if sends_all else _ranges(encoding.spec, patterns, num)
        side = {"length": torch.tensor([num]), "ranges": torch.tensor(ranges, dtype=torch.int32)}
        return torch.cat([vector_V[start:stop] for start, stop in ranges]), side, memory

    def decode(carrier_K: Tensor, side: State) -> Tensor:
        vector_V, rest = torch.zeros(int(side["length"]), dtype=carrier_K.dtype), carrier_K
        for start, stop in side["ranges"].tolist():
            vector_V[start:stop], rest = rest[: stop - start], rest[stop - start :]
        return vector_V

    inner = Transform(
        encode=encode, decode=decode, linear=others_every == 0, sensitivity=lambda l2_in: l2_in, contractive=True
    )
    return codec("layers", inner, error_feedback=error_feedback)


def _ranges(spec: ParamSpec, patterns: list[str], num: int) -> list[tuple[int, int]]:
    """Return the ranges of the matching tensors and of the extra vectors, with adjacent ranges merged."""
    for pattern in patterns:
        if not any(fnmatchcase(slot.name, pattern) for slot in spec.slots):
            raise PlanError(
                f"layers: no tensor of the model matches '{pattern}', choose others: "
                f"{nearest(pattern, (s.name for s in spec.slots))}"
            )
    matching = [(s.offset, s.offset + s.size) for s in spec.slots if any(fnmatchcase(s.name, p) for p in patterns)]
    merged: list[tuple[int, int]] = []
    for start, stop in [*matching, (spec.num_params, num)]:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged
