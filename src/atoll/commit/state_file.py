"""The state of a run as a safetensors file: tensors by name, everything else as JSON in the header."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll.commit.client_states import ClientStates, as_client_states
from atoll.commit.run_state import RunState
from atoll.core.errors import RunError
from atoll.core.messages import State
from atoll.core.record_codec import from_plain, to_plain
from atoll.core.tensor_file import Deferred, TensorReader, tensor_file

SCHEMA = 2
"""The number of the layout, which changes with it."""


def encode_state(state: RunState, identity: str) -> Iterator[bytes | memoryview]:
    """Yield the parts of the file of a run's state, of which few are in memory; `identity` is that of its plan."""
    named: State = {}
    plain = to_plain(state._replace(clients={}), named)
    tensors: dict[str, Tensor | Deferred] = dict(named)
    for client, memory in as_client_states(state.clients).entries():
        plain["clients"].append([client, list(memory)])
        tensors |= {f"clients/{client}/{name}": tensor for name, tensor in memory.items()}
    return tensor_file(tensors, {"state": json.dumps({"schema": SCHEMA, "identity": identity, "fields": plain})})


def read_state(path: Path, identity: str) -> RunState:
    """Read the state that `encode_state` wrote for the run of this identity."""
    try:
        with path.open("rb") as file:
            read = TensorReader(file)
            text = json.loads(read.text["state"])
            _check_header(path, text, identity)
            plain, clients = text["fields"], ClientStates()
            memories = plain.pop("clients")
            state: RunState = from_plain(RunState, plain, read)
            for client, names in memories:
                clients = clients.updated({client: {name: read[f"clients/{client}/{name}"] for name in names}})
            return state._replace(clients=clients)
    except (ValueError, KeyError, TypeError, RuntimeError, struct.error, OSError) as error:
        raise RunError(f"the checkpoint {path} cannot be read ({error}): start again with another --out") from error


def _check_header(path: Path, text: Mapping[str, Any], identity: str) -> None:
    if text["identity"] != identity:
        raise RunError(
            f"{path.parent} belongs to another plan: resume without a plan to go on with its own, "
            "or choose another --out"
        )
    if text.get("schema") != SCHEMA:
        raise RunError(
            f"the checkpoint {path} has layout {text.get('schema', 1)}, this version of Atoll reads {SCHEMA}: go on "
            "with the version that wrote it, or start again with another --out"
        )
