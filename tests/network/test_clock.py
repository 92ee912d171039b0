"""Clocks that are set while a server runs: nothing that it measures depends on the time of day."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from threading import Event

import pytest
from network.federation import until
from network.in_process_server import built_run, enrol

from atoll import Plan
from atoll.network.protocol.messages import Poll
from atoll.network.server.auth import Clock, Refused
from atoll.network.server.operations import Operations
from atoll.network.server.presence import ONLINE_SECONDS
from atoll.network.server.store import Store
from atoll.network.server.writer import Transaction

RUN, DEADLINE = "law", 60.0
PLAN = Plan(rounds=3, policy={"name": "cohort", "deadline": DEADLINE, "min_reports": 2}, evaluation={"every": 0})
HOURS = 7200.0


class ScriptedFederation:
    """A server whose time passes when a test says so, and whose clock is set when a test says so."""

    def __init__(self, home: Path, passed: float = 1000.0, ahead: float = 1_700_000_000.0) -> None:
        self.passed, self.ahead = passed, ahead
        home.mkdir(exist_ok=True)
        clock = Clock(wall=lambda: self.passed + self.ahead, monotonic=lambda: self.passed)
        self.operations = Operations(home, Store(f"sqlite:///{home}/store.db"), num_clients=2, clock=clock)

    def join(self) -> None:
        """Let two clients in, and begin a run."""
        self.operations.ensure_run(RUN, PLAN)
        for name in ("a", "b"):
            enrol(self.operations, name, self.operations.token(60))
        self.operations.approve(["a", "b"])
        self.poll()

    def poll(self) -> None:
        """Let all clients be heard."""
        for client in list(self.operations.driver.presence.clients.values()):
            noted = self.operations.handler.note_poll(client, Poll(10))
            if noted is not None:
                noted.result(20)

    def asked(self, attempt: int) -> None:
        """Wait until both clients are asked to do this attempt."""
        until(lambda: self._seen()[0] == [attempt] * 2, 20, f"attempt {attempt}: {self._seen()}")

    def waiting(self) -> float:
        """How long clients are still waited for."""
        client = self.operations.driver.presence.clients[0]
        (order,) = self.operations.handler.orders(client, Poll(10)).orders
        assert order.seconds is not None
        return order.seconds

    def _seen(self) -> tuple[list[int], str]:
        machine = built_run(self.operations, RUN).machine
        return [task.attempt for task in machine.in_flight.values()], str(machine.phase)


@contextmanager
def running(home: Path) -> Iterator[ScriptedFederation]:
    scripted = ScriptedFederation(home)
    scripted.operations.start()
    try:
        yield scripted
    finally:
        scripted.operations.close()


@pytest.mark.parametrize("step", [HOURS, -HOURS])
def test_deadlines_pauses_and_presence_do_not_depend_on_the_time_of_day(tmp_path: Path, step: float) -> None:
    with running(tmp_path / "home") as scripted:
        scripted.join()
        scripted.asked(0)
        scripted.ahead += step
        assert scripted.operations.status()["clients"]["online"] == 2
        assert scripted.waiting() == DEADLINE
        scripted.passed += DEADLINE + 1  # nobody answers: it is given up, and tried again after a pause
        scripted.poll()
        until(lambda: scripted._seen()[0] == [], 20, "the end of attempt 0")
        scripted.ahead += step
        scripted.passed += 5
        scripted.asked(1)
        scripted.ahead -= 3 * step
        assert 0 < scripted.waiting() <= DEADLINE
        assert scripted.operations.status()["server"]["seconds_up"] == pytest.approx(DEADLINE + 6)
        scripted.passed += ONLINE_SECONDS + 1
        assert scripted.operations.status()["clients"]["online"] == 0


def test_a_deadline_begins_anew_with_the_server(tmp_path: Path) -> None:
    with running(tmp_path / "home") as scripted:
        scripted.join()
        scripted.asked(0)
    again = ScriptedFederation(
        tmp_path / "home", 7.0, 1_600_000_000.0
    )  # a machine that was just started, and its clock is wrong
    again.operations.start()
    try:
        again.poll()
        again.asked(0)
        assert again.waiting() == DEADLINE
    finally:
        again.operations.close()


def test_who_is_revoked_in_the_same_transaction_changes_nothing(tmp_path: Path) -> None:
    with running(tmp_path / "home") as scripted:
        scripted.join()
        client, held, go = scripted.operations.driver.presence.clients[0], Event(), Event()

        def hold(transaction: Transaction) -> None:
            held.set()
            assert go.wait(20)

        first = scripted.operations.driver.writer.submit(hold)
        assert held.wait(20)

        def revoke(transaction: Transaction) -> None:
            transaction.tables.revoke(client.id)

        second = scripted.operations.driver.writer.submit(revoke)  # both wait now, and are written down together
        noted = scripted.operations.handler.note_poll(client, Poll(999))
        assert noted is not None
        go.set()
        first.result(20)
        second.result(20)
        with pytest.raises(Refused, match="shut out") as refused:
            noted.result(20)
        assert refused.value.status == HTTPStatus.FORBIDDEN
