"""Named tensors over a pipe: a JSON header and raw bytes, never pickle."""

from __future__ import annotations

import math
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch

from atoll.core.messages import State

ALLOWED = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ALLOWED}


def send(pipe: Connection, header: dict[str, Any], tensors: State | None = None) -> None:
    """Send a header and tensors."""
    tensors = tensors or {}
    layout = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
    pipe.send_bytes(msgspec.json.encode({**header, "tensors": layout}))
    for tensor in tensors.values():
        if tensor.numel():
            pipe.send_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def receive(pipe: Connection) -> tuple[dict[str, Any], State]:
    """Receive a header and tensors."""
    header = msgspec.json.decode(pipe.recv_bytes())
    tensors: State = {}
    for name, dtype, shape in header.pop("tensors"):
        empty = math.prod(shape) == 0
        raw = (
            torch.empty(0, dtype=torch.uint8)
            if empty
            else torch.frombuffer(bytearray(pipe.recv_bytes()), dtype=torch.uint8)
        )
        tensors[name] = raw.view(DTYPES[dtype]).view(shape)
    return header, tensors


def grouped(tensors: State) -> dict[str, State]:
    """Split names of the form `group/name` into one table a group."""
    groups: dict[str, State] = {}
    for path, tensor in tensors.items():
        group, _, name = path.partition("/")
        groups.setdefault(group, {})[name] = tensor
    return groups


def joined(groups: dict[str, State]) -> State:
    """Undo `grouped`."""
    return {f"{group}/{name}": tensor for group, state in groups.items() for name, tensor in state.items()}
