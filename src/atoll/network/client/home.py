"""A client's home directory: its key, its secret, its server, and its state of each run.

A kill at any moment loses nothing: files are written atomically. An update, its metadata and the client's next state
are one file, written before the update leaves: it is trained once, and delivered as often as needed.
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
from atoll.network.protocol.messages import Delivery, RunInfo, SiteEvaluation
from atoll.network.protocol.objects import Objects
from atoll.privacy.noise import derived

T = TypeVar("T")

VECTOR, UPDATE, STATE = "vector", "update", "state."
"""Names of tensors in files."""
NEVER = -1
"""No attempt, or no version."""


class EnrolledServer(msgspec.Struct, frozen=True):
    """The server with which a client is enrolled."""

    url: str
    server_key: bytes
    """The key that signs its ledgers, as it was at enrolment."""
    client: str
    """The client's id."""
    name: str
    authority: str | None = None
    """File of trusted certificates; the system's if unset."""


class PendingUpdate(msgspec.Struct, frozen=True):
    """A trained update that was delivered, or is to be."""

    attempt: int
    version: int
    model: str
    """The name of the broadcast on which it was trained."""
    params: str
    """The hash of the broadcast's parameters."""
    object: str
    delivery: Delivery


class SessionState(msgspec.Struct, frozen=True):
    """A session of secure aggregation after a step; written before the answer leaves."""

    heard: str
    """The name of the newest message of the server."""
    answer: bytes
    """The client's answer; empty if it has left the session."""
    max_samples: int
    """Samples of the largest client, to which numbers of samples are relative."""
    state: bytes
    once: tuple[bytes, ...]
    """Actions that are allowed once, and were taken."""


ENDED_SESSION = SessionState(heard="", answer=b"", max_samples=0, state=b"", once=())
"""A session that has ended or was given up: its secrets are removed, and it cannot go on."""


class Home:
    """The home of a client, for one process at a time."""

    def __init__(self, path: Path, lock: IO[str], budget: Path | None = None) -> None:
        self.path, self._lock, self._budget = path, lock, budget or path / BUDGET
        self.key: Ed25519PrivateKey = load_key(path / "key")
        with _readable(path / "secret"):
            self._secret = (path / "secret").read_bytes()

    @classmethod
    def make(cls, path: Path) -> Home:
        """Make a home for a client that is to enrol; keep keys of an earlier try."""
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
        """Open the home of an enrolled client; `budget` is the file of its privacy budget, if it is elsewhere."""
        if not (path / "server.json").exists():
            raise RunError(f"{path} is not the home of an enrolled client: run atoll enrol --home {path} first")
        return cls(path, _locked(path), budget)

    def close(self) -> None:
        """Unlock the home."""
        self._lock.close()

    def enrolled(self, server: EnrolledServer) -> None:
        """Save the server."""
        _write(self.path / "server.json", msgspec.json.format(msgspec.json.encode(server)) + b"\n")

    def server(self) -> EnrolledServer:
        """Read the server with which this client is enrolled."""
        return _read(self.path / "server.json", EnrolledServer)

    def secret(self, run: str) -> bytes:
        """Return the secret of the client's noise in a run."""
        return derived(self._secret, "run", run)

    def peers(self, announced: Mapping[str, bytes]) -> dict[int, bytes]:
        """Add announced keys of clients, and return all by number; refuse one that differs from the first seen."""
        path = self.path / "peers.json"
        known = _read(path, dict[str, bytes]) if path.exists() else {}
        for number, key in announced.items():
            if known.setdefault(number, key) != key:
                raise PlanError(
                    f"the server says another key of client {number} than before: ask that client; if it is right, "
                    f"remove its line from {path}"
                )
        _write(path, msgspec.json.format(msgspec.json.encode(known)) + b"\n")
        return {int(number): key for number, key in known.items()}

    def runs(self) -> list[str]:
        """Return the runs to which this client agreed."""
        return sorted(path.parent.name for path in self.path.glob("runs/*/info.json"))

    def unfinished(self) -> list[str]:
        """Return the runs that have not ended, as far as is known here."""
        return [name for name in self.runs() if not (self.path / "runs" / name / "over").exists()]

    def run(self, name: str) -> RunHome:
        """Open the directory of a run."""
        return RunHome(self.path / "runs" / name, self.run_budget(name))

    def run_budget(self, name: str) -> Budget:
        """Return the account of a run in this client's budget."""
        return Budget(self._budget, self.server().server_key.hex(), name)


