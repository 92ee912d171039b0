"""A run that waits for its clients and a built run are two types: what each answers, and how one becomes the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from network.federation import until
from network.in_process_server import built_run, enrol

from atoll.core.coordinator import Phase
from atoll.core.plan import Plan
from atoll.network.protocol.messages import Delivery, Poll, Refusal
from atoll.network.protocol.objects import manifest_of
from atoll.network.server.auth import Refused
from atoll.network.server.operations import Operations
from atoll.network.server.runs import Run, WaitingRun
from atoll.network.server.store import Store

RUN = "law"
PLAN = Plan(model={"name": "mlp_2nn", "hidden": 8}, policy={"min_reports": 2}, evaluation={"every": 0}, rounds=3)
CHARGING = PLAN.replace({"eligibility.charging": True})


def operations_at(home: Path) -> Operations:
    home.mkdir(exist_ok=True)
    return Operations(home, Store(f"sqlite:///{home}/store.db"), num_clients=2)


def join(operations: Operations) -> None:
    """Let two clients enrol, and say how many samples they have."""
    for name in ("a", "b"):
        enrol(operations, name, operations.token(60))
    operations.approve(["a", "b"])
    for client in list(operations.driver.presence.clients.values()):
        noted = operations.handler.note_poll(client, Poll(10))
        assert noted is not None
        noted.result(20)


MANIFEST = msgspec.msgpack.encode(manifest_of(b"update"))
REQUESTS: dict[str, Callable[[Operations, Any], Any]] = {
    "object": lambda operations, client: operations.handler.readable_objects(client, RUN, "0" * 64),
    "missing": lambda operations, client: operations.handler.missing(client, RUN, 0, MANIFEST),
    "chunk": lambda operations, client: operations.handler.put_chunk(client, RUN, 0, "0" * 64, b"", "0" * 64),
    "deliver": lambda operations, client: operations.handler.deliver(
        client, RUN, 0, Delivery(manifest=MANIFEST, num_samples=1, loss=1.0, weight=1.0, signature=b"")
    ),
    "ready": lambda operations, client: operations.handler.ready(client, RUN, 0),
    "secure": lambda operations, client: operations.handler.answer_secure(client, RUN, 0, MANIFEST),
    "refuse": lambda operations, client: operations.handler.refuse(client, RUN, 0, Refusal("no")),
}


def test_a_waiting_run_sends_clients_away(tmp_path: Path) -> None:
    operations = operations_at(tmp_path / "home")
    operations.start()
    try:
        join(operations)
        operations.driver.presence.clients[0] = client = operations.driver.presence.clients[0]._replace(num_samples=0)
        operations.add_run(RUN, PLAN)  # one client has not said how many samples it has
        assert isinstance(operations.driver.runs[RUN], WaitingRun)
        for name, request in REQUESTS.items():
            with pytest.raises(Refused, match="has not begun") as refused:
                request(operations, client)
            assert refused.value.status == 410, name
        with pytest.raises(Refused, match="has not begun yet") as refused:
            operations.handler.run_info(client, RUN)
        assert refused.value.status == 503 and refused.value.retry is not None
        assert operations.handler.orders(client, Poll(10)).open == 1
        row = operations.status()["runs"][0]
        assert (row["phase"], row["round"], row["asked"], row["accuracy"]) == ("ready", 0, 0, None)
    finally:
        operations.close()


def test_a_run_that_asked_nobody_ends_without_a_ledger_and_stays_ended(tmp_path: Path) -> None:
    operations = operations_at(tmp_path / "home")
    operations.start()
    try:
        operations.add_run("early", PLAN)
        operations.stop_run("early")  # nobody is there
        join(operations)
        operations.add_run(RUN, CHARGING)
        run = built_run(operations, RUN)  # and no client may be asked, as none is charging
        operations.stop_run(RUN)
        assert (run.status, run.machine.phase, run.machine.attempt) == ("interrupted", Phase.FINISHED, 0)
        assert operations.ledger_lines("early") == operations.ledger_lines(RUN) == []
    finally:
        operations.close()
    again = operations_at(tmp_path / "home")
    again.start()
    try:
        assert all(isinstance(run, WaitingRun) for run in again.driver.runs.values())
        assert [row["phase"] for row in again.status()["runs"]] == ["finished"] * 2
        assert [row["status"] for row in again.status()["runs"]] == ["interrupted"] * 2
    finally:
        again.close()


@pytest.mark.parametrize("stopped_first", [True, False])
def test_a_run_is_stopped_while_it_is_built(tmp_path: Path, stopped_first: bool) -> None:
    operations = operations_at(tmp_path / "home")
    operations.start()
    join(operations)
    operations.close()
    operations = operations_at(tmp_path / "home")
    operations.ensure_run(RUN, PLAN)
    waiting = operations.driver.runs[RUN]
    assert isinstance(waiting, WaitingRun)

    def build() -> None:
        operations.driver._build(waiting)

    def stop() -> None:
        with suppress(Refused):
            operations.stop_run(RUN)

    threads = [threading.Thread(target=each) for each in ((stop, build) if stopped_first else (build, stop))]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda number=number: operations.driver.writer._inbox.qsize() == number, 60)  # type: ignore[misc]
    operations.start()  # the writer finds both, and makes them in one transaction
    try:
        for thread in threads:
            thread.join(60)
        run = operations.driver.runs[RUN]
        assert isinstance(run, WaitingRun if stopped_first else Run)
        assert run.status == operations.status()["runs"][0]["status"] == "interrupted"
        assert operations.ledger_lines(RUN) == []
    finally:
        operations.close()
