"""Evaluation at the sites: clients measure versions on their own samples, and the server adds up what they tell."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network.federation import RUN, Federation, federation, until
from network.fork_server import ForkServer
from network.raw_client import RawClient, approved_raw_clients
from network.test_network_lies import offences
from safetensors.torch import save_file

from atoll import Plan, run
from atoll.cli.operator import status
from atoll.commit.run_state import read_state
from atoll.core.messages import Payload, State
from atoll.core.wire import pack
from atoll.network.protocol.messages import EvaluationOrder, Orders, Poll, SiteEvaluation
from atoll.report.html import write_report
from atoll.train.build import build_job
from atoll.train.federation import build_federation
from atoll.train.metrics import Measures, spread
from atoll.train.trainer import Trainer

NUM = 3
BASE = Plan(
    rounds=3,
    partition={"name": "iid", "num_clients": NUM},
    local={"lr": 0.1, "batch_size": 32},
    evaluation={"every": 0, "clients_every": 2, "holdout": 0.4},
)
PROBLEMS: dict[str, dict[str, Any]] = {
    "classification": {"model": {"name": "mlp_2nn", "hidden": 8}},
    "regression": {"data": {"name": "network.site_data:numbers", "tests": 0}},
    "binary": {"data": "network.site_data:yes_or_no", "evaluation.metrics": ["auroc", "accuracy"]},
}


def run_to_end(network: Federation, *options: str, app: str = "network.site_data:client") -> None:
    """Let all clients take part until the run is over."""
    network.serve("--clients", str(NUM), "--once", *options)
    network.enrol(NUM)
    for number in range(NUM):
        network.join(number, app=app)
    network.wait(60.0)


def sites_of(network: Federation) -> dict[str, Any]:
    """What clients measured of the last version."""
    found: dict[str, Any] = json.loads((network.directory() / "sites.json").read_text())
    return found


def parts_at_home(plan: Plan, params_D: torch.Tensor, num: int = NUM) -> tuple[Measures, list[State]]:
    """What a simulation's clients measure of a model."""
    plan = plan.replace({"data.tests": 30} if "tests" in plan.data.options else {})
    trainer = Trainer(build_job(plan, build_federation(plan)))
    return trainer.job.measures, [trainer.measure_client(params_D, client, {}) for client in range(num)]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sites_give_the_figures_of_a_simulation(
    problem: str, tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    plan = BASE.replace(PROBLEMS[problem])
    with federation(tmp_path / "f", processes, certs, plan) as network:
        run_to_end(network)
        [state] = network.directory().glob("state-*.safetensors")
        measures, parts = parts_at_home(plan, read_state(state, plan.identity()).params_D)
        sites = sites_of(network)
        pooled = measures.finish(measures.merge(parts))
        assert sites["round"] == plan.rounds
        assert [site["samples"] for site in sites["sites"]] == [int(part["count"]) for part in parts]
        for name, value in pooled.items():
            error = sites["pooled"].get(f"{name}_error", 0.0)
            assert sites["pooled"][name] == pytest.approx(value, abs=error + 1e-9)
        alone = [measures.finish_sums(measures.condense(part)) for part in parts]
        assert [site["figures"] for site in sites["sites"]] == [pytest.approx(each) for each in alone]
        main = next(iter(pooled))
        main_C, loss_C = np.array([(each[main], each["loss"]) for each in alone]).T
        expected = spread(main_C, loss_C, larger_is_better=measures.larger_is_better)
        rows = network.rows()
        assert [row["round"] for row in rows if "clients_test" in row] == [2, 3]
        assert rows[-1]["clients_test"] == pytest.approx(expected)
        worst = (min if measures.larger_is_better else max)(range(NUM), key=lambda place: main_C[place])
        assert sites["worst"]["client"] == worst
        assert network.audited().ended


ONLY = BASE.replace({"rounds": 0, "evaluation.clients_every": 1})


def test_a_given_model_is_evaluated_and_nothing_is_trained(
    tmp_path: Path, processes: ForkServer, certs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = build_job(ONLY, build_federation(ONLY))
    given_D = torch.linspace(-1, 1, job.spec.num_params)
    save_file(job.spec.views(given_D), tmp_path / "given.safetensors")
    measures, parts = parts_at_home(ONLY, given_D)
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        network.serve("--clients", str(NUM), "--model", str(tmp_path / "given.safetensors"))
        network.enrol(NUM)
        clients = [network.join(number) for number in range(NUM)]
        assert network.wait_for(RUN, 60) == "all rounds done"
        status(home=network.home)
        shown = capsys.readouterr().out
        assert [client.wait(30) for client in clients] == [0] * NUM
        sites = sites_of(network)
        assert sites["pooled"] == pytest.approx(measures.finish(measures.merge(parts)))
        assert sites["pooled"] != pytest.approx(measures.finish(parts_at_home(ONLY, job.first_D)[1][0]))
        assert "all pooled" in shown and "(worst)" in shown and f"{sites['pooled']['accuracy']:.4g}" in shown
        found = network.audited()
        assert (found.rounds, found.broadcasts, found.ended) == (0, 1, "all rounds done")
        page = write_report([network.directory()], tmp_path / "report.html").read_text()
        assert "all pooled" in page and ">c2<" in page


def evaluation_order(raw_client: RawClient) -> EvaluationOrder:
    """Wait for an order to evaluate."""

    def wanted() -> EvaluationOrder | None:
        orders = raw_client.ask("POST", "/v1/poll", Poll(40, 1.0, evaluates=True)).read(Orders)
        return next(iter(orders.evaluations), None)

    found: EvaluationOrder = until(wanted, 30, "an order to evaluate")
    return found


def told(num_samples: int = 20, **changes: Any) -> SiteEvaluation:
    """An honest answer about a classifier of ten digits, or one with other sums."""
    sums = {"count": torch.tensor(20.0), "loss": torch.tensor(30.0), "confusion/confusion": 2 * torch.eye(10)}
    sums = {name: value.double() for name, value in sums.items()} | changes
    sums = {name: value for name, value in sums.items() if value is not None}
    return SiteEvaluation(num_samples, pack(Payload(torch.zeros(0), (sums,))))


KK = "confusion/confusion"
LIES: dict[str, tuple[SiteEvaluation, str]] = {
    "not packed": (SiteEvaluation(20, b"rubbish"), "cannot be read"),
    "another shape": (told(**{KK: torch.eye(9).double()}), r"is \(9, 9\) of torch.float64"),
    "another dtype": (told(**{KK: torch.eye(10)}), "of torch.float32"),
    "missing": (told(loss=None), "count, loss are due"),
    "unknown": (told(more=torch.zeros(2).double()), "more"),
    "NaN": (told(loss=torch.tensor(torch.nan).double()), "loss of the evaluation is not finite"),
    "negative": (
        told(**{KK: 2 * torch.eye(10).double() - torch.eye(10).roll(1, 0) + torch.eye(10).roll(2, 0)}),
        "no 20",
    ),
    "does not add up": (told(**{KK: 3 * torch.eye(10).double()}), "no 20 samples have such sums of confusion"),
    "two counts": (told(19), "counts 20 samples, but says 19"),
    "too many": (told(41, count=torch.tensor(41.0).double()), "on 41 samples: this client stated 40"),
    "a bomb": (
        SiteEvaluation(20, pack(Payload(torch.zeros(0), ({"x": torch.zeros(1 << 21)},)), compress=True)),
        "read",
    ),
}


def test_a_site_that_lies_is_rejected_alone(tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        honest, *liars = raw_clients = approved_raw_clients(network, 1 + len(LIES))
        network.serve("--clients", str(len(raw_clients)), "--max-samples", "50")
        for each in raw_clients:
            each.begin()
            each.ask("POST", "/v1/poll", Poll(40, 0.0, evaluates=True))
        path = f"/v1/runs/{RUN}/versions/{evaluation_order(honest).version}/evaluation"
        for liar, (lie, why) in zip(liars, LIES.values(), strict=True):
            said = liar.ask("POST", path, lie)
            assert said.status == 422 and re.search(why, said.error), (why, said)
            assert liar.ask("POST", path, told()).status == 200  # too late: the first answer counts
        assert network.status()["status"] == "running"  # it waits for the last one
        assert honest.ask("POST", path, told()).status == 200
        assert network.wait_for(RUN, 30) == "all rounds done"
        sites = sites_of(network)
        assert offences(network) == [0] + [1] * len(LIES)
        assert ["rejected" in site for site in sites["sites"]] == [False] + [True] * len(LIES)
        assert (sites["pooled"]["accuracy"], sites["pooled"]["loss"]) == (1.0, 1.5)
        assert honest.ask("POST", path, told()).status == 410


def test_a_server_that_is_killed_goes_on_with_the_answers_it_has(
    tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        first, second = approved_raw_clients(network, 2)
        server = network.serve("--clients", "2")
        for each in (first, second):
            each.begin()
            each.ask("POST", "/v1/poll", Poll(40, 0.0, evaluates=True))
        path = f"/v1/runs/{RUN}/versions/{evaluation_order(first).version}/evaluation"
        assert first.ask("POST", path, told()).status == 200
        server.signal(signal.SIGKILL)
        server.wait(30)
        network.serve(plan=False)
        assert second.ask("GET", f"/v1/runs/{RUN}").status in (0, 401)  # the connection, or the session, is gone
        assert second.begin().status == 200
        assert evaluation_order(second).version == 0
        assert second.ask("POST", path, SiteEvaluation(reason="the data are being moved")).status == 200
        assert network.wait_for(RUN, 30) == "all rounds done"
        assert [site.get("samples", site.get("reason")) for site in sites_of(network)["sites"]] == [
            20,
            "the data are being moved",
        ]
        assert offences(network) == [0, 0]


def test_an_older_client_is_not_asked_to_evaluate(tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    with federation(tmp_path / "f", processes, certs, ONLY) as network:
        old, new = approved_raw_clients(network, 2)
        network.serve("--clients", "2")
        for each in (old, new):
            each.begin()
            each.ask("POST", "/v1/poll", Poll(40, 0.0, evaluates=each is new))
        path = f"/v1/runs/{RUN}/versions/{evaluation_order(new).version}/evaluation"
        assert old.ask("POST", "/v1/poll", Poll(40, 0.0)).read(Orders).evaluations == ()
        assert new.ask("POST", path, told()).status == 200
        assert network.wait_for(RUN, 30) == "all rounds done"


@pytest.mark.slow
def test_a_run_that_reaches_its_target_is_measured_before_it_ends(
    tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    changes = {"rounds": 50, "evaluation.every": 1, "evaluation.clients_every": 40, "stop.accuracy": 0.3}
    plan = BASE.replace(changes)
    with federation(tmp_path / "f", processes, certs, plan) as network:
        network.run_to_end(NUM)
        last = network.rows()[-1]
        assert last["round"] < 40 and last["test"]["accuracy"] >= 0.3 and "clients_test" in last
        assert sites_of(network)["round"] == last["round"]
        assert network.audited().ended == "target reached"


@pytest.mark.slow
def test_clients_that_keep_parameters_measure_their_own_models(
    tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    plan = BASE.replace({"model": {"name": "mlp_2nn", "hidden": 8}, "keep": ["5.*"], "evaluation.clients_every": 3})
    with federation(tmp_path / "f", processes, certs, plan) as network:
        network.run_to_end(NUM)
        run(plan.replace({"engine": "inline"}), out=tmp_path / "alone")
        rows = [json.loads(line) for line in (tmp_path / "alone" / "metrics.jsonl").read_text().splitlines()]
        assert network.rows()[-1]["clients_test"] == pytest.approx(rows[-1]["clients_test"])
