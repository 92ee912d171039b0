"""Joining records as machines without I/O: `handle(state, data) -> (state, messages)`.

The party that holds the labels asks each other party by a pairwise private set intersection, takes what all of them
have, and tells each the common rows by pseudonyms under a key that the parties alone share. Whoever carries the
messages sees how many ids each party has and how many are common, and no id. Then every party commits to its rows in
their order, and the asking party compares.

A message that is not due raises AlignmentError and changes nothing: the state that was given is as it was.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.alignment.curve import (
    POINT,
    AlignmentError,
    Spread,
    in_order,
    intersection,
    intersection_size,
    new_key,
    request,
    response,
    setup,
)
from atoll.alignment.ids import MAX_IDS, PSEUDONYM, order_tag, pseudonym, salted
from atoll.alignment.messages import (
    VERSION,
    Answer,
    Chosen,
    Committed,
    Done,
    Hello,
    Message,
    Request,
    Terms,
    decode,
    encode,
    most_bytes,
)

SALT = KEY = 32
NONCE = bytes(12)
"""A pair's key encrypts one message."""


class Phase(StrEnum):
    """What a party waits for."""

    HELLO = "its first message"
    REQUEST = "the ids that are asked for"
    ANSWER = "its answer"
    CHOSEN = "the common rows"
    COMMITTED = "its commitment"
    ENDING = "word that all have the same rows"
    DONE = "nothing"


ASKER_WAITS = (Phase.HELLO, Phase.ANSWER, Phase.COMMITTED)
"""Phases of another party in which the asking one waits for it."""


class Due(NamedTuple):
    """A message that a party waits for."""

    what: Phase
    most: int
    """Bytes that it may take."""


class Aligned(NamedTuple):
    """The common rows, as one party has them."""

    rows: tuple[int, ...]
    """Places of the common ids among its own, in the order that is common to all."""
    key: bytes
    """What the parties share, and commitments are made with."""
    tag: bytes
    """The commitment to the rows in their order."""


class Side(NamedTuple):
    """What either side makes for one session: a key for points and one to agree on a secret."""

    curve: bytes
    private: bytes
    public: bytes


def new_side() -> Side:
    """Draw fresh keys, from the operating system."""
    private = X25519PrivateKey.generate()
    return Side(new_key(), private.private_bytes_raw(), private.public_key().public_bytes_raw())


class Other(NamedTuple):
    """What the asking party knows of another one."""

    phase: Phase = Phase.HELLO
    hello: Hello | None = None
    pair: bytes = b""
    """The key that both share."""
    common: tuple[int, ...] = ()
    """Places among the asking party's ids of those that both have."""
    size: int = 0
    """How many these are."""


class AskerState(NamedTuple):
    """The asking party in a session."""

    side: Side
    hello: bytes
    others: Mapping[str, Other]
    aligned: Aligned | None = None

    @property
    def is_done(self) -> bool:
        """Whether all parties have the same rows, or their number is known."""
        return all(other.phase == Phase.DONE for other in self.others.values())

    @property
    def sizes(self) -> dict[str, int]:
        """How many ids each party has in common with the asking one."""
        return {name: other.size for name, other in self.others.items()}


Sent = list[tuple[str, bytes]]
"""(name of a party, message to it)."""


