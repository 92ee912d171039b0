"""What client and server of split learning say to each other, and the bytes of it. Shapes: B samples of a piece."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.errors import TrainingError
from atoll.core.messages import Payload, State
from atoll.core.params import ParamSpec, Slot
from atoll.core.seeds import generator
from atoll.core.transform import Chain, Encoding
from atoll.core.wire import WireError, pack, unpack

VALUES, TARGETS, ABOUT, ROWS = "values", "targets", "about", "rows"
"""Names of the arrays of a message: what it carries, the labels beside it, its place in the exchange, and with the
first activations of a party that holds columns its commitment to the rows in their order."""


class Kind(IntEnum):
    """What a message carries."""

    WEIGHTS = 1
    """The clients' layers, as one vector: before the first batch to a client, after the last one from it."""
    ACTIVATIONS = 2
    """Outputs of the head, to the server, with the labels unless they stay with the client."""
    OUTPUTS = 3
    """Outputs of the body, to a client that has the tail."""
    OUTPUT_GRADIENTS = 4
    """Gradient of the loss by the outputs of the body, to the server."""
    GRADIENTS = 5
    """Gradient of the loss by the activations, to the client."""


ENCODED = frozenset({Kind.ACTIVATIONS, Kind.OUTPUTS, Kind.OUTPUT_GRADIENTS, Kind.GRADIENTS})
"""Messages that cross a cut, and go through the codecs."""


class SplitError(TrainingError):
    """A message of split learning is not what is due; the state of who got it is as before."""


class NotFinite(SplitError):
    """A message, a loss or a gradient holds NaN or Inf: training has diverged, or the sender is broken."""


class RowsDiffer(SplitError):
    """Parties that hold columns do not train on the same rows, in the same order."""


class Message(NamedTuple):
    """A message between a holder of samples and the server."""

    kind: Kind
    holder: int
    """Number of the client that sends or gets it."""
    step: int
    """Number of the batch, from 0; of weights the number of batches before."""
    piece: int = 0
    pieces: int = 1
    num_samples: int = 0
    """Samples of the whole batch."""
    arrays: Mapping[str, Tensor] = MappingProxyType({})
    """`values`, with a row for each sample of the piece, and `targets`."""

    @property
    def values(self) -> Tensor:
        """What the message carries."""
        if VALUES not in self.arrays:
            raise SplitError(f"a message of {self.kind.name.lower()} has no array '{VALUES}': send one")
        return self.arrays[VALUES]


class Codec(NamedTuple):
    """Turns messages into bytes and back; both sides have the same."""

    chain: Chain
    seed: int
    dtype: torch.dtype
    shapes: Mapping[Kind, tuple[int, ...]]
    """Kind -> shape of its values for one sample."""
    max_bytes: int
    """Bytes of the longest message that is read."""

    def encode(self, message: Message, attempt: int) -> bytes:
        """Return a message as bytes; `attempt` and the message's place decide how its values are rounded."""
        values, sides = message.values.reshape(-1), tuple[State, ...]()
        if message.kind in ENCODED and self.chain.transforms:
            place = (attempt, message.holder, message.step, message.piece)
            rng = generator(self.seed, f"split {int(message.kind)}", *place)
            payload, _ = self.chain.encode(values, {}, Encoding(_one_slot(values), attempt, rng))
            values, sides = payload.carrier, payload.sides
        about = [int(message.kind), message.holder, message.step, message.piece, message.pieces, message.num_samples]
        exact = {name: value for name, value in message.arrays.items() if name != VALUES}
        exact[ABOUT] = torch.tensor(about, dtype=torch.int32)
        return pack(Payload(values, (*sides, exact)))

    def decode(self, data: bytes) -> Message:
        """Read a message; bytes that are none raise SplitError. Whether it is due is for its reader to say."""
        try:
            payload = unpack(data, max_bytes=self.max_bytes)
            *sides, exact = payload.sides
            kind, *about = exact[ABOUT].tolist()
            message = Message(Kind(kind), *about)
            values = payload.carrier
            if message.kind in ENCODED and self.chain.transforms:
                values = self.chain.decode(Payload(values, tuple(sides)))
            elif sides:
                raise ValueError("it is encoded, and the plan has no codecs")
            if message.kind in ENCODED:
                values = values.reshape(-1, *self.shapes[message.kind])
            if values.dtype != self.dtype:
                raise ValueError(f"its values are {values.dtype}, {self.dtype} are due")
        except (WireError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise SplitError(f"a message cannot be read ({error}): send it as the plan says") from error
        arrays = {name: value for name, value in exact.items() if name != ABOUT}
        return message._replace(arrays={VALUES: values, **arrays})


def read_message(codec: Codec, data: bytes) -> Message:
    """Read a message of somebody else's: whatever a codec makes of rubbish is a SplitError."""
    try:
        return codec.decode(data)
    except SplitError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise SplitError(f"a message cannot be read ({text}): send it as the plan says") from error


def piece_sizes(num_samples: int, pieces: int) -> list[int]:
    """Return how many samples each piece of a batch has; a batch smaller than the number of pieces has fewer.

    >>> piece_sizes(10, 4), piece_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    pieces = min(pieces, num_samples)
    return [num_samples // pieces + (number < num_samples % pieces) for number in range(pieces)]


def must_be_finite(what: str, *values: Tensor) -> None:
    """Raise NotFinite unless all values are finite."""
    for each in values:
        if not (bool(each.sum().isfinite()) or bool(each.isfinite().all())):  # a finite sum needs no closer look
            raise NotFinite(f"{what} hold NaN or Inf: lower local.lr, or check data and model")


def _one_slot(values: Tensor) -> ParamSpec:
    """Return the layout of a message's values for codecs, which is one tensor."""
    return ParamSpec((Slot(VALUES, tuple(values.shape), 0, values.numel()),), values.numel(), values.dtype)
