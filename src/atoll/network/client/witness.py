"""A client's verification of one run's ledger.

Every record is checked as it arrives, by the rules of `atoll ledger verify`. Two more checks hold the server to its
ledger: a broadcast is the one that the ledger names, and acknowledged updates of this client appear in it.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.core.errors import RunError
from atoll.ledger import chain
from atoll.ledger.audit import History
from atoll.ledger.receipts import Receipt, Receipts, max_versions
from atoll.network.client.connection import Connection
from atoll.network.client.home import RunHome
from atoll.network.protocol import endpoints
from atoll.network.protocol.messages import EvaluationOrder, Order

DISTRUST = "do not trust this server"


class Witness:
    """The verified ledger of a run; after a restart, as the home has it."""

    def __init__(
        self, home: RunHome, server_key: bytes, client: int, own_key: bytes, say: Callable[[str], None]
    ) -> None:
        self.home, self._server_key, self._client, self._own_key, self._say = home, server_key, client, own_key, say
        self._info = home.info()
        self._recall()

    def _recall(self) -> None:
        """Replay the records and receipts in the home, which were checked when they arrived."""
        self.history = History(self._server_key, checked_before=True)
        self.receipts = Receipts(self._client, max_versions(self._info.plan, self._info.num_clients))
        for receipt in self.home.receipts(Receipt):
            self.receipts.waiting[receipt.attempt] = None
        for line in self.home.ledger_lines():
            record, _ = chain.read(line)
            wrong = self.history.add(record) or self.receipts.add(record)
            if wrong is not None:
                raise self._lie(record.number, wrong)
        self.history.checked_before = False

    def hear(self, lines: tuple[str, ...]) -> None:
        """Check and save the next records; RunError if one is false."""
        fault = chain.verify(lines, self._server_key, after=self.home.head)
        if fault is not None:
            raise self._lie(fault.number, fault.what)
        records = [chain.read(line)[0] for line in lines]
        try:
            for record in records:
                self._hear(record)
            self.home.add_ledger_lines(lines, chain.Head(self.home.head.length + len(lines), records[-1].hash()))
        except BaseException:  # such as a full disk: records that are not saved were not read
            self._recall()
            raise

    def _hear(self, record: chain.Record) -> None:
        plan = record.body.get("plan") if record.kind == chain.START else None
        if plan is not None and not self.home.is_agreed_plan(plan):
            raise RunError(
                f"the ledger of {self._info.run} is of another plan than this client agreed to; ask the operator"
            )
        if record.kind == chain.COMMIT:
            self._check_own(record)
        wrong = self.history.add(record) or self.receipts.add(record)
        if wrong is not None:
            raise self._lie(record.number, wrong)
        if record.kind in (chain.COMMIT, chain.ABANDON) and self.receipts.max_versions is None:
            self.home.end_sessions(record.body["attempt"])  # its sum is opened, or never will be

    def _check_own(self, record: chain.Record) -> None:
        """Check a commit's entries of this client: it may count only what this client delivered, under its key."""
        for each in record.body.get("cohort", ()):
            if not isinstance(each, dict) or each.get("client") != self._client:
                continue
            if "object" in each and each["object"] not in self.home.sent_objects:
                raise RunError(
                    f"record {record.number} of the ledger of {self._info.run} counts an update of this client that it "
                    f"never sent: {each['object']}; somebody else has its key, or the server lies"
                )
            if each.get("key") != self._own_key.hex():
                raise self._lie(record.number, f"counts client {self._client}, which is this one, under another key")
            self._say(f"version {record.body.get('version')} counts this client's update")
        for each in record.body.get("rejected", ()):
            if isinstance(each, dict) and each.get("client") == self._client:
                self._say(f"version {record.body.get('version')} leaves this client out: {each.get('why')!r:.200}")

    def acknowledged(self, attempt: int, name: str) -> None:
        """Save the server's acknowledgement of an update: its ledger must record what became of it."""
        self.home.save_receipt(Receipt(self._client, attempt, name))
        if attempt not in self.receipts.counted:
            self.receipts.waiting[attempt] = None

    def check_sent(self, version: int, name: str) -> None:
        """Refuse a broadcast whose name is not the ledger's."""
        if self.history.sent[version] != name:
            raise RunError(
                f"the server sends version {version} of {self._info.run} as {name}, its ledger says that everybody was "
                f"sent {self.history.sent[version]}; {DISTRUST}"
            )

    def check_params(self, version: int, params: str) -> None:
        """Refuse parameters whose hash is not the ledger's."""
        if self.history.models[version] != params:
            raise RunError(
                f"what the server sends as version {version} of {self._info.run} are other parameters than its ledger "
                f"names; {DISTRUST}"
            )

    def knows_counted(self, attempt: int) -> bool:
        """Return whether the ledger confirms that this client's update counted, or seals who took part."""
        return self.receipts.sealed or attempt in self.receipts.counted

    def _lie(self, number: int, what: str) -> RunError:
        return RunError(f"record {number} of the ledger of {self._info.run} {what}; {DISTRUST}")


class LedgerReader:
    """Fetches the ledgers of runs from the server, and has each verified by its witness."""

    def __init__(
        self, connection: Connection, server_key: bytes, own_key: bytes, say: Callable[[str, str], None]
    ) -> None:
        self._connection, self._server_key, self._own_key, self._say = connection, server_key, own_key, say
        self._witnesses: dict[str, Witness] = {}

    def read(self, run: str, home: RunHome) -> bool:
        """Fetch new ledger records, verify and keep them; return False if there are none."""
        witness = self.witness(run, home)
        lines = self._connection.ask(endpoints.LEDGER, None, run=run, start=home.head.length).lines
        if not lines:
            witness.receipts.caught_up(witness.history.version)
            return False
        witness.hear(lines)
        return True

    def witness(self, run: str, home: RunHome) -> Witness:
        """Return the witness of a run's ledger."""
        if run not in self._witnesses:
            number = self._connection.welcome().number
            self._witnesses[run] = Witness(
                home, self._server_key, number, self._own_key, lambda text: self._say(run, text)
            )
        return self._witnesses[run]

    def check(self, home: RunHome, order: Order | EvaluationOrder) -> None:
        """Read the ledger up to the version of an order, and refuse what it does not confirm."""
        witness = self.witness(order.run, home)
        while order.version not in witness.history.sent:
            if not self.read(order.run, home):
                raise RunError(
                    f"the ledger of {order.run} has no record that version {order.version} was sent, which the server "
                    f"wants work on; {DISTRUST}, or let its operator update it"
                )
        witness.check_sent(order.version, order.model.name)
        while order.counted is not None and not witness.knows_counted(order.counted):
            if not self.read(order.run, home):
                raise RunError(
                    f"the server says that this client's update of attempt {order.counted} counted, the ledger of "
                    f"{order.run} does not; {DISTRUST}"
                )
