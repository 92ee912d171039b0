"""Sites that add their evaluations in secret, with a real server: it learns the figures of all, and no site's sums."""

from __future__ import annotations

import base64
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from network.apps import dealt
from network.federation import RUN, federation, until
from network.fork_server import ForkServer
from network.in_process_server import client_of, operated, serving
from network.raw_client import TASK, RawClient, approved_raw_clients
from network.test_network_lies import offences
from network.test_sites import BASE, ONLY, parts_at_home, sites_of, told

from atoll.cli.operator import status
from atoll.commit.run_state import first_state
from atoll.core.messages import State
from atoll.core.plan import Plan
from atoll.network.client.connection import Connection
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.messages import Answer, EvaluationOrder, Order, Orders, Poll, SiteEvaluation
from atoll.network.protocol.objects import manifest_of
from atoll.network.protocol.secret_sums import FIRST_TASK, pack_sums, to_vector
from atoll.report.html import write_report
from atoll.secagg.encoding import finest
from atoll.train.build import build_job
from atoll.train.federation import build_federation

SECRET, OPEN = Floors(evaluation="secret"), Floors()
FOUR = ONLY.replace({"partition.num_clients": 4})


def spellings(sums: State) -> list[bytes]:
    """The bytes by which a site's sums could be known: packed, as numbers, and as the vector that is added."""
    vector, packed = to_vector(sums, finest(1.0, 3, 64)).tobytes(), pack_sums(sums)
    numbers = [value.numpy().tobytes() for value in sums.values() if value.numel() > 1]
    return [packed, vector, *numbers, *(base64.b64encode(each) for each in (packed, vector))]