@dataclass(frozen=True, kw_only=True)
class Asker:
    """The party that asks, which holds the labels; `ids` are normalised and unique."""

    ids: Sequence[str]
    others: Sequence[str]
    """Names of the other parties."""
    terms: Terms
    secret: bytes = b""
    """What the parties agreed on beforehand, against somebody between them; empty if nothing."""
    max_ids: int = MAX_IDS
    spread: Spread = in_order

    def begin(self) -> tuple[AskerState, Sent]:
        """Return the first state, and the first message to each party."""
        side = new_side()
        hello = encode(
            Hello(
                terms=self.terms,
                num_ids=len(self.ids),
                public_key=side.public,
                salt=secrets.token_bytes(SALT),
            )
        )
        state = AskerState(side, hello, MappingProxyType({name: Other() for name in self.others}))
        return state, [(name, hello) for name in self.others]

    def due(self, state: AskerState) -> dict[str, Due]:
        """Return the message that is due from each party that is waited for."""
        points = {
            name: other.hello.num_ids + len(self.ids) if other.hello is not None and other.phase == Phase.ANSWER else 0
            for name, other in state.others.items()
            if other.phase in ASKER_WAITS
        }
        return {name: Due(state.others[name].phase, most_bytes(num)) for name, num in points.items()}

    def handle(self, state: AskerState, name: str, data: bytes) -> tuple[AskerState, Sent]:
        """Process a message of a party; return the messages that follow."""
        other = state.others.get(name)
        if other is None or other.phase not in ASKER_WAITS:
            raise AlignmentError(f"got a message of {name}, from whom nothing is due: send each message once")
        if other.phase == Phase.HELLO:
            return self._greeted(state, name, data)
        if other.phase == Phase.ANSWER:
            return self._answered(state, name, data)
        return self._committed(state, name, data)

    def _greeted(self, state: AskerState, name: str, data: bytes) -> tuple[AskerState, Sent]:
        hello = decode(data, Hello, 0, name)
        _must_agree(hello, self.terms, self.max_ids, name)
        pair = _pair_key(state.side, hello.public_key, state.hello, data, self.secret, name)
        reveal, items = not self.terms.count_only, salted(self.ids, _salt(state.hello))
        points = request(state.side.curve, reveal, items, self.spread)
        state = _with(state, name, Other(Phase.ANSWER, hello, pair))
        return state, [(name, encode(Request(points=points)))]

    def _answered(self, state: AskerState, name: str, data: bytes) -> tuple[AskerState, Sent]:
        other = state.others[name]
        assert other.hello is not None
        answer = decode(data, Answer, other.hello.num_ids + len(self.ids), name)
        _must_be_points(answer.own, other.hello.num_ids, f"the ids of {name}")
        _must_be_points(answer.asked, len(self.ids), f"the answer of {name}")
        if self.terms.count_only:
            size = intersection_size(state.side.curve, answer.own, answer.asked, self.spread)
            return _with(state, name, other._replace(phase=Phase.DONE, size=size)), [(name, encode(Done()))]
        common = tuple(intersection(state.side.curve, answer.own, answer.asked, self.spread))
        state = _with(state, name, other._replace(phase=Phase.CHOSEN, common=common, size=len(common)))
        if any(each.phase != Phase.CHOSEN for each in state.others.values()):
            return state, []
        return self._choose(state)

    def _choose(self, state: AskerState) -> tuple[AskerState, Sent]:
        """Tell every party the rows that all of them have."""
        common = set.intersection(*(set(other.common) for other in state.others.values()))
        if not common:
            raise AlignmentError(
                "no id is held by all parties: compare how ids are written, and whether all say the same rule"
            )
        key = secrets.token_bytes(KEY)
        listed = sorted((pseudonym(key, self.ids[row]), row) for row in common)
        names = [each for each, _ in listed]
        aligned = Aligned(tuple(row for _, row in listed), key, order_tag(key, names))
        sent: Sent = []
        for name, other in state.others.items():
            sealed = AESGCM(other.pair).encrypt(NONCE, key + b"".join(names), None)
            sent.append((name, encode(Chosen(sealed=sealed))))
            state = _with(state, name, other._replace(phase=Phase.COMMITTED))
        return state._replace(aligned=aligned), sent

    def _committed(self, state: AskerState, name: str, data: bytes) -> tuple[AskerState, Sent]:
        committed = decode(data, Committed, 0, name)
        assert state.aligned is not None
        must_be_same({"the party that holds the labels": state.aligned.tag, name: committed.tag})
        state = _with(state, name, state.others[name]._replace(phase=Phase.ENDING))
        if any(other.phase != Phase.ENDING for other in state.others.values()):
            return state, []
        for each, other in state.others.items():
            state = _with(state, each, other._replace(phase=Phase.DONE))
        return state, [(each, encode(Done())) for each in state.others]


class AnswererState(NamedTuple):
    """An answering party in a session."""

    phase: Phase = Phase.HELLO
    side: Side | None = None
    num_asked: int = 0
    salt: bytes = b""
    pair: bytes = b""
    aligned: Aligned | None = None


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """A party that answers; it learns the common rows, and how many ids the asking party has."""

    ids: Sequence[str]
    terms: Terms
    asker: str = "the asking party"
    secret: bytes = b""
    max_ids: int = MAX_IDS
    spread: Spread = in_order

    def due(self, state: AnswererState) -> Due:
        """Return the message that is due from the asking party."""
        points = {Phase.REQUEST: state.num_asked, Phase.CHOSEN: min(state.num_asked, len(self.ids))}
        return Due(state.phase, most_bytes(points.get(state.phase, 0)))

    def handle(self, state: AnswererState, data: bytes) -> tuple[AnswererState, list[bytes]]:
        """Process a message of the asking party; return the answers."""
        if state.phase == Phase.HELLO:
            return self._greeted(data)
        if state.phase == Phase.REQUEST:
            return self._asked(state, data)
        if state.phase == Phase.CHOSEN:
            return self._told(state, data)
        if state.phase == Phase.ENDING:
            decode(data, Done, 0, self.asker)
            return state._replace(phase=Phase.DONE), []
        raise AlignmentError(f"got a message of {self.asker} after the end: begin anew")

    def _greeted(self, data: bytes) -> tuple[AnswererState, list[bytes]]:
        hello = decode(data, Hello, 0, self.asker)
        _must_agree(hello, self.terms, self.max_ids, self.asker)
        if len(hello.salt) != SALT:
            raise AlignmentError(f"{self.asker} sent a salt of {len(hello.salt)} bytes, {SALT} are due: update it")
        side = new_side()
        own = encode(Hello(terms=self.terms, num_ids=len(self.ids), public_key=side.public))
        pair = _pair_key(side, hello.public_key, data, own, self.secret, self.asker)
        return AnswererState(Phase.REQUEST, side, hello.num_ids, hello.salt, pair), [own]

    def _asked(self, state: AnswererState, data: bytes) -> tuple[AnswererState, list[bytes]]:
        asked = decode(data, Request, state.num_asked, self.asker)
        _must_be_points(asked.points, state.num_asked, f"the ids of {self.asker}")
        assert state.side is not None
        reveal, key = not self.terms.count_only, state.side.curve
        answer = Answer(
            own=setup(key, reveal, salted(self.ids, state.salt), self.spread),
            asked=response(key, reveal, asked.points, self.spread),
        )
        return state._replace(phase=Phase.CHOSEN if reveal else Phase.ENDING), [encode(answer)]

    def _told(self, state: AnswererState, data: bytes) -> tuple[AnswererState, list[bytes]]:
        chosen = decode(data, Chosen, min(state.num_asked, len(self.ids)), self.asker)
        try:
            plain = AESGCM(state.pair).decrypt(NONCE, chosen.sealed, None)
        except InvalidTag as error:
            raise AlignmentError(
                f"the common rows of {self.asker} cannot be opened: give all parties the same secret, and if they have "
                "it, somebody between them changes messages"
            ) from error
        key, listed = plain[:KEY], plain[KEY:]
        names = [listed[start : start + PSEUDONYM] for start in range(0, len(listed), PSEUDONYM)]
        places = {pseudonym(key, each): row for row, each in enumerate(self.ids)}
        if not names or len(set(names)) != len(names) or any(name not in places for name in names):
            raise AlignmentError(
                f"{self.asker} names common rows that this party does not have, or the same one twice: let it run "
                "atoll align anew"
            )
        aligned = Aligned(tuple(places[name] for name in names), key, order_tag(key, names))
        return state._replace(phase=Phase.ENDING, aligned=aligned), [encode(Committed(tag=aligned.tag))]


