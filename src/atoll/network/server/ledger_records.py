"""What ledger records say of participants, which every client reads, and what they seal."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from atoll.commit.guard import Guard
from atoll.core.messages import Task
from atoll.core.params import params_hash
from atoll.network.server.tables import ClientRow, Stage, TaskRow
from atoll.privacy.noise import derived


def hash_of(params_D: Tensor) -> str:
    """Return the name of a model in the ledger: the SHA-256 of its parameters in hexadecimal."""
    return params_hash(params_D).hex()


def cohort_entries(
    rows: Iterable[TaskRow], counted: Iterable[Task], clients: Iterable[ClientRow]
) -> list[dict[str, Any]]:
    """Return the entries of updates that counted, with signatures; `clients` includes those revoked since."""
    wanted, known = set(counted), {client.number: client for client in clients}
    return [_entry(row, known[row.task.client]) for row in rows if row.task in wanted]


def rejected_entries(rows: Iterable[TaskRow], left_out: Iterable[Task] = ()) -> list[dict[str, Any]]:
    """Return whose updates did not count, and why."""
    failed = {row.task: row.report["why"] for row in rows if row.stage is Stage.FAILED}
    whys = failed | {task: "left out" for task in left_out if task not in failed}
    return [{"client": task.client, "attempt": task.attempt, "why": why} for task, why in whys.items()]


def public_participants(
    guard: Guard | None, attempt: int, people: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the participants as a record publishes them.

    Where a privacy guarantee needs them secret, or only the server protects updates, a commitment (HMAC) is published
    instead: with the run's secret the server can open it to an auditor, and to no other participants.
    """
    if guard is None or not guard.seals_updates:
        return dict(people)
    text = json.dumps(people, sort_keys=True, separators=(",", ":")).encode()
    seal = hmac.digest(derived(guard.ledger.secret, "seal", attempt), text, "sha256").hex()
    return {**{kind: [] for kind in people}, "sealed": seal}


def _entry(row: TaskRow, client: ClientRow) -> dict[str, Any]:
    """Return the entry of an update that counted; under secure aggregation only whose it was."""
    entry = {
        "client": row.task.client,
        "id": client.id,
        "key": client.key.hex(),
        "version": row.task.version,
        "attempt": row.task.attempt,
    }
    if not row.update:
        return entry
    fields = ("num_samples", "loss", "weight", "broadcast", "session")
    numbers = {name: row.report[name] for name in fields if name in row.report}
    return {**entry, "object": row.update, "signature": row.signature.hex(), **numbers}