def test_the_server_learns_the_figures_of_all_and_the_sums_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []
    honest = Connection._exchange

    def heard(self: Connection, call: Any, *args: Any, **options: Any) -> tuple[int, bytes]:
        sent.append(call.body)
        return honest(self, call, *args, **options)

    monkeypatch.setattr(Connection, "_exchange", heard)
    with operated(tmp_path / "server", 4) as operations, serving(operations) as url:
        operations.add_run(RUN, FOUR)
        apps = [replace(dealt(FOUR, number), floors=OPEN if number == 3 else SECRET) for number in range(4)]
        clients = [client_of(operations, url, tmp_path / f"c{number}", app) for number, app in enumerate(apps)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    sites = json.loads((tmp_path / "server" / "runs" / RUN / "sites.json").read_text())
    job = build_job(FOUR, build_federation(FOUR))
    measures, parts = parts_at_home(FOUR, first_state(job, None).params_D, 4)
    whole, hidden = measures.finish(measures.merge(parts)), measures.finish(measures.merge(parts[:3]))
    assert sites["secret"]["names"] == ["c0", "c1", "c2"] and [site["name"] for site in sites["sites"]] == ["c3"]
    assert sites["secret"]["samples"] == sum(int(part["count"]) for part in parts[:3])
    for found, due in ((sites["secret"]["figures"], hidden), (sites["pooled"], whole)):
        assert found.keys() == due.keys() and found["loss"] == pytest.approx(due["loss"], rel=1e-14)
        assert {name: found[name] for name in found if name != "loss"} == {
            name: due[name] for name in found if name != "loss"
        }
    assert (sites["worst"]["name"], sites["spread"]["num_clients"]) == ("c3", 1)
    stored = [path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file()]
    for number, part in enumerate(parts):
        known = [text for text in spellings(measures.condense(part)) if any(text in each for each in (*sent, *stored))]
        assert bool(known) == (number == 3), number


def poll(raw_client: RawClient) -> tuple[EvaluationOrder, ...]:
    said = raw_client.ask("POST", "/v1/poll", Poll(40, 0.2, evaluates_in_secret=True))
    if said.status in (0, 401):  # the server was started again
        assert raw_client.begin().status == 200
        return poll(raw_client)
    return said.read(Orders).evaluations


def wait_for_order(raw_client: RawClient, secure: bool) -> EvaluationOrder:
    """Wait for an order to measure, or to answer a message."""
    found: EvaluationOrder = until(
        lambda: next((each for each in poll(raw_client) if (each.secure is not None) == secure), None), 30, "an order"
    )
    return found


PATH = f"/v1/runs/{RUN}/versions/0/evaluation"
READY = SiteEvaluation(in_secret=True)


def test_bad_answers_are_offences_and_refusals_are_not(tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        *secret, opened = sites = approved_raw_clients(network, 4)
        network.serve("--clients", "4")
        for each in sites:
            each.begin()
            each.ask(
                "POST", "/v1/poll", Poll(40, 0.0, evaluates=each is opened, evaluates_in_secret=each is not opened)
            )
        for each in secret:
            wait_for_order(each, secure=False)
            assert each.ask("POST", PATH, READY).status == 200
        path = TASK.format(run=RUN, attempt=FIRST_TASK)
        assert opened.ask("POST", f"{path}/secure", Answer(b"")).status == 410  # it is not in the session
        for each in secret[:2]:
            order = wait_for_order(each, secure=True)
            assert each.upload(Order(RUN, FIRST_TASK, 0, order.model), b"rubbish") is None
            manifest = msgspec.msgpack.encode(manifest_of(b"rubbish"))
            assert each.ask("POST", f"{path}/secure", Answer(manifest)).status == 200
            assert each.ask("POST", f"{path}/secure", Answer(manifest)).status == 410  # one answer to a message
        assert secret[2].ask("POST", PATH, SiteEvaluation(reason="too few")).status == 200
        assert opened.ask("POST", PATH, told()).status == 200
        assert network.wait_for(RUN, 30) == "all rounds done"
        result = sites_of(network)
        assert "0 clients" in result["secret"]["reason"] and result["secret"]["clients"] == [0, 1, 2]
        first, second, third, last = result["sites"]
        assert "not an envelope" in first["rejected"] and "not an envelope" in second["rejected"]
        assert third["reason"] == "too few" and last["figures"]["accuracy"] == 1.0 == result["pooled"]["accuracy"]
        assert offences(network) == [1, 1, 0, 0]


def test_a_site_alone_is_not_measured(
    tmp_path: Path, processes: ForkServer, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        secret, opened = approved_raw_clients(network, 2)
        network.serve("--clients", "2")
        for each in (secret, opened):
            each.begin()
            each.ask("POST", "/v1/poll", Poll(40, 0.0, evaluates=each is opened, evaluates_in_secret=each is secret))
        wait_for_order(secret, secure=False)
        assert secret.ask("POST", PATH, READY).status == 200
        assert opened.ask("POST", PATH, told()).status == 200
        assert network.wait_for(RUN, 30) == "all rounds done"
        status(home=network.home)
        shown = capsys.readouterr().out
        assert "no secret sum of 1 site" in shown and "a sum of one is no sum" in shown
        result = sites_of(network)
        assert result["secret"]["names"] == ["light 0"] and result["pooled"]["accuracy"] == 1.0


def test_a_sum_that_a_kill_cut_off_is_not_begun_again(tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        sites = approved_raw_clients(network, 4)
        server = network.serve("--clients", "4")
        for each in sites:
            each.begin()
            each.ask("POST", "/v1/poll", Poll(40, 0.0, evaluates_in_secret=True))
        wait_for_order(sites[3], secure=False)
        for each in sites[:3]:
            assert each.ask("POST", PATH, READY).status == 200
        assert all(order.secure is None for each in sites for order in poll(each))  # one is missing
        assert sites[3].ask("POST", PATH, READY).status == 200
        wait_for_order(sites[0], secure=True)
        server.signal(signal.SIGKILL)
        server.wait(30)
        network.serve(plan=False)
        assert poll(sites[1]) == ()
        assert network.wait_for(RUN, 30) == "all rounds done"
        result = sites_of(network)
        assert "cut off" in result["secret"]["reason"] and result["secret"]["clients"] == [0, 1, 2, 3]
        assert result["sites"] == [] and "pooled" not in result
        assert offences(network) == [0] * 4


@pytest.mark.slow
def test_sites_of_every_kind_measure_one_run(
    tmp_path: Path, processes: ForkServer, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = BASE.replace({"partition.num_clients": 6, "rounds": 4, "evaluation.clients_every": 1})
    kinds = ["secret"] * 3 + ["open", "noised", "none"]
    with federation(tmp_path / "f", processes, certs, plan) as network:
        for kind in kinds:
            epsilon = "evaluation_epsilon = 2.0\n" if kind == "noised" else ""
            (network.root / f"{kind}.toml").write_text(f'evaluation = "{kind}"\n{epsilon}')
        network.serve("--clients", "6")
        network.enrol(6)
        clients = [network.join(number, "--floors", f"{kind}.toml") for number, kind in enumerate(kinds)]
        assert network.wait_for(RUN, 60) == "all rounds done"
        status(home=network.home)
        shown = capsys.readouterr().out
        assert [client.wait(30) for client in clients] == [0] * 6
        sites = sites_of(network)
        assert sites["secret"]["clients"] == [0, 1, 2] and [site["client"] for site in sites["sites"]] == [3, 4]
        assert sites["round"] == 4 and "accuracy" in sites["pooled"] and "loss" not in sites["pooled"]
        assert sites["spread"]["num_clients"] == 2 and sites["worst"]["client"] in (3, 4)
        page = write_report([network.directory()], tmp_path / "report.html").read_text()
        for text in (shown, page):
            assert "3 sites in a secret sum" in text and "worst site and spread are of the other sites" in text
        assert "c0, c1, c2" in page
        assert [row["clients_test"]["num_clients"] for row in network.rows() if "clients_test" in row][-1] == 2
        added = [
            json.loads(line) for line in (network.root / "server.out").read_text().splitlines() if '"added"' in line
        ]
        assert [line["round"] for line in added] == [1, 2, 3, 4] and {line["clients"] for line in added} == {"3 of 3"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"policy": {"name": "asynchronous", "concurrency": 3}}])
def test_evaluations_are_secret_wherever_updates_are_or_rounds_overlap(
    tmp_path: Path, processes: ForkServer, certs: Path, changes: dict[str, Any]
) -> None:
    large = {"secagg": {"clip": 2.0}, "evaluation.metrics": ["accuracy", "auroc"]}  # vectors of more than one chunk
    plan: Plan = BASE.replace({"rounds": 4, **(changes or large)})
    with federation(tmp_path / "f", processes, certs, plan) as network:
        (network.root / "floors.toml").write_text('evaluation = "secret"\n' if changes else "")
        network.serve("--clients", "3", "--once")
        network.enrol(3)
        for number in range(3):
            network.join(number, "--floors", "floors.toml")
        network.wait(60)
        sites = sites_of(network)
        assert sites["sites"] == [] and sites["secret"]["clients"] == [0, 1, 2] and sites["round"] == 4
        assert sites["pooled"] == sites["secret"]["figures"] and sites["pooled"]["accuracy"] > 0.3
        assert not any("clients_test" in row for row in network.rows())
        assert torch.isfinite(torch.tensor(list(sites["pooled"].values()))).all()
