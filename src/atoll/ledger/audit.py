"""Whether a ledger tells a story that can be true: more than that its records are as the server wrote them.

The chain shows that nothing was changed since the server signed it. The audit also holds the server to its word:
versions count up by one, each starts from the model that the one before made and is sent in one form, no update counts
twice, and every update that counted was signed by the client that it is said to be from, for what was sent. Clients
hear the same story record by record as they go, and end where it cannot be true.
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
    """A client whose update did not count."""

    client: int
    why: str
    attempt: Number | None = None
    """Whose update of which attempt; ledgers before this field do not say."""


class Counted(msgspec.Struct, frozen=True):
    """A client whose update counted; what it signed is left out where updates are added in secret."""

    client: Number
    id: str
    key: Hash
    version: Number
    """The version that it trained from."""
    attempt: Number
    num_samples: Number | None = None
    loss: float | None = None
    weight: float | None = None
    object: Hash | None = None
    signature: Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")] | None = None
    broadcast: Hash | None = None
    """The object that it trained on, by its own signature; older clients did not sign it."""


class Start(msgspec.Struct, frozen=True):
    """A run begins."""

    run: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,64}\Z")]
    plan: dict[str, Any]
    """As clients are sent it."""
    plan_hash: Hash
    model: Hash
    """Of the first parameters."""
    server_key: Hash


class Broadcast(msgspec.Struct, frozen=True):
    """A version is sent to clients, for the first time and in this form only."""

    version: Number
    object: Hash
    """Parameters and extra vectors as clients have them in the end, however they travelled."""


class Commit(msgspec.Struct, frozen=True):
    """A new version of the model."""

    version: Number
    attempt: Number
    model: Hash
    before: Hash
    """The model that it was made from."""
    rule: str
    cohort: tuple[Counted, ...]
    rejected: tuple[Rejected, ...]
    seconds: int
    """Since 1970."""
    epsilon: float | None = None
    sealed: Hash | None = None
    """Stands for cohort and rejected, where privacy rests on nobody's knowing who took part."""


class Abandon(msgspec.Struct, frozen=True):
    """An attempt of which nothing was made."""

    attempt: Number
    why: str
    rejected: tuple[Rejected, ...]
    sealed: Hash | None = None


class End(msgspec.Struct, frozen=True):
    """A run is over."""

    reason: str
    version: Number
    model: Hash


class Signer(NamedTuple):
    """A client, and how many of its updates counted."""

    client: int
    id: str
    num_updates: int


class Findings(NamedTuple):
    """What an honest ledger says."""

    run: str
    server_key: str
    head: Head
    rounds: int
    abandoned: int
    rejected: int
    signers: tuple[Signer, ...]
    ended: str | None
    """Why, or None if there is no record of the end."""
    epsilon: float | None
    broadcasts: int = 0
    """How many versions it says what was sent of; none in ledgers of older servers."""


def audit(lines: Sequence[str], server_key: bytes | None = None, seen: Iterable[Head] = ()) -> Findings | Fault:
    """What a ledger says, or the first record that was changed, dropped or moved, or that cannot be true.

    `server_key` and `seen` are those of `chain.verify`.
    """
    broken = chain.verify(lines, server_key, seen)
    story = Story(server_key)
    for line in lines if broken is None else lines[: broken.number]:
        record, _ = chain.read(line)
        wrong = story.hear(record)
        if wrong is not None:
            return Fault(record.number, wrong)
        head = Head(record.number + 1, record.hash())
    if broken is not None:
        return broken
    assert story.start is not None
    return Findings(
        run=story.start.run,
        server_key=story.start.server_key,
        head=head,
        rounds=story.version,
        abandoned=story.abandoned,
        rejected=story.rejected,
        signers=tuple(
            Signer(client, client_id(story.keys[client]), num) for client, num in sorted(story.num_counted.items())
        ),
        ended=story.ended,
        epsilon=story.epsilon,
        broadcasts=len(story.sent),
    )


@dataclass
class Story:
    """What the records so far say; it grows with clients and versions, not with updates."""

    server_key: bytes | None
    start: Start | None = None
    version: int = 0
    models: dict[int, str] = field(default_factory=dict)
    """The hash of the parameters of each version."""
    sent: dict[int, str] = field(default_factory=dict)
    """The object that clients were sent of each version."""
    attempt: int = -1
    """The last that was committed or abandoned."""
    rule: str | None = None
    epsilon: float | None = None
    keys: dict[int, bytes] = field(default_factory=dict)
    owners: dict[bytes, int] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    """The newest attempt of each client that counted: nobody is asked again before its work counted or was dropped."""
    num_counted: Counter[int] = field(default_factory=Counter)
    abandoned: int = 0
    rejected: int = 0
    ended: str | None = None
    checked_before: bool = False
    """Whether the records now heard were checked when they came: clients' signatures are not looked at again."""

    @property
    def model(self) -> str:
        """The hash of the newest version's parameters."""
        return self.models.get(self.version, "")

    def hear(self, record: Record) -> str | None:
        """Take in a record; what is wrong with it, if something is."""
        if record.kind not in KINDS:
            return f"is of a kind that there is not: {record.kind!r:.60}"
        if (record.kind == chain.START) != (record.number == 0):
            kind = record.kind
            return "begins a run within another" if record.number else f"is of the kind {kind}: none begins the run"
        if self.ended is not None:
            return "follows the end of the run"
        kind_of, check = KINDS[record.kind]
        try:
            return check(self, msgspec.convert(dict(record.body), kind_of))
        except (ValueError, OverflowError) as error:
            return f"is not what its kind, {record.kind}, must hold: {error}"