class RunHome:
    """A client's directory of one run."""

    def __init__(self, path: Path, budget: Budget | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.budget = budget or Budget(path.parent / BUDGET, "", path.name)
        self.path, self.objects = path, Objects(Disk(path / "objects", durable=False))
        """`objects` holds downloads, which can be fetched again."""
        self.objects.sweep()
        self.head = self._read_head()
        """The newest verified record of the run's ledger."""
        self.sent_objects = {json.loads(line)["object"] for line in _lines(path / "sent.jsonl")}
        """Every object that this client delivered in this run, or was to deliver."""

    def save_info(self, info: RunInfo) -> None:
        """Save the description of the run; refuse another plan than before, but for the number of rounds."""
        path = self.path / "info.json"
        if path.exists() and not self.is_agreed_plan(info.plan):
            raise PlanError(f"run {info.run} has another plan than it had before: give the other plan another name")
        _write(path, msgspec.json.encode(info))

    def info(self) -> RunInfo:
        """Return the description of the run to which the client agreed."""
        return _read(self.path / "info.json", RunInfo)

    def is_agreed_plan(self, plan: Mapping[str, Any]) -> bool:
        """Return whether a plan is the one that was agreed to; the number of rounds may differ."""
        return {**self.info().plan, "rounds": 0} == {**plan, "rounds": 0}

    def save_model(self, named: State) -> Path:
        """Save the final model, tensors by name; return its path."""
        path = self.path / "model.safetensors"
        _write(path, *tensor_file(named))
        return path

    def mark_ended(self) -> None:
        """Note that the run has ended, and remove all but its ledger and model."""
        _write(self.path / "over", b"")
        self.end_sessions()
        self.objects.keep_only(())

    def state(self) -> tuple[int, State]:
        """Return the newest attempt that counted, and the client's state after it."""
        path = self.path / "state.safetensors"
        confirmed = _pending(path)
        return (NEVER, {}) if confirmed is None else (confirmed.attempt, _tensors(path, STATE))

    def pending(self) -> PendingUpdate | None:
        """Return the newest trained update, unless it has been confirmed."""
        return _pending(self.path / "pending.safetensors")

    def last_trained(self) -> tuple[int, int]:
        """Return attempt and version of the newest training; no earlier attempt is ever trained again."""
        newest = self.pending() or _pending(self.path / "state.safetensors")
        return (NEVER, NEVER) if newest is None else (newest.attempt, newest.version)

    def note_sent(self, attempt: int, name: str) -> None:
        """Note what is delivered for an attempt, by its name, before it leaves."""
        _append(self.path / "sent.jsonl", json.dumps({"attempt": attempt, "object": name}))
        self.sent_objects.add(name)

    def save_update(self, pending: PendingUpdate, update: Sequence[bytes | memoryview], state: State) -> None:
        """Save an update and the state that becomes valid if it counts; remove what was downloaded for it."""
        self.note_sent(pending.attempt, pending.object)
        tensors = {f"{STATE}{name}": tensor for name, tensor in state.items()}
        tensors[UPDATE] = torch.frombuffer(bytearray().join(update), dtype=torch.uint8)
        text = {"pending": msgspec.json.encode(pending).decode()}
        _write(self.path / "pending.safetensors", *tensor_file(tensors, text))
        self.objects.keep_only(())
        self.end_sessions(pending.attempt - 1)

    def update(self) -> memoryview:
        """Return the bytes of the pending update."""
        return _tensors(self.path / "pending.safetensors", UPDATE)[""].numpy().data

    def session(self, attempt: int) -> SessionState | None:
        """Return the session of an attempt; None if there was none."""
        path = self.path / "talks" / str(attempt)
        if not path.exists():
            return None
        with _readable(path):
            return msgspec.msgpack.decode(path.read_bytes(), type=SessionState)

    def save_session(self, attempt: int, session: SessionState) -> None:
        """Save a session; it holds secrets until it ends."""
        (self.path / "talks").mkdir(mode=0o700, exist_ok=True)
        _write(self.path / "talks" / str(attempt), msgspec.msgpack.encode(session))

    def session_marks(self) -> dict[int, int]:
        """Return the attempts with a session, each with a mark that changes with every step."""
        return {int(path.name): path.stat().st_mtime_ns for path in (self.path / "talks").glob("[0-9]*")}

    def end_sessions(self, up_to: int | None = None, only: int | None = None) -> None:
        """Remove the secrets of sessions: of those up to an attempt, of one attempt only, or of all.

        The mark that the pending update was in a session remains, since it must never be in another.
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
        """Make the state of the pending update valid, if its attempt counted."""
        pending = self.pending()
        if pending is not None and pending.attempt == counted:
            (self.path / "pending.safetensors").rename(self.path / "state.safetensors")
            sync_directory(self.path)

    def told_evaluation(self) -> tuple[int, SiteEvaluation] | None:
        """Return the newest version whose evaluation was told with noise, and what was told."""
        path = self.path / "told.json"
        return _read(path, tuple[int, SiteEvaluation]) if path.exists() else None

    def save_evaluation(self, version: int, told: SiteEvaluation) -> None:
        """Save an evaluation with noise, before it leaves."""
        _write(self.path / "told.json", msgspec.json.encode((version, told)))

    def last_broadcast(self) -> tuple[int, Tensor] | None:
        """Return version and vector of the newest broadcast, where differences are sent or changes are bounded."""
        path = self.path / "known.safetensors"
        text = _text(path)
        return None if text is None else (int(text["version"]), _tensors(path)[VECTOR])

    def save_broadcast(self, version: int, vector_V: Tensor) -> None:
        """Save a broadcast."""
        _write(self.path / "known.safetensors", *tensor_file({VECTOR: vector_V}, {"version": str(version)}))

    def ledger_lines(self) -> list[str]:
        """Return the verified part of the run's ledger."""
        return list(_lines(self.path / "ledger.jsonl"))

    def add_ledger_lines(self, lines: Sequence[str], head: chain.Head) -> None:
        """Append verified lines, to which the server is held from now on; `head` is the head after them."""
        _append(self.path / "ledger.jsonl", *lines)
        self.head = head

    def receipts(self, kind: type[T]) -> list[T]:
        """Return the server's acknowledgements of this client's updates."""
        path = self.path / "receipts.jsonl"
        with _readable(path):
            return [msgspec.json.decode(line, type=kind) for line in _lines(path)]

    def save_receipt(self, receipt: msgspec.Struct) -> None:
        """Save an acknowledgement of the server."""
        _append(self.path / "receipts.jsonl", msgspec.json.encode(receipt).decode())

    def _read_head(self) -> chain.Head:
        """Return the head of the ledger; remove lines at its end that a loss of power damaged."""
        lines, whole = self.ledger_lines(), chain.EMPTY
        for left in range(len(lines), 0, -1):
            with suppress(ValueError, KeyError, TypeError):
                whole = chain.Head(left, chain.read(lines[left - 1])[0].hash())
                break
        if whole.length < len(lines):
            _write(self.path / "ledger.jsonl", "".join(f"{line}\n" for line in lines[: whole.length]).encode())
        return whole


def _text(path: Path) -> dict[str, str] | None:
    """Read the text in the header of a file of tensors; None if there is no file."""
    if not path.exists():
        return None
    with _readable(path), safe_open(path, framework="pt") as file:
        return file.metadata() or {}


def _tensors(path: Path, start: str = "") -> State:
    """Read the tensors whose names start with `start`, by the rest of their names."""
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


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; remove a last line that a kill cut off."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    yield from whole.decode().splitlines()


def _append(path: Path, *lines: str) -> None:
    """Append lines to a file: all, or none if the disk is full."""
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
