"""The roll: which clients are let in, which of them are there, and who may be asked for work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from atoll.core.eligibility import Eligibility
from atoll.network.server.runs import Run
from atoll.network.server.tables import ClientRow, Status

ONLINE_SECONDS = 90.0
"""Who was not heard for so long is not there."""
ANYBODY = Eligibility()


CLAIM_FACTOR = 2
"""A number of samples that the operator has not agreed to counts as at most so many times the median client's."""


class LastPoll(NamedTuple):
    """What is known of a client that polls."""

    heard: float
    attributes: dict[str, bool | float]


class Presence:
    """The clients that are let in, by number."""

    def __init__(self, known: list[ClientRow], now: Callable[[], float]) -> None:
        self._now = now
        self.clients: dict[int, ClientRow] = {}
        self.last_polls: dict[int, LastPoll] = {}
        self.agreed_samples: dict[int, int] = {}
        """How many samples the operator has agreed to, of those clients where that is so."""
        self.set_clients(known, {})

    def set_clients(self, known: list[ClientRow], agreed: Mapping[str, int]) -> None:
        """Remember who is let in, and how many samples the operator agreed to, by client id."""
        self.clients = {c.number: c for c in known if c.status is Status.APPROVED and c.number is not None}
        self.agreed_samples = {number: agreed[c.id] for number, c in self.clients.items() if c.id in agreed}

    def note_poll(self, number: int, attributes: dict[str, bool | float]) -> None:
        """A client polls."""
        self.last_polls[number] = LastPoll(self._now(), attributes)

    def note_request(self, number: int | None) -> None:
        """A client that has polled before asks for something else, such as a large model, chunk by chunk."""
        seen = self.last_polls.get(number) if number is not None else None
        if number is not None and seen is not None:
            self.last_polls[number] = seen._replace(heard=self._now())

    def seconds_since(self, number: int | None) -> float | None:
        """How long ago a client was heard, if it ever was."""
        seen = self.last_polls.get(number) if number is not None else None
        return None if seen is None else self._now() - seen.heard

    def online(self) -> set[int]:
        """Who was heard a moment ago."""
        lately = self._now() - ONLINE_SECONDS
        return {number for number, seen in list(self.last_polls.items()) if seen.heard > lately}

    def keys(self) -> dict[int, bytes]:
        """The public keys by which clients are known."""
        return {number: client.key for number, client in self.clients.items()}

    def sizes(self, run: Run) -> tuple[int, ...]:
        """How many samples each client has; as the run knows it, and of those who are new.

        What a client merely claims counts as far as `believed` says, except in a private run, whose accounting must not
        take a client for a smaller one: there the claim counts, and the weight alone is bounded.
        """
        num = max([len(run.sizes) - 1, *self.clients]) + 1
        said = {number: max(1, client.num_samples) for number, client in self.clients.items()}
        said = said if run.plan.privacy is not None else credited_samples(said, self.agreed_samples)
        return (*run.sizes, *(said.get(number, 1) for number in range(len(run.sizes), num)))

    def capped_samples(self, run: Run) -> dict[int, tuple[int, int]]:
        """Clients that are new to a run and count as fewer samples than they say: what they say, and what counts."""
        new = {number: each.num_samples for number, each in self.clients.items() if number >= len(run.sizes)}
        counts = credited_samples(
            {number: max(1, each.num_samples) for number, each in self.clients.items()}, self.agreed_samples
        )
        return {number: (said, counts[number]) for number, said in new.items() if counts[number] < said}

    def max_samples(self, run: Run, number: int) -> int:
        """The largest number of samples by which an update of this client may weigh in a run."""
        return credited_samples(dict(enumerate(run.sizes)), self.agreed_samples)[number]

    def may_be_asked(self, run: Run) -> Callable[[int], bool]:
        """Who may be asked: with a deadline those who are there; else all, and they are waited for."""
        assert run.parts is not None and run.state is not None
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


def credited_samples(said: Mapping[int, int], agreed: Mapping[int, int]) -> dict[int, int]:
    """How many samples each client counts as having.

    What the operator agreed to is the most that counts. A claim that nobody confirmed counts up to CLAIM_FACTOR times
    the median, so that a lie about the number of samples gains little, whoever tells it: the median is that of honest
    clients as long as they are the majority, and of two clients it is the smaller one.

    >>> credited_samples({0: 600, 1: 500, 2: 10_000_000}, {})
    {0: 600, 1: 500, 2: 1200}
    >>> credited_samples({0: 600, 1: 500, 2: 10_000}, {2: 9_000})
    {0: 600, 1: 500, 2: 9000}
    """
    known = {number: min(size, agreed.get(number, size)) for number, size in said.items()}
    ordered = sorted(known.values())
    median = ordered[max(0, min(len(ordered) // 2, len(ordered) - 2))] if ordered else 1
    return {number: size if number in agreed else min(size, CLAIM_FACTOR * median) for number, size in known.items()}
