"""The privacy ledger: the secret of a run, and a record of every attempt, written before anything of it is released.

An append-only file of JSON lines, each on disk before `charge` returns. Its first line holds the secret from which all
private randomness of the run derives, so that an attempt that is repeated after a kill has the same bits and is charged
once. To prevent that the same noise is added to different data, the ledger keeps a keyed hash of the input of each
attempt's noise, and refuses a repeated attempt whose input differs.
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
"""File name in a run directory. The file must stay secret: it allows to subtract the noise again."""
FORMAT = 1


class Ledger:
    """The charged attempts of a run, in a file or, without a path, in memory. Create one with `begin` or `read`."""

    def __init__(self, secret: bytes, path: Path | None = None, sums: Iterable[str] = ()) -> None:
        self.secret, self.path = secret, path
        self._sums = list(sums)
        self._hash_key = derived(secret, "sum")

    @classmethod
    def begin(cls, secret: bytes, identity: str, path: Path | None = None) -> Ledger:
        """Create a ledger for the plan with this identity."""
        if path is not None:
            head = {"atoll privacy ledger": FORMAT, "plan": identity, "relation": RELATION, "secret": secret.hex()}
            temporary = path.with_name(f".{path.name}.new")
            temporary.unlink(missing_ok=True)
            with _explained(path):
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(json.dumps(head).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
                _sync_folder(path.parent)
        return cls(secret, path)

    @classmethod
    def read(cls, path: Path, identity: str) -> Ledger:
        """Read the ledger of a run that continues; drop an incomplete last line, whose attempt was never charged."""
        with _explained(path):
            data = path.read_bytes()
            complete = data[: data.rfind(b"\n") + 1]
            if len(complete) < len(data):
                os.truncate(path, len(complete))
        try:
            head, *lines = [json.loads(line) for line in complete.splitlines()]
            if head["atoll privacy ledger"] != FORMAT:
                raise ValueError(f"it has format {head['atoll privacy ledger']}, this version of Atoll reads {FORMAT}")
            secret, sums = bytes.fromhex(head["secret"]), _sums(lines)
            owner = head["plan"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"the privacy ledger {path} is damaged ({error}): restore it from a copy that is as new as the run; "
                "without it the privacy loss so far is unknown, and the run cannot continue"
            ) from error
        if owner != identity:
            raise RunError(
                f"the privacy ledger {path} belongs to another plan: a run's data and its privacy settings cannot "
                "change; resume it with its own plan, or start another run, whose privacy loss adds to that of this one"
            )
        return cls(secret, path, sums)

    @property
    def num_charged(self) -> int:
        """Number of charged attempts."""
        return len(self._sums)

    @property
    def fingerprint(self) -> str:
        """Hash of the secret, 16 hexadecimal digits, by which a run directory recognises its ledger."""
        return derived(self.secret, "fingerprint").hex()[:16]

    def check_owner(self, fingerprint: object) -> None:
        """Refuse this ledger if it has another fingerprint than the run recorded when it began."""
        if fingerprint != self.fingerprint:
            raise RunError(
                f"the privacy ledger {self.path} is not the one that this run began with: restore the original, since "
                "the noise of this run derives from the secret in it"
            )

    def check(self, attempts: int) -> None:
        """Refuse this ledger if it has charged fewer attempts than the run has made."""
        if attempts > self.num_charged:
            raise RunError(
                f"the privacy ledger {self.path} was rolled back: it holds {self.num_charged} attempts, but the "
                f"checkpoint is after {attempts}: restore the ledger that belongs to the checkpoint"
            )

    def charge(self, attempt: int, parts: Iterable[bytes] = ()) -> None:
        """Charge an attempt, unless it was charged before; `parts` is the input of its noise, once that is known."""
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
                f"attempt {attempt} was charged before with other updates than it has now: releasing its noise again "
                "would reveal the difference. Continue with the data, the code and the machine that the run began "
                "with, or start another run"
            )

    def _tag(self, parts: Iterable[bytes]) -> str:
        """Return a keyed hash of all parts, or "" if there are none."""
        digest = hmac.new(self._hash_key, digestmod="sha256")
        empty = True
        for part in parts:
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
            empty = False
        return "" if empty else digest.hexdigest()

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
                os.truncate(self.path, size)  # half a line would corrupt the next one
                raise


def _sums(lines: list[dict[str, Any]]) -> list[str]:
    """Return the hash of each attempt, from lines that charge in ascending order and may add a hash later."""
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
    """Turn a failed read or write into a RunError that says what to do."""
    try:
        yield
    except OSError as error:
        kind = DiskFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else RunError
        raise kind(
            f"the privacy ledger {path} cannot be read or written ({error.strerror}), and nothing is released without "
            "a charge: free disk space or fix its permissions, then continue with --resume"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