def committed_tag(key: bytes, ids: Sequence[str]) -> bytes:
    """Return the commitment to rows with these ids, in this order: what a party says before it trains."""
    return order_tag(key, [pseudonym(key, each) for each in ids])


def must_be_same(tags: Mapping[str, bytes]) -> None:
    """Refuse rows that are not the same, or not in the same order, by the commitments of parties."""
    (first, expected), *others = tags.items()
    for name, tag in others:
        if not hmac.compare_digest(tag, expected):
            raise AlignmentError(
                f"the rows of {name} are not those of {first}, or are in another order: align them anew, and leave "
                "the order of the rows as it is"
            )


def _with(state: AskerState, name: str, other: Other) -> AskerState:
    return state._replace(others=MappingProxyType({**state.others, name: other}))


def _salt(hello: bytes) -> bytes:
    return decode(hello, Hello, 0, "this party").salt


def _must_agree(hello: Hello, terms: Terms, max_ids: int, who: str) -> None:
    """Refuse other terms than one's own, and a number of ids that cannot be right."""
    theirs = hello.terms
    if theirs.version != VERSION:
        raise AlignmentError(f"{who} speaks version {theirs.version} of the alignment, this release {VERSION}: update")
    if theirs.rule != terms.rule:
        raise AlignmentError(
            f"{who} compares ids by the rule {theirs.rule!a}, this party by '{terms.rule}': say the same at all"
        )
    if theirs.count_only != terms.count_only:
        raise AlignmentError(f"{who} wants {_wanted(theirs)}, this party {_wanted(terms)}: say the same at all parties")
    if not 1 <= hello.num_ids <= max_ids:
        raise AlignmentError(
            f"{who} says that it has {hello.num_ids:,} ids, 1 to {max_ids:,} are allowed: raise max_ids"
        )


def _wanted(terms: Terms) -> str:
    return "only the number of common ids" if terms.count_only else "the common ids"


def _must_be_points(points: bytes, num: int, what: str) -> None:
    if len(points) != POINT * num:
        raise AlignmentError(
            f"{what} take {len(points):,} bytes, {POINT * num:,} are due for the {num:,} ids that were told of: tell "
            "the right number"
        )
    if len({points[start : start + POINT] for start in range(0, len(points), POINT)}) != num:
        raise AlignmentError(f"{what} name an id twice: send each once")


def _pair_key(side: Side, public: bytes, asked: bytes, answered: bytes, secret: bytes, who: str) -> bytes:
    """Return the key of a pair, bound to both first messages and to what the parties agreed on beforehand."""
    try:
        point = X25519PrivateKey.from_private_bytes(side.private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise AlignmentError(f"{who} sent a public key that is none: let it run atoll align") from error
    transcript = hashlib.sha256(len(asked).to_bytes(8, "big") + asked + answered).digest()
    return HKDF(SHA256(), KEY, hashlib.sha256(secret).digest(), b"atoll alignment 1" + transcript).derive(point)


__all__ = ["Aligned", "Answerer", "AnswererState", "Asker", "AskerState", "Message", "committed_tag", "must_be_same"]
