"""The roll: which clients are let in, which of them are there, and who may be asked for work."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from atoll.core.eligibility import Eligibility
from atoll.network.runs import Run
from atoll.network.tables import ClientRow, Status

ONLINE_SECONDS = 90.0
"""Who was not heard for so long is not there."""
ANYBODY = Eligibility()


class Presence(NamedTuple):
    """What is known of a client that polls."""

    heard: float
    attributes: dict[str, bool | float]


class Roll:
    """The clients that are let in, by number."""

    def __init__(self, known: list[ClientRow], now: Callable[[], float]) -> None:
        self._now = now
        self.clients: dict[int, ClientRow] = {}
        self.present: dict[int, Presence] = {}
        self.know(known)

    def know(self, known: list[ClientRow]) -> None:
        """Remember who is let in."""
        self.clients = {c.number: c for c in known if c.status is Status.APPROVED and c.number is not None}

    def hear(self, number: int, attributes: dict[str, bool | float]) -> None:
        """A client polls."""
        self.present[number] = Presence(self._now(), attributes)

    def still_here(self, number: int | None) -> None:
        """A client that has polled before asks for something else, such as a large model, chunk by chunk."""
        seen = self.present.get(number) if number is not None else None
        if number is not None and seen is not None:
            self.present[number] = seen._replace(heard=self._now())

    def seconds_since(self, number: int | None) -> float | None:
        """How long ago a client was heard, if it ever was."""
        seen = self.present.get(number) if number is not None else None
        return None if seen is None else self._now() - seen.heard

    def online(self) -> set[int]:
        """Who was heard a moment ago."""
        lately = self._now() - ONLINE_SECONDS
        return {number for number, seen in list(self.present.items()) if seen.heard > lately}

    def keys(self) -> dict[int, bytes]:
        """The public keys by which clients are known."""
        return {number: client.key for number, client in self.clients.items()}

    def sizes(self, run: Run) -> tuple[int, ...]:
        """How many samples each client has; as the run knows it, and of those who are new."""
        num = max([len(run.sizes) - 1, *self.clients]) + 1
        told = [self.clients[number].num_samples if number in self.clients else 1 for number in range(num)]
        return (*run.sizes, *(max(1, size) for size in told[len(run.sizes) :]))

    def may_be_asked(self, run: Run) -> Callable[[int], bool]:
        """Who may be asked: with a deadline those who are there; else all, and they are waited for."""
        assert run.parts is not None and run.state is not None
        deadline, rule = run.parts.coordinator.policy.deadline, run.plan.eligibility
        shut_out, online = set(run.state.quarantined), self.online()

        def may(client: int) -> bool:
            if client in shut_out or client not in self.clients or (deadline is not None and client not in online):
                return False
            seen = self.present.get(client)
            return rule == ANYBODY or (seen is not None and rule.why_not(seen.attributes) is None)

        return may
