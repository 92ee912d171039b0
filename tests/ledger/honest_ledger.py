"""The ledger of a small federation with an honest server, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.ledger import chain
from atoll.ledger.signing import client_id, plan_hash, update_text

SERVER = Ed25519PrivateKey.from_private_bytes(bytes(32))
CLIENTS = [Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32) for number in range(3)]
RUN = "mnist"
PLAN = {"rounds": 4, "aggregator": {"name": "mean"}}

Body = dict[str, Any]
Records = list[tuple[str, Body]]


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def counted(client: int, version: int, attempt: int, secret: bool = False) -> Body:
    """Return a commit's entry about a client that trained from a version."""
    key = CLIENTS[client]
    name, loss, weight = digest(f"{client}/{attempt}"), 0.1 + version, 10.0
    entry: Body = {
        "client": client,
        "id": client_id(public(key)),
        "key": public(key).hex(),
        "num_samples": 600,
        "loss": loss,
        "weight": weight,
        "version": version,
        "attempt": attempt,
    }
    if not secret:
        text = update_text(RUN, attempt, version, name, 600, loss, weight)
        entry |= {"object": name, "signature": key.sign(text).hex()}
    return entry


def commit(version: int, attempt: int, cohort: Sequence[Body], rejected: Sequence[Body] = ()) -> tuple[str, Body]:
    return "commit", {
        "version": version,
        "attempt": attempt,
        "model": digest(f"model {version}"),
        "before": digest(f"model {version - 1}"),
        "rule": "mean",
        "cohort": list(cohort),
        "rejected": list(rejected),
        "epsilon": version / 8,
        "seconds": 1_700_000_000 + version,
    }


def honest_records(secret: bool = False) -> Records:
    """Return the records of four versions, with an abandoned attempt, a rejected client, and a late buffered update."""
    plan: Body = {**PLAN, "secagg": {"clip": 8.0}} if secret else PLAN
    first = {"run": RUN, "plan": plan, "plan_hash": plan_hash(plan), "model": digest("model 0")}
    return [
        ("start", {**first, "server_key": public(SERVER).hex()}),
        commit(1, 0, [counted(client, 0, 0, secret) for client in (0, 1)]),
        ("abandon", {"attempt": 1, "why": "too few updates", "rejected": [{"client": 2, "why": "not finite"}]}),
        commit(2, 2, [counted(client, 1, 2, secret) for client in (0, 2)], [{"client": 1, "why": "late"}]),
        commit(3, 3, [counted(0, 2, 3, secret), counted(1, 1, 2, secret)]),
        commit(4, 5, [counted(2, 3, 5, secret)]),
        ("end", {"reason": "all rounds done", "version": 4, "model": digest("model 4")}),
    ]


def signed_lines(records: Records, key: Ed25519PrivateKey = SERVER) -> tuple[list[str], list[chain.Head]]:
    """Return the chained and signed lines of records, and the head after each."""
    head, lines, heads = chain.EMPTY, [], []
    for kind, body in records:
        line, head = chain.add(head, kind, body, key)
        lines.append(line)
        heads.append(head)
    return lines, heads
