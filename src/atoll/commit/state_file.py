"""The state of a run as a safetensors file: tensors by name, everything else as JSON in the header."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from atoll.commit.run_state import RunState
from atoll.core.errors import RunError
from atoll.core.messages import State
from atoll.core.record_codec import from_plain, to_plain
from atoll.core.tensor_file import tensor_file

SCHEMA = 2
"""The number of the layout, which changes with it."""


def encode_state(state: RunState, identity: str) -> list[bytes | memoryview]:
    """Return the parts of the file of a run's state; `identity` is that of its plan."""
    tensors: State = {}
    plain = to_plain(state, tensors)
    return tensor_file(tensors, {"state": json.dumps({"schema": SCHEMA, "identity": identity, "fields": plain})})


def read_state(path: Path, identity: str) -> RunState:
    """Read the state that `encode_state` wrote for the run of this identity."""
    try:
        with safe_open(path, framework="pt") as file:
            text = json.loads(file.metadata()["state"])
            # copied: sums and products have other last bits where memory does not begin as torch lets it begin
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError, OSError) as error:
        raise RunError(f"the checkpoint {path} cannot be read ({error}): start again with another --out") from error
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
    state: RunState = from_plain(RunState, text["fields"], tensors)
    return state
