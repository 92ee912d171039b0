"""What sparsifiers share: error feedback, how many values travel, which, and their positions on the wire.

Shapes: V, the vector that comes in; K, the values of it that travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.core.errors import DataError, PlanError
from atoll.core.messages import State
from atoll.core.options import Range
from atoll.core.transform import Encoding, Transform, any_norm, needs_floats

Positions = npt.NDArray[np.int64]
Fraction = Annotated[float, Range(0, 1, open_low=True, hint="1 % is 0.01")]
WIRE = {1: np.uint8, 2: np.int16}
"""How words of so many bytes travel: few tools know 16 bits without a sign."""


def codec(name: str, inner: Transform, *, error_feedback: bool = False) -> Transform:
    """Refuse what are no numbers and, with error feedback, send next time what was kept back this time.

        v = vector + residual,  sent = decode(encode(v)),  residual' = v - sent

    (Stich et al. 2018, arXiv:1809.07599, algorithm 1; Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2). What is
    sent then holds parts of earlier updates, so the norm of this one bounds nothing.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats(name, vector_V)
        return inner.encode(vector_V, memory, encoding)

    def encode_all(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats(name, vector_V)
        if memory["residual"].shape != vector_V.shape:
            raise PlanError(
                f"{name} remembers {memory['residual'].numel()} values but gets {vector_V.numel()}: put it earlier in "
                "uplink, before what changes their number, or set error_feedback = false"
            )
        total_V = vector_V + memory["residual"]
        others = {key: value for key, value in memory.items() if key != "residual"}
        carrier, side, others = inner.encode(total_V, others, encoding)
        sent_V = inner.decode(carrier, side)
        rest_V = torch.sub(total_V, sent_V, out=sent_V)  # decode made a new vector: no need of another
        if not bool(rest_V.sum().isfinite()):
            rest_V = rest_V.nan_to_num(0.0, 0.0, 0.0)  # one bad round must not spoil all that follow
        return carrier, side, others | {"residual": rest_V}

    def init(num_values: int) -> State:
        return inner.init(num_values) | {"residual": torch.zeros(num_values)}

    if not error_feedback:
        return inner._replace(encode=encode)
    return inner._replace(encode=encode_all, init=init, sensitivity=any_norm)


def whole(name: str, vector_V: Tensor, encoding: Encoding) -> None:
    """Refuse a vector that does not hold all parameters any more."""
    if vector_V.numel() < encoding.spec.num_params:
        raise PlanError(
            f"{name} needs all {encoding.spec.num_params} parameters but gets {vector_V.numel()} values: "
            "put it before what leaves some out"
        )


def number_kept(name: str, fraction: float | None, count: int | None) -> Callable[[int], int]:
    """How many of so many values travel: a fraction, rounded up, or a count; 1 % if neither is given."""
    if fraction is not None and count is not None:
        raise PlanError(f"{name}: fraction and count are two ways to say one thing: leave one out")
    if count is not None:
        return lambda num: min(count, num)
    share = 0.01 if fraction is None else fraction
    return lambda num: min(num, max(1, math.ceil(share * num - 1e-6)))  # 0.07 * 100 is a little above 7


def largest(vector_V: Tensor, num_kept: int) -> Positions:
    """The rising positions of exactly so many values of largest magnitude; NaN counts as largest, so that it shows."""
    if not num_kept:  # of nothing, such as what a threshold left
        return np.empty(0, dtype=np.int64)
    size_V = np.abs(vector_V.numpy())
    cut = np.partition(size_V, len(size_V) - num_kept)[len(size_V) - num_kept]
    if np.isnan(cut):
        return np.flatnonzero(np.isnan(size_V))[:num_kept]
    kept = np.flatnonzero(~(size_V < cut))
    ties = np.flatnonzero(size_V[kept] == cut)
    return np.delete(kept, ties[len(ties) - (len(kept) - num_kept) :])


def positions(kept_K: Positions, num: int) -> State:
    """Rising positions below `num` in few bytes: as gaps of 8 or 16 bits, or as a mask of one bit a value.

    A word of all ones says that the gap goes on in the next. At 1 % this takes 1.09 bytes a position instead of 4.
    """
    length = torch.tensor([num])
    if 8 * len(kept_K) >= num:
        mask_V = np.zeros(num, dtype=bool)
        mask_V[kept_K] = True
        return {"length": length, "mask": torch.from_numpy(np.packbits(mask_V))}
    gaps_K = np.diff(kept_K, prepend=-1) - 1
    words = min((_words(gaps_K, np.uint8), _words(gaps_K, np.uint16)), key=lambda some: some.nbytes)
    return {"length": length, "gaps": torch.from_numpy(words.view(WIRE[words.itemsize]))}


def _words(gaps_K: Positions, word: type[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    most = np.iinfo(word).max
    more_K, last_K = np.divmod(gaps_K, most)
    words = np.full(len(gaps_K) + int(more_K.sum()), most, dtype=word)
    words[np.cumsum(more_K + 1) - 1] = last_K
    return words


def kept_positions(side: State) -> Positions:
    """Undo `positions`."""
    if "mask" in side:
        return np.flatnonzero(np.unpackbits(side["mask"].numpy(), count=int(side["length"])))
    words = side["gaps"].numpy()
    words = words.view(f"u{words.itemsize}")
    last = words < np.iinfo(words.dtype).max
    rising: Positions = np.cumsum(words, dtype=np.int64)[last]
    return rising + np.arange(len(rising))


def spread(carrier_K: Tensor, side: State) -> Tensor:
    """The values at their positions, and 0 elsewhere."""
    kept_K, num = kept_positions(side), int(side["length"])
    if len(kept_K) != carrier_K.numel() or (len(kept_K) and kept_K[-1] >= num):
        raise DataError(
            f"{carrier_K.numel()} values came with {len(kept_K)} positions of {num}: decode with the chain that encoded"
        )
    vector_V = torch.zeros(num, dtype=carrier_K.dtype)
    vector_V[torch.from_numpy(kept_K)] = carrier_K
    return vector_V