def _start(story: Story, told: Start) -> str | None:
    if story.server_key is not None and told.server_key != story.server_key.hex():
        return "names another key than that of the server"
    if told.plan_hash != plan_hash(told.plan):
        return "has a plan hash that is not that of its plan"
    story.start, story.models[0] = told, told.model
    return None


def _broadcast(story: Story, told: Broadcast) -> str | None:
    if told.version != story.version:
        return f"sends version {told.version}, but {story.version} is the newest"
    if told.version in story.sent:
        return f"sends version {told.version} a second time"
    story.sent[told.version] = told.object
    return None


def _commit(story: Story, told: Commit) -> str | None:
    if told.version != story.version + 1:
        return f"makes version {told.version}, but the one before made {story.version}"
    if told.before != story.model:
        return "starts from another model than the one before made"
    if told.attempt <= story.attempt:
        return f"is of attempt {told.attempt}, but {story.attempt} was over before"
    if story.rule not in (None, told.rule):
        return f"aggregates by {told.rule!r:.60}, but the others by {story.rule!r:.60}"
    if story.epsilon is not None and (told.epsilon is None or told.epsilon < story.epsilon):
        return f"says epsilon {told.epsilon}, but {story.epsilon:g} was spent before"
    if told.sealed is not None and (told.cohort or told.rejected or not _may_seal(story)):
        return "seals who took part, which its plan does not ask for, or tells it all the same"
    for each in told.cohort:
        wrong = _counted(story, told, each)
        if wrong is not None:
            return f"counts client {each.client} {wrong}"
        story.counted[each.client] = each.attempt
        story.num_counted[each.client] += 1
        key = story.keys[each.client] = bytes.fromhex(each.key)
        story.owners[key] = each.client
    story.version, story.attempt = told.version, told.attempt
    story.models[told.version] = told.model
    story.rule, story.epsilon = told.rule, told.epsilon
    story.rejected += len(told.rejected)
    return None


def _may_seal(story: Story) -> bool:
    return story.start is not None and "privacy" in story.start.plan


def _counted(story: Story, commit: Commit, told: Counted) -> str | None:
    """What is wrong with an update that is said to have counted."""
    assert story.start is not None
    key = bytes.fromhex(told.key)
    if told.id != client_id(key):
        return "under an id that is not that of its key"
    if story.keys.get(told.client, key) != key:
        return "with another key than before"
    if story.owners.get(key, told.client) != told.client:
        return "with the key of another client"
    newest = story.counted.get(told.client, -1)
    if told.attempt <= newest:
        again = f"twice for attempt {told.attempt}"
        return again if told.attempt == newest else f"for attempt {told.attempt}, after it was counted for {newest}"
    if told.version >= commit.version or told.attempt > commit.attempt:
        return "for work on a version or an attempt that was yet to come"
    if story.sent and told.version >= min(story.sent) and told.version not in story.sent:
        return f"for work on version {told.version}, which was sent to nobody"
    if told.broadcast not in (None, story.sent.get(told.version)):
        return f"for work on something else than was sent as version {told.version}"
    if "secagg" in story.start.plan:
        return (
            None if told.object is None and told.signature is None else "by itself, though updates are added in secret"
        )
    if told.object is None or told.signature is None:
        return "without its signature"
    if told.num_samples is None or told.loss is None or told.weight is None:
        return "without all that it signed"
    if story.checked_before:
        return None
    text = update_text(
        story.start.run,
        told.attempt,
        told.version,
        told.object,
        told.num_samples,
        told.loss,
        told.weight,
        told.broadcast,
    )
    return None if holds(key, text, bytes.fromhex(told.signature)) else "with a signature that does not hold"


def _abandon(story: Story, told: Abandon) -> str | None:
    if told.attempt <= story.attempt:
        return f"abandons attempt {told.attempt}, but {story.attempt} was over before"
    if told.sealed is not None and (told.rejected or not _may_seal(story)):
        return "seals who was rejected, which its plan does not ask for, or tells it all the same"
    story.attempt = told.attempt
    story.abandoned += 1
    story.rejected += len(told.rejected)
    return None


def _end(story: Story, told: End) -> str | None:
    if (told.version, told.model) != (story.version, story.model):
        return "ends with another version or model than the one before made"
    story.ended = told.reason
    return None


KINDS: dict[str, tuple[type[msgspec.Struct], Callable[[Story, Any], str | None]]] = {
    chain.START: (Start, _start),
    chain.BROADCAST: (Broadcast, _broadcast),
    chain.COMMIT: (Commit, _commit),
    chain.ABANDON: (Abandon, _abandon),
    chain.END: (End, _end),
}
"""What the body of each kind of record holds, and how it is checked."""
