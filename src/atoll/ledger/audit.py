"""Audit of a ledger: check that its records are consistent, beyond their hashes and signatures.

The chain shows that nothing was changed after the server signed it. The audit also checks what the server signed:
versions count up by one, each starts from the previous model and is broadcast in one form only, no update counts twice,
and every counted update was signed by its client for the broadcast in the ledger. Clients run the same checks on every
new record, and end at the first inconsistent one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from atoll.ledger import chain
from atoll.ledger.chain import Fault, Head, Record
from atoll.ledger.signing import client_id, holds, plan_hash, update_text

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class Rejected(msgspec.Struct, frozen=True):
    """A client whose update was rejected."""

    client: int
    why: str
    attempt: Number | None = None
    """Attempt of the rejected update; missing in older ledgers."""


class Counted(msgspec.Struct, frozen=True):
    """A client whose update was counted; the signed fields are missing under secure aggregation."""

    client: Number
    id: str
    key: Hash
    version: Number
    """Version of the model that the client trained from."""
    attempt: Number
    num_samples: Number | None = None
    loss: float | None = None
    """Mean training loss; None if the plan's client work has none."""
    weight: float | None = None
    object: Hash | None = None
    signature: Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")] | None = None
    broadcast: Hash | None = None
    """Hash of the broadcast that the client trained on and signed; missing for older clients."""


class Start(msgspec.Struct, frozen=True):
    """Body of the record that starts a run."""

    run: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]
    plan: dict[str, Any]
    """The plan as it is sent to clients."""
    plan_hash: Hash
    model: Hash
    """Hash of the first parameters."""
    server_key: Hash


class Broadcast(msgspec.Struct, frozen=True):
    """Body of the record that a version is broadcast for the first time; it is broadcast in this form only."""

    version: Number
    object: Hash
    """Hash of the parameters and extra vectors after decoding, independent of how they were transferred."""


class Commit(msgspec.Struct, frozen=True):
    """Body of the record of a new version of the model."""

    version: Number
    attempt: Number
    model: Hash
    before: Hash
    """Hash of the previous model."""
    rule: str
    cohort: tuple[Counted, ...]
    rejected: tuple[Rejected, ...]
    seconds: int
    """Unix time of the commit, in seconds."""
    epsilon: float | None = None
    sealed: Hash | None = None
    """Hash of the cohort and the rejected clients, which are not listed where privacy requires a secret cohort."""


class Abandon(msgspec.Struct, frozen=True):
    """Body of the record of an attempt that gave no version."""

    attempt: Number
    why: str
    rejected: tuple[Rejected, ...]
    sealed: Hash | None = None


class End(msgspec.Struct, frozen=True):
    """Body of the record that ends a run."""

    reason: str
    version: Number
    model: Hash


class Signer(NamedTuple):
    """A client, and the number of its counted updates."""

    client: int
    id: str
    num_updates: int


class Findings(NamedTuple):
    """Summary of a consistent ledger."""

    run: str
    server_key: str
    head: Head
    rounds: int
    abandoned: int
    """Number of abandoned attempts."""
    rejected: int
    """Number of rejected updates."""
    signers: tuple[Signer, ...]
    ended: str | None
    """Why the run ended; None if there is no record of its end."""
    epsilon: float | None
    broadcasts: int = 0
    """Number of recorded broadcasts; 0 in ledgers of older servers."""


def audit(lines: Sequence[str], server_key: bytes | None = None, seen: Iterable[Head] = ()) -> Findings | Fault:
    """Return a summary of a ledger, or its first record that was changed, dropped or moved, or is inconsistent.

    `server_key` and `seen` are those of `chain.verify`.
    """
    broken = chain.verify(lines, server_key, seen)
    history = History(server_key)
    for line in lines if broken is None else lines[: broken.number]:
        record, _ = chain.read(line)
        problem = history.add(record)
        if problem is not None:
            return Fault(record.number, problem)
        head = Head(record.number + 1, record.hash())
    if broken is not None:
        return broken
    assert history.start is not None
    return Findings(
        run=history.start.run,
        server_key=history.start.server_key,
        head=head,
        rounds=history.version,
        abandoned=history.abandoned,
        rejected=history.rejected,
        signers=tuple(
            Signer(client, client_id(history.keys[client]), num) for client, num in sorted(history.num_counted.items())
        ),
        ended=history.ended,
        epsilon=history.epsilon,
        broadcasts=len(history.sent),
    )


@dataclass
class History:
    """State of a run according to the records so far; its size grows with clients and versions, not with updates."""

    server_key: bytes | None
    start: Start | None = None
    version: int = 0
    models: dict[int, str] = field(default_factory=dict)
    """Version -> hash of its parameters."""
    sent: dict[int, str] = field(default_factory=dict)
    """Version -> hash of its broadcast."""
    attempt: int = -1
    """The last attempt that was committed or abandoned."""
    rule: str | None = None
    epsilon: float | None = None
    keys: dict[int, bytes] = field(default_factory=dict)
    """Client -> its public key."""
    owners: dict[bytes, int] = field(default_factory=dict)
    """Public key -> its client."""
    counted: dict[int, int] = field(default_factory=dict)
    """Client -> newest counted attempt; a client is not asked again before its work was counted or dropped."""
    num_counted: Counter[int] = field(default_factory=Counter)
    """Client -> number of counted updates."""
    abandoned: int = 0
    """Number of abandoned attempts."""
    rejected: int = 0
    """Number of rejected updates."""
    ended: str | None = None
    """Why the run ended."""
    checked_before: bool = False
    """Whether the records that are added were checked on arrival: clients' signatures are not verified again."""

    @property
    def model(self) -> str:
        """Hash of the newest version's parameters."""
        return self.models.get(self.version, "")

    def add(self, record: Record) -> str | None:
        """Check a record against the earlier ones and add it; return what is wrong with it, or None."""
        if record.kind not in KINDS:
            return f"has an unknown kind: {record.kind!r:.60}"
        if (record.kind == chain.START) != (record.number == 0):
            kind = record.kind
            return "starts a second run" if record.number else f"has the kind {kind}, but the first must start the run"
        if self.ended is not None:
            return "follows the end of the run"
        body_type, check = KINDS[record.kind]
        try:
            return check(self, msgspec.convert(dict(record.body), body_type))
        except (ValueError, OverflowError) as error:
            return f"does not have the fields of its kind, {record.kind}: {error}"


