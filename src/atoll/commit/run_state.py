"""The state of a run between two rounds, and its file: tensors by name, everything else as JSON in the header.

Shapes: D parameters, M values of a model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from atoll.commit.client_states import ClientStates, as_client_states
from atoll.commit.guard import Guard
from atoll.core.coordinator import NOTHING, CoordinatorState
from atoll.core.errors import RunError
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.tensor_file import Deferred, TensorReader, from_plain, tensor_file, to_plain
from atoll.train.exchange import Report
from atoll.train.job import Job, first_server

SCHEMA = 2
"""The number of the layout of its file, which changes with it."""


class Journey(NamedTuple):
    """A task on its way, in simulated time."""

    task: Task
    ends: float
    fails: bool


class Ahead(NamedTuple):
    """A task that was trained before it arrived."""

    update: Update
    """Empty if it is not valid."""
    report: Report
    state: State


class RunState(NamedTuple):
    """All that a run is made of at a commit; writing it down and reading it back continues to the same bits."""

    params_D: Tensor
    server: State
    rule: State
    """What the aggregator remembers."""
    clients: Mapping[int, State] = NOTHING
    coordinator: CoordinatorState = CoordinatorState()
    bytes_up: int = 0
    """Bytes of updates, or of messages of secure aggregation, as they are packed: nothing of the transport counts."""
    bytes_down: int = 0
    """Bytes of broadcasts likewise, for each client that was asked, and of messages of secure aggregation."""
    samples: int = 0
    """Samples trained on, every pass counted."""
    seconds: float = 0.0
    clock: float = 0.0
    """Simulated seconds."""
    upload: int = 0
    """The largest payload so far, in bytes: what a client is expected to send."""
    journeys: tuple[Journey, ...] = ()
    """Tasks on their way, in the order of their ends."""
    works: Mapping[Task, float] = MappingProxyType({})
    """How much of its work each task has time for, where that is not all."""
    sent: Mapping[int, Broadcast] = NOTHING
    """What was sent of each version that somebody still works on."""
    ahead: Mapping[int, Ahead] = NOTHING
    """What clients will answer that have not arrived yet."""
    downlink: Mapping[str, Tensor] = MappingProxyType({})
    """What the downlink remembers: above all, what clients know."""
    news: int = 0
    """The bytes of all broadcasts so far, each counted once."""
    last_news: int = 0
    """The bytes of the newest."""
    heard: Mapping[int, int] = NOTHING
    """How many of those bytes each client has heard, where differences are sent."""
    trust: Mapping[int, float] = NOTHING
    """How far the server trusts each client that was looked at, where there is detection."""
    quarantined: tuple[int, ...] = ()
    """Clients that are not asked any more."""
    contribution: Mapping[int, float] = NOTHING
    """What each client has added to the model over the rounds, where that is computed."""


def first_state(job: Job, guard: Guard | None, first_M: Tensor | None = None) -> RunState:
    """Return the state that a run begins with; `first_M` is the first model, where the job has no memory for it."""
    model_M = job.first_D.clone() if first_M is None else first_M
    rule = job.aggregator.init() if guard is None else guard.init()
    return RunState(params_D=model_M, server=first_server(job, model_M), rule=rule, upload=model_M.nbytes)


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


def read_fields(path: Path) -> dict[str, Any]:
    """Read the fields of the state in a file without its tensors; `clients` are pairs of a client and names.

    The caller knows that the file is of this release and of the right plan.
    """
    with path.open("rb") as file:
        fields: dict[str, Any] = json.loads(TensorReader(file).text["state"])["fields"]
        return fields


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
