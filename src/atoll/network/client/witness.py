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
from atoll.network.client.home import RunHome

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
