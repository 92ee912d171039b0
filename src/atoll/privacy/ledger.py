"""The privacy ledger: the secret of a run, and every attempt that was charged, before anything of it was released.

A file of JSON lines that is only ever added to, each line on disk before `charge` returns. Its first line holds the
secret that all private randomness of the run derives from, so that an attempt that is repeated after a kill is the same
attempt to the bit: it is charged once. So that the same noise is never added to other data, the ledger keeps a keyed
hash of what the noise of each attempt was added to, and refuses to go on if a repeated attempt differs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from atoll.core.errors import DiskFull, RunError
from atoll.core.privacy import RELATION
from atoll.privacy.noise import derived

NAME = "privacy.ledger"
"""The file in a run directory. It must stay secret: with it the noise can be subtracted again."""
FORMAT = 1


class Ledger:
    """What was charged; in memory only if there is no path. Make one with `begin` or `read`."""

    def __init__(self, secret: bytes, path: Path | None = None, sums: Iterable[str] = ()) -> None:
        self.secret, self.path = secret, path
        self._sums = list(sums)
        self._hash_key = derived(secret, "sum")

    @classmethod
    def begin(cls, secret: bytes, identity: str, path: Path | None = None) -> Ledger:
        """A new ledger for the plan of this identity."""
        if path is not None:
            head = {"atoll privacy ledger": FORMAT, "plan": identity, "relation": RELATION, "secret": secret.hex()}
            beside = path.with_name(f".{path.name}.new")
            beside.unlink(missing_ok=True)
            with _explained(path):
                with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(json.dumps(head).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
                _sync_folder(path.parent)
        return cls(secret, path)

    @classmethod
    def read(cls, path: Path, identity: str) -> Ledger:
        """The ledger of a run that goes on; a last line that was cut off was never charged, and is dropped."""
        with _explained(path):
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(path, len(whole))
        try:
            head, *lines = [json.loads(line) for line in whole.splitlines()]
            if head["atoll privacy ledger"] != FORMAT:
                raise ValueError(f"it has format {head['atoll privacy ledger']}, this version of Atoll reads {FORMAT}")
            secret, sums = bytes.fromhex(head["secret"]), _sums(lines)
            owner = head["plan"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"the privacy ledger {path} is damaged ({error}): restore it from a copy that is as new as the run; "
                "without it nobody knows what was spent, so that the run cannot go on"
            ) from error
        if owner != identity:
            raise RunError(
                f"the privacy ledger {path} belongs to another plan: what protects a run, and its data, cannot change; "
                "resume it with its own plan, or start another run, whose budget adds to what this one has spent"
            )
        return cls(secret, path, sums)

    @property
    def num_charged(self) -> int:
        """How many attempts were charged."""
        return len(self._sums)

    @property
    def fingerprint(self) -> str:
        """What the run directory remembers of the secret, to know its ledger again."""
        return derived(self.secret, "fingerprint").hex()[:16]

    def check_owner(self, fingerprint: object) -> None:
        """Refuse a ledger that is not the one whose fingerprint the run wrote down when it began."""
        if fingerprint != self.fingerprint:
            raise RunError(
                f"the privacy ledger {self.path} is not the one that this run began with: restore its own; "
                "the noise of this run derives from the secret in it"
            )

    def check(self, attempts: int) -> None:
        """Refuse a ledger that knows of fewer attempts than have been made."""
        if attempts > self.num_charged:
            raise RunError(
                f"the privacy ledger {self.path} was rolled back: it knows of {self.num_charged} attempts, but the "
                f"checkpoint is after {attempts}: restore the ledger that belongs to the checkpoint"
            )

    def charge(self, attempt: int, parts: Iterable[bytes] = ()) -> None:
        """Charge an attempt, or one that was charged before; `parts` are what its noise is added to, once known."""
        tag = self._tag(parts)
        self.check(attempt)
        if attempt == self.num_charged:
            self._write({"attempt": attempt, "sum": tag})
            self._sums.append(tag)
        elif tag and not self._sums[attempt]:
            self._write({"attempt": attempt, "sum": tag})
            self._sums[attempt] = tag
        elif tag and tag != self._sums[attempt]:
            raise RunError(
                f"attempt {attempt} was charged before with other updates than it has now: to release its noise again "
                "would give the difference away. Go on with the data, the code and the machine that the run began "
                "with, or start another run"
            )

    def _tag(self, parts: Iterable[bytes]) -> str:
        """A keyed hash of all parts, or "" if there are none."""
        whole = hmac.new(self._hash_key, digestmod="sha256")
        some = False
        for part in parts:
            whole.update(len(part).to_bytes(8, "big"))
            whole.update(part)
            some = True
        return whole.hexdigest() if some else ""

    def _write(self, line: dict[str, Any]) -> None:
        if self.path is None:
            return
        with _explained(self.path), self.path.open("ab") as file:
            size = file.tell()
            try:
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, size)  # half a line would spoil the next one
                raise


def _sums(lines: list[dict[str, Any]]) -> list[str]:
    """The hash of each attempt, from lines that charge one after another and may add a hash later."""
    sums: list[str] = []
    for line in lines:
        attempt, tag = line["attempt"], line["sum"]
        if attempt == len(sums):
            sums.append(tag)
        elif 0 <= attempt < len(sums) and not sums[attempt]:
            sums[attempt] = tag
        else:
            raise ValueError(f"attempt {attempt} does not follow {len(sums)} others")
    return sums


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn a failed read or write into an error that says what to do."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else RunError
        raise kind(
            f"the privacy ledger {path} cannot be read or written ({error.strerror}): nothing is released that is not "
            "charged; make room or fix it, then go on with --resume"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
