"""Which clients are approved, which of them are online, and which may be asked for work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from atoll.core.eligibility import Eligibility
from atoll.core.plan import Plan
from atoll.network.server.runs import Run
from atoll.network.server.tables import ClientRow, Status

ONLINE_SECONDS = 90.0
"""Seconds after its last request until a client counts as offline."""
ANYBODY = Eligibility()


CLAIM_FACTOR = 2
"""A number of samples to which the operator has not agreed counts up to this multiple of the median."""


class LastPoll(NamedTuple):
    """The last poll of a client."""

    time: float
    """When it was last heard, by the monotonic clock."""
    attributes: dict[str, bool | float]


class Presence:
    """The approved clients by number, and when they were last heard."""

    def __init__(self, known: list[ClientRow], now: Callable[[], float]) -> None:
        self._now = now
        self.clients: dict[int, ClientRow] = {}
        self.last_polls: dict[int, LastPoll] = {}
        self.agreed_samples: dict[int, int] = {}
        """Number of samples to which the operator agreed, where it did."""
        self.set_clients(known, {})

    def set_clients(self, known: list[ClientRow], agreed: Mapping[str, int]) -> None:
        """Set the approved clients, and the samples to which the operator agreed, by client id."""
        self.clients = {c.number: c for c in known if c.status is Status.APPROVED and c.number is not None}
        self.agreed_samples = {number: agreed[c.id] for number, c in self.clients.items() if c.id in agreed}

    def note_poll(self, number: int, attributes: dict[str, bool | float]) -> None:
        """Note a poll of a client."""
        self.last_polls[number] = LastPoll(self._now(), attributes)

    def note_request(self, number: int | None) -> None:
        """Note another request of a client that has polled, such as for a chunk of a large model."""
        seen = self.last_polls.get(number) if number is not None else None
        if number is not None and seen is not None:
            self.last_polls[number] = seen._replace(time=self._now())

    def seconds_since(self, number: int | None) -> float | None:
        """Return the seconds since a client was heard; None if it never was."""
        seen = self.last_polls.get(number) if number is not None else None
        return None if seen is None else self._now() - seen.time

    def online(self) -> set[int]:
        """Return the clients that are online."""
        lately = self._now() - ONLINE_SECONDS
        return {number for number, seen in list(self.last_polls.items()) if seen.time > lately}

    def keys(self) -> dict[int, bytes]:
        """Return the public keys of clients."""
        return {number: client.key for number, client in self.clients.items()}

    def sizes(self, plan: Plan, known: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the number of samples of each client: the sizes that a run of the plan knows, then of new clients.

        New clients get what `credited_samples` allows; but in a private run what they state, as its accounting must
        not underestimate a client. There only the weight is bounded.
        """
        num = max([len(known) - 1, *self.clients]) + 1
        stated = {number: max(1, client.num_samples) for number, client in self.clients.items()}
        credited = stated if plan.privacy is not None else credited_samples(stated, self.agreed_samples)
        return (*known, *(credited.get(number, 1) for number in range(len(known), num)))

    def capped_samples(self, known: Sequence[int] = ()) -> dict[int, tuple[int, int]]:
        """Return what clients state whose sizes are not known yet, and what counts, where that is less."""
        new = {number: each.num_samples for number, each in self.clients.items() if number >= len(known)}
        counts = credited_samples(
            {number: max(1, each.num_samples) for number, each in self.clients.items()}, self.agreed_samples
        )
        return {number: (said, counts[number]) for number, said in new.items() if counts[number] < said}

    def max_samples(self, run: Run, number: int) -> int:
        """Return the number of samples by which a client's updates weigh at most in a run."""
        return credited_samples(dict(enumerate(run.sizes)), self.agreed_samples)[number]

    def may_be_asked(self, run: Run) -> Callable[[int], bool]:
        """Return which clients may be asked: with a deadline those that are online, else all."""
        deadline, rule = run.parts.coordinator.policy.deadline, run.plan.eligibility
        shut_out, online = set(run.state.quarantined), self.online()

        def may(client: int) -> bool:
            if client in shut_out or client not in self.clients or not run.may_ask(client):
                return False
            if deadline is not None and client not in online:
                return False
            seen = self.last_polls.get(client)
            return rule == ANYBODY or (seen is not None and rule.why_not(seen.attributes) is None)

        return may


def credited_samples(stated: Mapping[int, int], agreed: Mapping[int, int]) -> dict[int, int]:
    """Return the number of samples with which each client is credited.

    What the operator agreed to is an upper bound. A number that nobody confirmed counts up to CLAIM_FACTOR times the
    median, so that a lie gains little: the median is that of an honest client while most are honest, and of two
    clients it is the smaller one.

    >>> credited_samples({0: 600, 1: 500, 2: 10_000_000}, {})
    {0: 600, 1: 500, 2: 1200}
    >>> credited_samples({0: 600, 1: 500, 2: 10_000}, {2: 9_000})
    {0: 600, 1: 500, 2: 9000}
    """
    known = {number: min(size, agreed.get(number, size)) for number, size in stated.items()}
    ordered = sorted(known.values())
    median = ordered[max(0, min(len(ordered) // 2, len(ordered) - 2))] if ordered else 1
    return {number: size if number in agreed else min(size, CLAIM_FACTOR * median) for number, size in known.items()}
