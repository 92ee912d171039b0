"""What a server has acknowledged to a client, and whether its ledger says what became of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from atoll.core.coordinator import Policy
from atoll.core.parts import Part
from atoll.ledger import chain


class Receipt(msgspec.Struct, frozen=True):
    """An update that the server said is safe with it."""

    client: int
    attempt: int
    object: str
    """Its name; nothing where it is added in secret."""


class Receipts:
    """What the server has acknowledged of one client, and what its ledger has said of that since.

    Each must be counted or rejected: in the record of its attempt, or, where clients work on while versions are made,
    within `max_versions` commits. Where who took part is sealed, that there is a record is all that can be asked for.
    """

    def __init__(self, client: int, max_versions: int | None) -> None:
        self.client, self.max_versions = client, max_versions
        self.waiting: dict[int, int | None] = {}
        """Attempts without a record, and the version that was the newest when all records had been heard."""
        self.counted: set[int] = set()
        self.sealed = False
        """Whether the ledger does not say who took part."""

    def hear(self, record: chain.Record) -> str | None:
        """Take in a record; what is wrong with it, if something is."""
        body = record.body
        if record.kind == chain.END:
            self.waiting.clear()
        elif record.kind == chain.ABANDON and self.max_versions is None:
            self._settle(attempt for attempt in list(self.waiting) if attempt == body["attempt"])
            return self._overdue(body)
        elif record.kind == chain.COMMIT:
            own = [each for each in body["cohort"] if each["client"] == self.client]
            self.counted.update(each["attempt"] for each in own)
            rejected = [each for each in body["rejected"] if each["client"] == self.client]
            self._settle(each.get("attempt", body["attempt"]) for each in (*own, *rejected))
            if body.get("sealed") is not None:
                self.sealed = True
                self._settle(attempt for attempt in list(self.waiting) if attempt <= body["attempt"])
            return self._overdue(body)
        return None

    def caught_up(self, version: int) -> None:
        """Note that all records there are have been heard: from now on versions count against the server."""
        self.waiting = {attempt: version if since is None else since for attempt, since in self.waiting.items()}

    def _settle(self, attempts: Iterable[int]) -> None:
        for attempt in attempts:
            self.waiting.pop(attempt, None)

    def _overdue(self, body: Mapping[str, Any]) -> str | None:
        for attempt, since in self.waiting.items():
            late = attempt <= body["attempt"]
            if self.max_versions is not None:
                late = since is not None and body.get("version", since) - since > self.max_versions
            if late:
                return (
                    f"neither counts nor rejects the update of client {self.client} in attempt {attempt}, which the "
                    "server has acknowledged"
                )
        return None


def max_versions(plan: Mapping[str, Any], num_clients: int) -> int | None:
    """Return within how many commits an update must be counted or rejected; None if in the record of its attempt.

    Updates are taken in the order in which they came, and every client has one at most: twice as many commits as all
    of them take are enough, also while some join.
    """
    policy: Policy = Part.of(plan.get("policy", "cohort"), where="policy").build("rounds")
    if not policy.overlaps_rounds:
        return None
    return 2 * (-(-num_clients // policy.goal(num_clients)) + 1)
