"""A client's home: its key, its secret, the server that it knows, and what it remembers of each run.

A kill at any moment loses nothing: files are written beside their place, synced and renamed. What a client would
remember of an update, and what it tells of it, are one file, written before anything leaves: an update is trained once,
and delivered as often as it takes.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors import SafetensorError, safe_open
from torch import Tensor

from atoll.core.errors import PlanError, RunError
from atoll.core.messages import State
from atoll.core.tensor_file import tensor_file
from atoll.ledger import chain
from atoll.network.client.budget import NAME as BUDGET
from atoll.network.client.budget import Budget
from atoll.network.protocol.blobs import Disk, disk_errors, open_private, sync_directory, write_file
from atoll.network.protocol.identity import load_key, make_key
from atoll.network.protocol.messages import Delivery, RunInfo
from atoll.network.protocol.objects import Objects
from atoll.privacy.noise import derived

T = TypeVar("T")

VECTOR, UPDATE, STATE = "vector", "update", "state."
"""What tensors are called in files."""
NEVER = -1
"""Stands for an attempt or a version that there never was."""


class EnrolledServer(msgspec.Struct, frozen=True):
    """The server that a client is enrolled with."""

    url: str
    server_key: bytes
    """What signs its ledgers: what it said at enrolment, and no other since."""
    client: str
    """The client's id."""
    name: str
    authority: str | None = None
    """File of the certificates that vouch for the server; the system's own if unset."""


class PendingUpdate(msgspec.Struct, frozen=True):
    """An update that was trained: delivered, or about to be."""

    attempt: int
    version: int
    model: str
    """The name of the broadcast that it was made of."""
    params: str
    """The hash of the parameters in it."""
    object: str
    delivery: Delivery


class SessionState(msgspec.Struct, frozen=True):
    """A session of secure aggregation, as far as it went: written down whole before an answer leaves."""

    heard: str
    """The name of the newest message."""
    answer: bytes
    """What the client says to it; nothing if it has left the session."""
    max_samples: int
    """What everybody's number of samples is a share of."""
    state: bytes
    once: tuple[bytes, ...]
    """What may be done once only, and was."""


ENDED_SESSION = SessionState("", b"", 0, b"", ())
"""Stands for a session that is over, or was given up: nothing of it is left, and it cannot go on."""


class Home:
    """The directory of a client, for one process at a time."""

    def __init__(self, path: Path, lock: IO[str], budget: Path | None = None) -> None:
        self.path, self._lock, self._budget = path, lock, budget or path / BUDGET
        self.key: Ed25519PrivateKey = load_key(path / "key")
        with _readable(path / "secret"):
            self._secret = (path / "secret").read_bytes()

    @classmethod
    def make(cls, path: Path) -> Home:
        """A home for a client that is about to enrol; keys that are there from an earlier try are kept."""
        if (path / "server.json").exists():
            raise RunError(f"{path} is the home of an enrolled client: join with it, or name another --home")
        path.mkdir(0o700, parents=True, exist_ok=True)
        lock = _locked(path)
        if not (path / "key").exists():
            make_key(path / "key")
        if not (path / "secret").exists():
            _write(path / "secret", secrets.token_bytes(32))
        return cls(path, lock)

    @classmethod
    def open(cls, path: Path, budget: Path | None = None) -> Home:
        """The home of an enrolled client; `budget` is the file of what it has spent, its own unless given."""
        if not (path / "server.json").exists():
            raise RunError(f"{path} is not the home of an enrolled client: run atoll enrol --home {path} first")
        return cls(path, _locked(path), budget)

    def close(self) -> None:
        """Let another process use it."""
        self._lock.close()

    def enrolled(self, server: EnrolledServer) -> None:
        """Remember the server."""
        _write(self.path / "server.json", msgspec.json.format(msgspec.json.encode(server)) + b"\n")

    def server(self) -> EnrolledServer:
        """The server that this client is enrolled with."""
        return _read(self.path / "server.json", EnrolledServer)

    def secret(self, run: str) -> bytes:
        """What the client's own noise in a run derives from; it never leaves."""
        return derived(self._secret, "run", run)

    def peers(self, told: Mapping[str, bytes]) -> dict[int, bytes]:
        """The keys of all clients by number; one that was seen before is not changed by what a server says."""
        path = self.path / "peers.json"
        known = _read(path, dict[str, bytes]) if path.exists() else {}
        for number, key in told.items():
            if known.setdefault(number, key) != key:
                raise PlanError(
                    f"the server says another key of client {number} than before: ask that client; if it is right, "
                    f"remove its line from {path}"
                )
        _write(path, msgspec.json.format(msgspec.json.encode(known)) + b"\n")
        return {int(number): key for number, key in known.items()}

    def runs(self) -> list[str]:
        """The runs that this client agreed to take part in."""
        return sorted(path.parent.name for path in self.path.glob("runs/*/info.json"))

    def unfinished(self) -> list[str]:
        """Those that are not over, as far as is known here."""
        return [name for name in self.runs() if not (self.path / "runs" / name / "over").exists()]

    def run(self, name: str) -> RunHome:
        """What the client remembers of a run."""
        return RunHome(self.path / "runs" / name, Budget(self._budget, self.server().server_key.hex(), name))


