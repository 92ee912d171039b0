"""Ledgers as the page shows them: a record in words, and whether all are as they were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atoll.ledger import chain
from atoll.ledger.audit import Findings, audit
from atoll.ledger.chain import Fault
from atoll.ledger.words import in_words, printable

MAX_RECORDS = 200


def ledger_page(lines: Sequence[str], start: int) -> dict[str, Any]:
    """Return some records of a ledger in words, without checking them."""
    records = [_shown(number, lines[number]) for number in range(start, min(len(lines), start + MAX_RECORDS))]
    last = _shown(len(lines) - 1, lines[-1]) if lines else {"hash": None}
    return {"length": len(lines), "head": last["hash"], "records": records}


def _shown(number: int, line: str) -> dict[str, Any]:
    try:
        record, _ = chain.read(line)
        says = printable(in_words(record.kind, record.body))
        return {"number": number, "kind": record.kind, "hash": record.hash(), "says": says, "body": record.body}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return {"number": number, "kind": "?", "hash": None, "says": "is not a record", "body": {}}


def verified(lines: Sequence[str], *, is_operator: bool) -> Findings | Fault | None:
    """Check hashes, signatures and, of a run's ledger, that its records are consistent; return its first fault."""
    return chain.verify(lines) if is_operator else audit(lines)
