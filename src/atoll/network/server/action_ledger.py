"""The operator's ledger: what was done, when and by whom, as a signed chain beside those of the runs."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.ledger import chain
from atoll.network.server.auth import Clock
from atoll.network.server.queries import Tables

About = str | int | float | list[str] | None


class ActionLedger:
    """Adds records to the operator's ledger, in the transaction that does what they say."""

    def __init__(self, key: Ed25519PrivateKey, clock: Clock) -> None:
        self._key, self._clock = key, clock

    def add(self, tables: Tables, do: str, by: str, **about: About) -> None:
        """Record an action; the first record names the server's key."""
        last = tables.last_ledger_line(chain.OPERATOR)
        if last is None:
            line, head = chain.start({}, self._key)
            tables.add_ledger_line(chain.OPERATOR, line, head)
        else:
            record, _ = chain.read(last)
            head = chain.Head(record.number + 1, record.hash())
        body = {"do": do, "by": by, "seconds": round(self._clock.wall(), 3), **about}
        line, head = chain.add(head, chain.ACTION, body, self._key)
        tables.add_ledger_line(chain.OPERATOR, line, head)