class RunHome:
    """What a client remembers of one run."""

    def __init__(self, path: Path, budget: Budget | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.budget = budget or Budget(path.parent / BUDGET, "", path.name)
        self.path, self.objects = path, Objects(Disk(path / "objects", durable=False))
        """`objects` are those that were fetched: they can be had again."""
        self.objects.sweep()
        self.head = self._read_head()
        """The last record of the run's ledger that was verified."""
        self.sent_objects = {json.loads(line)["object"] for line in _lines(path / "sent.jsonl")}
        """Every object that this client ever delivered in this run, or was about to."""

    def save_info(self, info: RunInfo) -> None:
        """Remember what the run is; one that is another than before is refused. It may only become longer."""
        path = self.path / "info.json"
        if path.exists() and not self.is_agreed_plan(info.plan):
            raise PlanError(f"run {info.run} has another plan than it had before: give the other plan another name")
        _write(path, msgspec.json.encode(info))

    def info(self) -> RunInfo:
        """Return what the client agreed to."""
        return _read(self.path / "info.json", RunInfo)

    def is_agreed_plan(self, plan: Mapping[str, Any]) -> bool:
        """Whether this is the plan that the client agreed to; only the number of rounds may differ."""
        return _lasting(self.info().plan) == _lasting(plan)

    def save_model(self, named: State) -> Path:
        """Write the model that the run ended with, tensors by name; where it is."""
        path = self.path / "model.safetensors"
        _write(path, *tensor_file(named))
        return path

    def mark_ended(self) -> None:
        """Note that the run has ended; nothing but its ledger and its model is needed any more."""
        _write(self.path / "over", b"")
        self.end_sessions()
        self.objects.keep_only(())

    def state(self) -> tuple[int, State]:
        """The newest attempt that counted, and what the client remembers of it."""
        path = self.path / "state.safetensors"
        found = _pending(path)
        return (NEVER, {}) if found is None else (found.attempt, _tensors(path, STATE))

    def pending(self) -> PendingUpdate | None:
        """The newest update that was trained, unless it counted already."""
        return _pending(self.path / "pending.safetensors")

    def last_trained(self) -> tuple[int, int]:
        """The newest attempt that an update was trained for, and its version: none before is ever trained again."""
        found = self.pending() or _pending(self.path / "state.safetensors")
        return (NEVER, NEVER) if found is None else (found.attempt, found.version)

    def save_update(self, pending: PendingUpdate, update: Sequence[bytes | memoryview], state: State) -> None:
        """Write down an update, and what is remembered if it counts; what was fetched for it is not needed any more."""
        _append(self.path / "sent.jsonl", json.dumps({"attempt": pending.attempt, "object": pending.object}))
        self.sent_objects.add(pending.object)
        tensors = {f"{STATE}{name}": tensor for name, tensor in state.items()}
        tensors[UPDATE] = torch.frombuffer(bytearray().join(update), dtype=torch.uint8)
        text = {"pending": msgspec.json.encode(pending).decode()}
        _write(self.path / "pending.safetensors", *tensor_file(tensors, text))
        self.objects.keep_only(())
        self.end_sessions(pending.attempt - 1)

    def update(self) -> memoryview:
        """The bytes of the pending update."""
        return _tensors(self.path / "pending.safetensors", UPDATE)[""].numpy().data

    def session(self, attempt: int) -> SessionState | None:
        """The session of an attempt, if this client was in one."""
        path = self.path / "talks" / str(attempt)
        if not path.exists():
            return None
        with _readable(path):
            return msgspec.msgpack.decode(path.read_bytes(), type=SessionState)

    def save_session(self, attempt: int, session: SessionState) -> None:
        """Write down how far a session went; it holds secrets until it is over."""
        (self.path / "talks").mkdir(mode=0o700, exist_ok=True)
        _write(self.path / "talks" / str(attempt), msgspec.msgpack.encode(session))

    def session_marks(self) -> dict[int, int]:
        """Return the attempts with a session, each with a mark that changes whenever something is said in it."""
        return {int(path.name): path.stat().st_mtime_ns for path in (self.path / "talks").glob("[0-9]*")}

    def end_sessions(self, up_to: int | None = None, only: int | None = None) -> None:
        """Remove the secrets of sessions up to an attempt, or of one attempt only; or of all.

        Of the newest update it stays known that it was in a session, since it must never be in another.
        """
        pending = self.pending()
        for path in (self.path / "talks").glob("[0-9]*"):
            attempt = int(path.name)
            if (only is not None and attempt != only) or (up_to is not None and attempt > up_to):
                continue
            if pending is None or pending.attempt != attempt:
                path.unlink()
            elif (session := self.session(attempt)) is not None and session != ENDED_SESSION:
                self.save_session(attempt, ENDED_SESSION)

    def confirm_update(self, counted: int | None) -> None:
        """If the pending update counted, what it remembers holds from now on."""
        pending = self.pending()
        if pending is not None and pending.attempt == counted:
            (self.path / "pending.safetensors").rename(self.path / "state.safetensors")
            sync_directory(self.path)

    def last_broadcast(self) -> tuple[int, Tensor] | None:
        """The newest broadcast that was heard, and its version, where differences are sent."""
        path = self.path / "known.safetensors"
        text = _text(path)
        return None if text is None else (int(text["version"]), _tensors(path)[VECTOR])

    def save_broadcast(self, version: int, vector_V: Tensor) -> None:
        """Remember a broadcast."""
        _write(self.path / "known.safetensors", *tensor_file({VECTOR: vector_V}, {"version": str(version)}))

    def ledger_lines(self) -> list[str]:
        """The run's ledger as far as it was verified."""
        return list(_lines(self.path / "ledger.jsonl"))

    def add_ledger_lines(self, lines: Sequence[str], head: chain.Head) -> None:
        """Keep lines that were verified, and their head: from now on the server is held to them."""
        _append(self.path / "ledger.jsonl", *lines)
        self.head = head

    def receipts(self, kind: type[T]) -> list[T]:
        """Return what the server has acknowledged of this client."""
        path = self.path / "receipts.jsonl"
        with _readable(path):
            return [msgspec.json.decode(line, type=kind) for line in _lines(path)]

    def save_receipt(self, receipt: msgspec.Struct) -> None:
        """Write down what the server has acknowledged."""
        _append(self.path / "receipts.jsonl", msgspec.json.encode(receipt).decode())

    def _read_head(self) -> chain.Head:
        """The head of the ledger; lines at its end that a loss of power has spoilt are removed."""
        lines, whole = self.ledger_lines(), chain.EMPTY
        for left in range(len(lines), 0, -1):
            with suppress(ValueError, KeyError, TypeError):
                whole = chain.Head(left, chain.read(lines[left - 1])[0].hash())
                break
        if whole.length < len(lines):
            _write(self.path / "ledger.jsonl", "".join(f"{line}\n" for line in lines[: whole.length]).encode())
        return whole


def _text(path: Path) -> dict[str, str] | None:
    """The text in the header of a file of tensors; None if there is no file."""
    if not path.exists():
        return None
    with _readable(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _tensors(path: Path, start: str = "") -> State:
    """The tensors of a file whose names start so, by the rest of their names."""
    with _readable(path), safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118
        return {name.removeprefix(start): file.get_tensor(name) for name in names}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{path} cannot be read ({error}): restore it from a copy") from error


def _pending(path: Path) -> PendingUpdate | None:
    text = _text(path)
    with _readable(path):
        return None if text is None else msgspec.json.decode(text["pending"], type=PendingUpdate)


def _lasting(plan: Mapping[str, Any]) -> str:
    """What must not change in the course of a run."""
    return json.dumps({key: value for key, value in plan.items() if key != "rounds"}, sort_keys=True)


def _lines(path: Path) -> Iterator[str]:
    """The whole lines of a file; one that was cut off by a kill is removed."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    yield from whole.decode().splitlines()


def _append(path: Path, *lines: str) -> None:
    """Add lines to a file: all of them, or none if the disk is full."""
    with disk_errors(path.parent), open(path, "ab", opener=open_private) as file:
        size = file.tell()
        try:
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, size)
            raise


def _write(path: Path, *parts: bytes | memoryview) -> None:
    write_file(path, path.with_name(f".{path.name}.new"), *parts)
    sync_directory(path.parent)


def _read(path: Path, kind: type[T]) -> T:
    with _readable(path):
        return msgspec.json.decode(path.read_bytes(), type=kind)


def _locked(path: Path) -> IO[str]:
    file = open(path / ".lock", "w", opener=open_private)  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise RunError(f"{path} is in use by another process: a client runs once; stop the other one") from error
    return file
