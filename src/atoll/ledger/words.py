"""Records of ledgers in a few words."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from atoll.ledger import chain


def in_words(kind: str, body: Mapping[str, Any]) -> str:
    """Return what a record says in a few words."""
    match kind:
        case chain.START if "run" in body:
            return f"run {body['run']}, plan {body['plan_hash'][:12]}, model {body['model'][:12]}"
        case chain.START:
            return f"begins; signed by server {body['server_key'][:12]}"
        case chain.COMMIT:
            clients = ",".join(str(update["client"]) for update in body["cohort"])
            spent = "" if body.get("epsilon") is None else f", epsilon {body['epsilon']:.4g}"
            rejected = f", {len(body['rejected'])} rejected" if body["rejected"] else ""
            version = f"version {body['version']} of clients {clients}, model {body['model'][:12]}"
            return f"{_time(body['seconds'])} {version}{spent}{rejected}"
        case chain.BROADCAST:
            return f"version {body['version']} was sent as {body['object'][:12]}"
        case chain.ABANDON:
            return f"attempt {body['attempt']}: {body['why']}"
        case chain.END:
            return f"{body['reason']}: version {body['version']}, model {body['model'][:12]}"
        case _:
            about = ", ".join(f"{name} {value}" for name, value in body.items() if name not in ("seconds", "by", "do"))
            return f"{_time(body['seconds'])} {body['by']}: {body['do']} ({about})"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def printable(text: str) -> str:
    """Replace control characters, which whoever wrote a ledger could have put there to manipulate a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
