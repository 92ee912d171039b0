"""What a site records of its own tasks: the model that it was sent and the update that left it, one file a task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import RunError
from atoll.core.messages import Broadcast, Task, Update
from atoll.core.plan import Plan
from atoll.core.tensor_file import TensorReader, from_plain, tensor_file, to_plain

SCHEMA = 1
"""The number of the layout of a file, which changes with it."""
SUFFIX = ".task.safetensors"
COMPARED = ("model", "problem", "loss", "algorithm", "local", "uplink", "privacy", "secagg")
"""Sections of a plan that say how samples become an update."""


class RecordedTask(NamedTuple):
    """A task as the server saw its end."""

    task: Task
    num_clients: int
    """Clients of the federation."""
    sent: Broadcast
    update: Update
    """As the server decodes it, with the noise that this client added."""
    settings: str
    """The compared sections of the plan, as JSON."""


def settings_of(plan: Plan) -> str:
    """Return the sections of a plan that say how samples become an update."""
    plain: dict[str, Any] = plan.to_dict()
    return json.dumps({name: plain.get(name) for name in COMPARED}, sort_keys=True, default=str)


def file_of(recorded: RecordedTask) -> tuple[str, Iterator[bytes | memoryview]]:
    """Return the name of a task's file and its parts."""
    tensors: dict[str, Any] = {}
    plain = to_plain(recorded, tensors)
    text = {"task": json.dumps({"schema": SCHEMA, "fields": plain})}
    return f"{recorded.task.attempt:08d}{SUFFIX}", tensor_file(tensors, text)


def read_tasks(directory: Path) -> list[RecordedTask]:
    """Return the tasks that were recorded in a directory, in order; RunError if there are none or one is damaged."""
    paths = sorted(directory.glob(f"*{SUFFIX}")) if directory.is_dir() else []
    if not paths:
        deeper = sorted({path.parent.name for path in directory.glob(f"*/*{SUFFIX}")})
        hint = f"name one of its runs: {', '.join(deeper)}" if deeper else "let a client record by atoll join --record"
        raise RunError(f"{directory} has no recorded tasks: {hint}")
    return [_read(path) for path in paths]


def _read(path: Path) -> RecordedTask:
    try:
        with path.open("rb") as file:
            reader = TensorReader(file)
            plain = json.loads(reader.text["task"])
            if plain["schema"] != SCHEMA:
                raise RunError(f"{path} has layout {plain['schema']}, this release reads {SCHEMA}: record anew")
            found: RecordedTask = from_plain(RecordedTask, plain["fields"], reader)
            return found
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RuntimeError) as error:
        raise RunError(f"{path} cannot be read as a recorded task ({error}): delete it, or record anew") from error
