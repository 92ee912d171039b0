"""What clients remember, when that is more than memory should hold: beyond a bound it lies in files."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

import torch

from atoll.core.errors import DiskFull
from atoll.core.messages import State
from atoll.core.tensor_file import Deferred, TensorReader, tensor_file

BOUND = 256 << 20
"""Bytes of clients' memories that stay in this process; what was changed longest ago goes to files first."""


@final
class Folder:
    """The directory of a run's spilled memories; it goes with the last value that refers to it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="atoll-clients-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@final
class Spilled:
    """One client's memory in a file, which goes when nothing refers to it any more."""

    def __init__(self, state: State, path: Path, folder: Folder) -> None:
        self.path, self._folder = path, folder
        self.layout = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
        try:
            with path.open("wb") as file:
                file.writelines(tensor_file(state))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise DiskFull(
                f"what clients remember does not fit into {path.parent} ({error.strerror}): make room there, or set "
                "TMPDIR to a directory with more"
            ) from error
        weakref.finalize(self, _remove, str(path))

    def load(self) -> State:
        """Read it back."""
        with self.path.open("rb") as file:
            return dict(TensorReader(file))

    def deferred(self) -> dict[str, Deferred]:
        """Return its tensors, which are read when they are written elsewhere."""
        return {
            name: Deferred(dtype, shape, lambda name=name: self.load()[name])  # type: ignore[misc]
            for name, (dtype, shape) in self.layout.items()
        }


@final
class ClientStates(Mapping[int, State]):
    """Client -> what it remembers: a value, of which `updated` makes another."""

    def __init__(self, bound: int = BOUND) -> None:
        self._bound, self._in_memory = bound, 0
        self._entries: dict[int, State | Spilled] = {}
        self._folder: Folder | None = None

    def __getitem__(self, client: int) -> State:
        entry = self._entries[client]
        return entry.load() if isinstance(entry, Spilled) else entry

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, client: object) -> bool:
        return client in self._entries

    def entries(self) -> Iterator[tuple[int, Mapping[str, torch.Tensor | Deferred]]]:
        """List all memories without reading those that were spilled."""
        for client, entry in self._entries.items():
            yield client, entry.deferred() if isinstance(entry, Spilled) else entry

    def of(self, clients: Iterable[int]) -> ClientStates:
        """Return the memories of some clients that have one, without reading those that were spilled."""
        some = ClientStates(self._bound)
        some._entries, some._folder = {c: self._entries[c] for c in clients if c in self._entries}, self._folder
        return some

    def updated(self, changed: Mapping[int, State]) -> ClientStates:
        """Return the memories after some clients' have changed; the oldest are spilled if there are too many."""
        after = ClientStates(self._bound)
        after._entries, after._in_memory, after._folder = dict(self._entries), self._in_memory, self._folder
        for client, state in changed.items():
            after._in_memory -= _size(after._entries.pop(client, {}))
            after._entries[client] = state
            after._in_memory += _size(state)
        if after._in_memory > after._bound:
            after._spill()
        return after

    def _spill(self) -> None:
        self._folder = self._folder or Folder()
        for client, entry in list(self._entries.items()):
            if self._in_memory <= self._bound // 2:
                return
            if not isinstance(entry, Spilled):
                handle, name = tempfile.mkstemp(suffix=".safetensors", dir=self._folder.path)
                os.close(handle)
                self._entries[client] = Spilled(entry, Path(name), self._folder)
                self._in_memory -= _size(entry)


def as_client_states(memories: Mapping[int, State]) -> ClientStates:
    """Return memories that were kept in any mapping so that they can be spilled."""
    return memories if isinstance(memories, ClientStates) else ClientStates().updated(memories)


def _size(entry: State | Spilled) -> int:
    return 0 if isinstance(entry, Spilled) else sum(value.nbytes for value in entry.values())


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)