def _start(history: History, start: Start) -> str | None:
    if history.server_key is not None and start.server_key != history.server_key.hex():
        return "names another key than that of the server"
    if start.plan_hash != plan_hash(start.plan):
        return "has a plan hash that is not that of its plan"
    history.start, history.models[0] = start, start.model
    return None


def _broadcast(history: History, broadcast: Broadcast) -> str | None:
    if broadcast.version != history.version:
        return f"sends version {broadcast.version}, but {history.version} is the newest"
    if broadcast.version in history.sent:
        return f"sends version {broadcast.version} a second time"
    history.sent[broadcast.version] = broadcast.object
    return None


def _commit(history: History, commit: Commit) -> str | None:
    if commit.version != history.version + 1:
        return f"makes version {commit.version}, but the newest is {history.version}"
    if commit.before != history.model:
        return "starts from another model than that of the version before"
    if commit.attempt <= history.attempt:
        return f"is of attempt {commit.attempt}, but attempt {history.attempt} has ended before"
    if history.rule not in (None, commit.rule):
        return f"aggregates by {commit.rule!r:.60}, but the others by {history.rule!r:.60}"
    if history.epsilon is not None and (commit.epsilon is None or commit.epsilon < history.epsilon):
        return f"states epsilon {commit.epsilon}, but {history.epsilon:g} was spent before"
    if commit.sealed is not None and (commit.cohort or commit.rejected or not _may_seal(history)):
        return "seals the cohort, which its plan does not ask for, or lists a sealed cohort"
    for update in commit.cohort:
        problem = _counted_problem(history, commit, update)
        if problem is not None:
            return f"counts client {update.client} {problem}"
        history.counted[update.client] = update.attempt
        history.num_counted[update.client] += 1
        key = history.keys[update.client] = bytes.fromhex(update.key)
        history.owners[key] = update.client
    history.version, history.attempt = commit.version, commit.attempt
    history.models[commit.version] = commit.model
    history.rule, history.epsilon = commit.rule, commit.epsilon
    history.rejected += len(commit.rejected)
    return None


def _may_seal(history: History) -> bool:
    return history.start is not None and "privacy" in history.start.plan


def _counted_problem(history: History, commit: Commit, update: Counted) -> str | None:
    """Return what is wrong with a counted update, or None."""
    assert history.start is not None
    key = bytes.fromhex(update.key)
    if update.id != client_id(key):
        return "under an id that is not that of its key"
    if history.keys.get(update.client, key) != key:
        return "with another key than before"
    if history.owners.get(key, update.client) != update.client:
        return "with the key of another client"
    newest = history.counted.get(update.client, -1)
    if update.attempt <= newest:
        again = f"twice for attempt {update.attempt}"
        return again if update.attempt == newest else f"for attempt {update.attempt}, after it was counted for {newest}"
    if update.version >= commit.version or update.attempt > commit.attempt:
        return "for a version or an attempt that did not exist yet"
    if history.sent and update.version >= min(history.sent) and update.version not in history.sent:
        return f"for version {update.version}, which was never sent"
    if update.broadcast not in (None, history.sent.get(update.version)):
        return f"for another broadcast than the one sent as version {update.version}"
    if "secagg" in history.start.plan:
        single = update.object is not None or update.signature is not None
        return "with a single update, although its plan uses secure aggregation" if single else None
    if update.object is None or update.signature is None:
        return "without its signature"
    if update.num_samples is None or update.weight is None:  # the loss may be null, which is signed too
        return "without all signed fields"
    if history.checked_before:
        return None
    text = update_text(
        run=history.start.run,
        attempt=update.attempt,
        version=update.version,
        name=update.object,
        num_samples=update.num_samples,
        loss=update.loss,
        weight=update.weight,
        broadcast=update.broadcast,
    )
    return None if holds(key, text, bytes.fromhex(update.signature)) else "with an invalid signature"


def _abandon(history: History, abandon: Abandon) -> str | None:
    if abandon.attempt <= history.attempt:
        return f"abandons attempt {abandon.attempt}, but attempt {history.attempt} has ended before"
    if abandon.sealed is not None and (abandon.rejected or not _may_seal(history)):
        return "seals the rejected clients, which its plan does not ask for, or lists sealed ones"
    history.attempt = abandon.attempt
    history.abandoned += 1
    history.rejected += len(abandon.rejected)
    return None


def _end(history: History, end: End) -> str | None:
    if (end.version, end.model) != (history.version, history.model):
        return "ends with another version or model than the newest"
    history.ended = end.reason
    return None


KINDS: dict[str, tuple[type[msgspec.Struct], Callable[[History, Any], str | None]]] = {
    chain.START: (Start, _start),
    chain.BROADCAST: (Broadcast, _broadcast),
    chain.COMMIT: (Commit, _commit),
    chain.ABANDON: (Abandon, _abandon),
    chain.END: (End, _end),
}
"""Kind of record -> the type of its body, and its check: a function that returns what is wrong, or adds the record."""
