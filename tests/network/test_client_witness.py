"""A server that lies about models, versions or updates, and a client that compares all of it with the signed ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ledger.honest_ledger import SERVER, honest_records, public, signed_lines
from network.scripted_federation import RUN, SMALL, ScriptedFederation
from network.scripted_server import ScriptedServer
from network.test_client_agreement import PLAN, One

from atoll.core.errors import DiskFull, RunError
from atoll.core.messages import Payload
from atoll.core.wire import pack
from atoll.ledger import chain
from atoll.ledger.audit import Findings, audit
from atoll.ledger.chain import Fault
from atoll.ledger.receipts import Receipts, max_versions
from atoll.network.client.home import Home, RunHome
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Order, Ref
from atoll.train.build import build_job


def forged(one: One) -> Ref:
    """Another model than the one that everybody was sent."""
    return one.server.put(pack(Payload(one.ones * 2)))


def send(one: One, ref: Ref) -> None:
    """Name another object in the order that waits."""
    [order] = one.server.orders[0]
    one.server.orders[0] = [msgspec.structs.replace(order, model=ref)]


def test_a_model_that_the_ledger_does_not_name_is_not_trained_on(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        send(one, forged(one))
        with pytest.raises(RunError, match="its ledger says that everybody was sent"):
            client.step()
    assert not one.server.deliveries


def test_a_broadcast_of_other_parameters_than_the_version_has_is_not_trained_on(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order(model=forged(one))  # the ledger says that this was sent, of the version that is made of ones
        with pytest.raises(RunError, match="other parameters than its ledger names"):
            client.step()
    assert not one.server.deliveries


@pytest.mark.parametrize("downlink", [["half"], ["delta", {"name": "top_k", "fraction": 0.5}]], ids=["coded", "news"])
def test_a_forged_model_is_noticed_whatever_the_downlink(tmp_path: Path, downlink: list[Any]) -> None:
    one = One(tmp_path, PLAN.replace({"downlink": downlink}))
    with one.joined() as client:
        one.order(0)
        client.step()
        one.order(1, 1)
        send(one, forged(one))
        with pytest.raises(RunError, match="its ledger says that everybody was sent"):
            client.step()
    assert len(one.server.deliveries) == 1


def test_a_client_that_is_shown_no_records_does_not_work(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        one.server.ledgers["run"] = []
        with pytest.raises(RunError, match="no record that version 0 was sent"):
            client.step()
        assert not one.server.deliveries


def test_records_that_stop_coming_are_missed(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        shown = one.server.ledgers["run"]
        one.server.ledgers["run"] = shown[:]
        one.order(1, 1)
        one.server.ledgers["run"] = shown  # versions go on, the ledger does not
        with pytest.raises(RunError, match="no record that version 1 was sent"):
            client.step()


def test_no_version_is_sent_in_two_forms(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.server.note("run", chain.BROADCAST, {"version": 0, "object": forged(one).name})
        one.order(1, 1)
        with pytest.raises(RunError, match="sends version 0 a second time"):
            client.step()


def test_a_run_does_not_go_back(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        for attempt in range(2):
            one.order(attempt, attempt)
            client.step()
        model = one.server.put(pack(Payload(one.ones)))
        one.server.orders[0] = [Order("run", 2, 0, model)]  # which was sent, and is what the ledger says
        with pytest.raises(RunError, match="goes back from version 1 to 0"):
            client.step()


def test_a_fork_is_seen_in_what_others_have_signed(tmp_path: Path) -> None:
    """Two clients that are sent two models under two ledgers: neither can be counted for the other."""
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    server = scripted.server
    with scripted.stack:
        first_D = _first(scripted)
        mine, other = (server.put(pack(Payload(each))) for each in (first_D, first_D + 1))
        fork = _fork(server, other.name, first_D + 1)
        server.broadcast(RUN, mine.name)
        server.orders[0] = [Order(RUN, 0, 0, mine)]
        while not server.deliveries:
            scripted.clients[0].step()
        server.orders[1] = [Order(RUN, 0, 0, other)]
        shown, server.ledgers[RUN] = server.ledgers[RUN], fork
        while len(server.deliveries) < 2:
            scripted.clients[1].step()
        server.ledgers[RUN] = shown
        server.commit(RUN, first_D)  # counts both, in the ledger of client 0
        found = audit(server.ledgers[RUN], public_bytes(server.key))
        assert isinstance(found, Fault) and "counts client 1 for another broadcast than the one sent" in found.what
        server.broadcast(RUN, mine.name)
        server.orders[0] = [Order(RUN, 1, 1, mine)]
        with pytest.raises(RunError, match="counts client 1 for another broadcast than the one sent"):
            scripted.clients[0].step()


def _first(scripted: ScriptedFederation) -> torch.Tensor:
    return build_job(scripted.plan, scripted.federation).first_D


def _fork(server: ScriptedServer, name: str, params_D: torch.Tensor) -> list[str]:
    """Another ledger of the same run, from other parameters, signed by the same server."""
    ledger, head, versions = server.ledgers[RUN], server.heads[RUN], server.versions[RUN]
    server.add_run(server.infos[RUN], params_D)
    server.broadcast(RUN, name)
    fork = server.ledgers[RUN]
    server.ledgers[RUN], server.heads[RUN], server.versions[RUN] = ledger, head, versions
    server.announced.clear()
    return fork


def test_an_update_that_was_acknowledged_is_in_the_ledger(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.server.counted.update(one.server.deliveries)  # the version is made without it, and says nothing of it
        one.order(1, 1)
        with pytest.raises(RunError, match="neither counts nor rejects the update of client 0 in attempt 0"):
            client.step()


def test_a_client_is_not_counted_under_another_key(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        [(name, _)] = one.server.deliveries.values()
        one.server.counted.update(one.server.deliveries)
        one.server.commit("run", one.ones, [(0, name)])  # signed by somebody whom the server made up
        one.order(1, 1)
        with pytest.raises(RunError, match="counts client 0, which is this one, under another key"):
            client.step()


def test_an_update_may_be_rejected_or_its_attempt_abandoned(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.server.counted.update(one.server.deliveries)
        rejected = [{"client": 0, "attempt": 0, "why": "left out"}]
        one.server.commit("run", one.ones, rejected=rejected, attempt=0)
        one.order(1, 1)
        client.step()
        one.server.note("run", chain.ABANDON, {"attempt": 1, "why": "too few updates", "rejected": []})
        one.server.counted.update(one.server.deliveries)
        one.server.attempts["run"] = 1
        one.order(2, 1)
        client.step()
    assert len(one.server.deliveries) == 3 and not one.server.refusals


def test_receipts_outlive_a_restart(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "world", SMALL)
    server = scripted.server
    with scripted.stack:
        first_D = _first(scripted)
        model = server.put(pack(Payload(first_D)))
        server.broadcast(RUN, model.name)
        server.orders[0] = [Order(RUN, 0, 0, model)]
        while not server.deliveries:
            scripted.clients[0].step()
        scripted.homes[0].close()
        scripted.homes[0] = Home.open(scripted.path / "client-0")
        scripted.start(0)
        server.counted.update(server.deliveries)
        server.commit(RUN, first_D)
        server.broadcast(RUN, model.name)
        server.orders[0] = [Order(RUN, 1, 1, model)]
        with pytest.raises(RunError, match="neither counts nor rejects the update of client 0 in attempt 0"):
            scripted.clients[0].step()


def test_what_counted_is_what_the_ledger_says(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.server.counted.update(one.server.deliveries)
        rejected = [{"client": 0, "attempt": 0, "why": "left out"}]
        one.server.commit("run", one.ones, rejected=rejected, attempt=0)
        one.order(1, 1, counted=0)  # what the client would remember of attempt 0 does not hold
        with pytest.raises(RunError, match="attempt 0 counted, the ledger of run does not"):
            client.step()


def record(number: int, kind: str, **body: Any) -> chain.Record:
    return chain.Record(number, "0" * 64, kind, {"rejected": [], **body})


def test_where_clients_work_on_receipts_wait_for_a_bounded_number_of_versions() -> None:
    plan = {"policy": {"name": "buffered", "size": 2, "concurrency": 3}}
    most = max_versions(plan, num_clients=5)
    assert most == 8 and max_versions({}, 5) is None  # all five take three commits
    receipts = Receipts(1, most)
    receipts.waiting[4] = None
    commits = [record(n, chain.COMMIT, version=n, attempt=10 + n, cohort=[]) for n in range(20)]
    assert receipts.add(commits[2]) is None  # it may have been made before the update came
    receipts.caught_up(2)
    assert [n for n in range(3, 20) if receipts.add(commits[n]) is not None] == list(range(11, 20))
    mine = {"client": 1, "attempt": 4}
    assert receipts.add(record(20, chain.COMMIT, version=20, attempt=40, cohort=[mine])) is None
    assert receipts.waiting == {} and receipts.counted == {4}


def test_an_attempt_cannot_be_passed_over() -> None:
    receipts = Receipts(1, None)
    receipts.waiting = {3: None}
    assert receipts.add(record(1, chain.ABANDON, attempt=2)) is None
    found = receipts.add(record(2, chain.ABANDON, attempt=4))
    assert found is not None and "attempt 3" in found
    sealed = record(3, chain.COMMIT, version=1, attempt=5, cohort=[], sealed="0" * 64)
    assert receipts.add(sealed) is None and receipts.waiting == {}


def test_a_full_disk_leaves_the_story_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        one.order()
        client.step()
        one.order(1, 1)

        def full(self: RunHome, *args: Any) -> None:
            raise DiskFull("no room is left")

        with monkeypatch.context() as patched:
            patched.setattr(RunHome, "add_ledger_lines", full)
            client.step()
        assert any("no room is left" in text for text in one.said) and len(one.server.deliveries) == 1
        client.step()
    assert len(one.server.deliveries) == 2 and len(one.home.run("run").ledger_lines()) == 4


def test_a_ledger_of_an_older_server_still_verifies() -> None:
    lines, heads = signed_lines(honest_records())
    found = audit(lines, public(SERVER), heads)
    assert isinstance(found, Findings) and found.broadcasts == 0 and found.ended == "all rounds done"
