"""Common parts of sparsifiers: error feedback, the choice of values to send, and the encoding of their positions.

Shapes: V, the input vector; K, the values of it that are sent.
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
"""Type of the tensor that carries words of 1 or 2 bytes: few tools support unsigned 16-bit integers."""


def codec(name: str, inner: Transform, *, error_feedback: bool = False) -> Transform:
    """Wrap a lossy transform: refuse inputs that are not floats and, with error feedback, send the residual next time.

        v = vector + residual,  sent = decode(encode(v)),  residual' = v - sent

    (Stich et al. 2018, arXiv:1809.07599, algorithm 1; Karimireddy et al. 2019, arXiv:1901.09847, algorithm 2). The sent
    vector then holds parts of earlier updates, so that the norm of the current one is no bound on it.
    """

    def encode(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats(name, vector_V)
        return inner.encode(vector_V, memory, encoding)

    def encode_with_residual(vector_V: Tensor, memory: State, encoding: Encoding) -> tuple[Tensor, State, State]:
        needs_floats(name, vector_V)
        if memory["residual"].shape != vector_V.shape:
            raise PlanError(
                f"{name} has a residual of {memory['residual'].numel()} values but got {vector_V.numel()}: put it "
                "earlier in uplink, before steps that change their number, or set error_feedback = false"
            )
        total_V = vector_V + memory["residual"]
        inner_memory = {key: value for key, value in memory.items() if key != "residual"}
        carrier, side, inner_memory = inner.encode(total_V, inner_memory, encoding)
        sent_V = inner.decode(carrier, side)
        residual_V = torch.sub(total_V, sent_V, out=sent_V)  # in place: decode returned a new vector
        if not bool(residual_V.sum().isfinite()):
            residual_V = residual_V.nan_to_num(0.0, 0.0, 0.0)  # NaN in one round must not stay in all later ones
        return carrier, side, inner_memory | {"residual": residual_V}

    def init(num_values: int) -> State:
        return inner.init(num_values) | {"residual": torch.zeros(num_values)}

    if not error_feedback:
        return inner._replace(encode=encode)
    return inner._replace(encode=encode_with_residual, init=init, sensitivity=any_norm)


def needs_all_params(name: str, vector_V: Tensor, encoding: Encoding) -> None:
    """Refuse a vector that does not hold all parameters any more."""
    if vector_V.numel() < encoding.spec.num_params:
        raise PlanError(
            f"{name} needs all {encoding.spec.num_params} parameters but got {vector_V.numel()} values: "
            "put it before steps that drop some"
        )


def number_kept(name: str, fraction: float | None, count: int | None) -> Callable[[int], int]:
    """Return a function: length of a vector -> number of values sent, by fraction (rounded up; 1 %) or count."""
    if fraction is not None and count is not None:
        raise PlanError(
            f"{name}: fraction = {fraction} and count = {count} both set the number of values: leave one out"
        )
    if count is not None:
        return lambda num: min(count, num)
    share = 0.01 if fraction is None else fraction
    return lambda num: min(num, max(1, math.ceil(share * num - 1e-6)))  # in floats, 0.07 * 100 is slightly above 7


def largest_positions(vector_V: Tensor, num_kept: int) -> Positions:
    """Return the ascending positions of the `num_kept` values of largest magnitude.

    NaN counts as the largest, so that the server sees and rejects it.
    """
    if not num_kept:  # the vector may be empty, such as after a threshold
        return np.empty(0, dtype=np.int64)
    magnitude_V = np.abs(vector_V.numpy())
    cut = np.partition(magnitude_V, len(magnitude_V) - num_kept)[len(magnitude_V) - num_kept]
    if np.isnan(cut):
        return np.flatnonzero(np.isnan(magnitude_V))[:num_kept]
    kept = np.flatnonzero(~(magnitude_V < cut))
    ties = np.flatnonzero(magnitude_V[kept] == cut)
    return np.delete(kept, ties[len(ties) - (len(kept) - num_kept) :])


def pack_positions(kept_K: Positions, num: int) -> State:
    """Encode ascending positions below `num` compactly: as gaps of 8 or 16 bits, or as a mask of one bit per value.

    A word of all ones means that the gap continues in the next word. At 1 % this takes 1.09 bytes per position.
    """
    length = torch.tensor([num])
    if 8 * len(kept_K) >= num:
        mask_V = np.zeros(num, dtype=bool)
        mask_V[kept_K] = True
        return {"length": length, "mask": torch.from_numpy(np.packbits(mask_V))}
    gaps_K = np.diff(kept_K, prepend=-1) - 1
    words = min((_gap_words(gaps_K, np.uint8), _gap_words(gaps_K, np.uint16)), key=lambda candidate: candidate.nbytes)
    return {"length": length, "gaps": torch.from_numpy(words.view(WIRE[words.itemsize]))}


def _gap_words(gaps_K: Positions, word: type[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    all_ones = np.iinfo(word).max
    full_K, last_K = np.divmod(gaps_K, all_ones)
    words = np.full(len(gaps_K) + int(full_K.sum()), all_ones, dtype=word)
    words[np.cumsum(full_K + 1) - 1] = last_K
    return words


def unpack_positions(side: State) -> Positions:
    """Return the positions that `pack_positions` encoded."""
    if "mask" in side:
        return np.flatnonzero(np.unpackbits(side["mask"].numpy(), count=int(side["length"])))
    words = side["gaps"].numpy()
    words = words.view(f"u{words.itemsize}")
    is_last = words < np.iinfo(words.dtype).max
    gap_sums: Positions = np.cumsum(words, dtype=np.int64)[is_last]
    return gap_sums + np.arange(len(gap_sums))


def scatter(carrier_K: Tensor, side: State) -> Tensor:
    """Return a vector with the values at their positions, and 0 elsewhere."""
    kept_K, num = unpack_positions(side), int(side["length"])
    if len(kept_K) != carrier_K.numel() or (len(kept_K) and kept_K[-1] >= num):
        raise DataError(
            f"got {carrier_K.numel()} values with {len(kept_K)} positions of {num}: decode with the chain that encoded"
        )
    vector_V = torch.zeros(num, dtype=carrier_K.dtype)
    vector_V[torch.from_numpy(kept_K)] = carrier_K
    return vector_V
