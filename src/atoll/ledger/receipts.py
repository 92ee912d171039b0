"""Receipts of updates that the server acknowledged, and the check that its ledger counts or rejects each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from atoll.core.coordinator import Policy
from atoll.core.parts import Part
from atoll.ledger import chain


class Receipt(msgspec.Struct, frozen=True):
    """An update whose arrival the server acknowledged."""

    client: int
    attempt: int
    object: str
    """Hash of the update; "" under secure aggregation."""


class Receipts:
    """Acknowledged updates of one client that the ledger has not yet counted or rejected.

    Each must be counted or rejected in the record of its attempt, or, where rounds overlap, within `max_versions`
    commits. Where the cohort is sealed, a record of the attempt is enough.
    """

    def __init__(self, client: int, max_versions: int | None) -> None:
        self.client, self.max_versions = client, max_versions
        self.waiting: dict[int, int | None] = {}
        """Attempt without a record -> newest version at the time when all records were read; None before that."""
        self.counted: set[int] = set()
        """Attempts whose update was counted."""
        self.sealed = False
        """Whether the ledger seals its cohorts."""

    def add(self, record: chain.Record) -> str | None:
        """Settle the receipts that a record counts or rejects; return what is wrong with it, or None."""
        body = record.body
        if record.kind == chain.END:
            self.waiting.clear()
        elif record.kind == chain.ABANDON and self.max_versions is None:
            self._settle(attempt for attempt in list(self.waiting) if attempt == body["attempt"])
            return self._overdue(body)
        elif record.kind == chain.COMMIT:
            counted = [update for update in body["cohort"] if update["client"] == self.client]
            self.counted.update(update["attempt"] for update in counted)
            rejected = [update for update in body["rejected"] if update["client"] == self.client]
            self._settle(update.get("attempt", body["attempt"]) for update in (*counted, *rejected))
            if body.get("sealed") is not None:
                self.sealed = True
                self._settle(attempt for attempt in list(self.waiting) if attempt <= body["attempt"])
            return self._overdue(body)
        return None

    def caught_up(self, version: int) -> None:
        """Record that all existing records have been read: later versions count towards `max_versions`."""
        self.waiting = {attempt: version if since is None else since for attempt, since in self.waiting.items()}

    def _settle(self, attempts: Iterable[int]) -> None:
        for attempt in attempts:
            self.waiting.pop(attempt, None)

    def _overdue(self, body: Mapping[str, Any]) -> str | None:
        """Return which update the server should have counted or rejected by now, or None."""
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
    """Return the number of commits within which an update must be counted or rejected; None if rounds do not overlap.

    Updates are counted in order of arrival, and every client has at most one: twice as many commits as all clients'
    updates take are enough, even while clients join.
    """
    policy: Policy = Part.of(plan.get("policy", "cohort"), where="policy").build("rounds")
    if not policy.overlaps_rounds:
        return None
    return 2 * (-(-num_clients // policy.goal(num_clients)) + 1)
