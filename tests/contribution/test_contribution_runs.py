"""Contributions in real runs: against reference values, the axioms, all engines, and refused plans."""

from __future__ import annotations

import json
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_end, timeless
from members import every
from torch import nn
from torch.func import functional_call

from atoll.api import Result, run
from atoll.commit.contribution import WORST, Before, coalition_model, shares_of
from atoll.core.aggregator import rows_of
from atoll.core.attack import Attack, Knowledge
from atoll.core.contribution import Contribution, Game
from atoll.core.errors import PlanError
from atoll.core.messages import SERVER, Broadcast, Task, Update
from atoll.core.parts import Part, examples
from atoll.core.plan import Plan
from atoll.engine.inline import inline
from atoll.report.contribution_picture import contribution_picture
from atoll.report.html import write_report
from atoll.report.reading import contributions, read_run
from atoll.train.build import build_job
from atoll.train.job import Job
from atoll.train.trainer import Trainer

BASE: dict[str, Any] = {
    "rounds": 2,
    "partition": {"name": "dirichlet", "num_clients": 5, "alpha": 0.5},
    "model": {"name": "mlp_2nn", "hidden": 16},
    "local": {"lr": 0.1},
    "server": {"samples": 100},
    "evaluation": {"every": 0},
    "engine": "inline",
}


def plan_with(contribution: Any, **changes: Any) -> Plan:
    if isinstance(contribution, str):
        contribution = Part(contribution, **examples("contribution", contribution)[0])
    return Plan(**{**BASE, "contribution": contribution, **changes})


def first_round(plan: Plan) -> tuple[Job, Update, list[int]]:
    """A job, and the updates of all its clients in the first round, in the order of their training."""
    job = build_job(plan)
    work = inline(job).train([Task(client, 0, 0) for client in range(job.federation.num_clients)], start(job), {})
    return job, rows_of(work.folded), [report.client for report in work.reports]


def start(job: Job) -> dict[int, Broadcast]:
    return {0: Broadcast(job.first_D, {})}


def before(job: Job) -> Before:
    params_D = job.first_D
    server, rule = job.algorithm.init_server(params_D), job.aggregator.init()
    return Before(params_D, server, rule, None, 0, job.federation.num_clients)


def own_loss(job: Job, params_D: Any) -> float:
    """The mean loss on the server's samples, in one pass and by torch's own function."""
    indices = torch.from_numpy(job.federation.train_indices(SERVER))
    x, y = job.federation.features(job.federation.train_x[indices]), job.federation.train_y[indices]
    with torch.no_grad():
        outputs = functional_call(job.model.eval(), job.spec.views(params_D), (x,))
    return float(nn.functional.cross_entropy(outputs, y))


@cache
def by_hand() -> tuple[dict[int, float], dict[int, float]]:
    """Leave-one-out and Shapley values of a first round of FedAvg, from weighted means and all 120 orders."""
    job, updates, clients = first_round(plan_with("shapley"))

    @cache
    def value(some: frozenset[int]) -> float:
        if not some:
            return -own_loss(job, job.first_D)
        pick = [place for place, client in enumerate(clients) if client in some]
        weight = updates.weight[pick] / updates.weight[pick].sum()
        return -own_loss(job, job.first_D + (weight[:, None] * updates.delta_D[pick]).sum(0))

    all_clients, sums = frozenset(clients), dict.fromkeys(clients, 0.0)
    for order in permutations(clients):
        for place, client in enumerate(order):
            sums[client] += value(frozenset(order[: place + 1])) - value(frozenset(order[:place]))
    missed = {client: value(all_clients) - value(all_clients - {client}) for client in clients}
    return missed, {client: total / 120 for client, total in sums.items()}


def test_leave_one_out_and_shapley_by_hand() -> None:
    missed, shapley = by_hand()
    assert len(set(clients := first_round(plan_with("shapley"))[2])) == 5 and clients != sorted(clients)
    for name, want in (("leave_one_out", missed), ("shapley", shapley)):
        result = run(plan_with(name, rounds=1))
        entry = result.history[0]["contribution"]
        assert entry["evaluations"] == {"leave_one_out": 6, "shapley": 32}[name]
        assert {int(client): share for client, share in entry["clients"].items()} == pytest.approx(want, abs=2e-5)
        assert result.contribution == pytest.approx(want, abs=2e-5)


def test_the_servers_samples_are_scored_as_by_hand() -> None:
    """More of them than are measured at once."""
    job = build_job(plan_with("shapley", server={"samples": 1200}))
    indices = torch.from_numpy(job.federation.train_indices(SERVER))
    x, y = job.federation.features(job.federation.train_x[indices]), job.federation.train_y[indices]
    right = functional_call(job.model.eval(), job.spec.views(job.first_D), (x,)).argmax(-1) == y
    accuracy, loss = Trainer(job).own_scores(job.first_D)
    assert len(y) == 1200 and accuracy == pytest.approx(float(right.double().mean()), abs=1e-12)
    assert loss == pytest.approx(own_loss(job, job.first_D), rel=1e-6)


def worth(result: Result, params_D: Any, utility: str) -> float:
    accuracy, loss = Trainer(build_job(result.plan)).own_scores(params_D)
    return accuracy if utility == "accuracy" else -loss


SERVERS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavgm": {"algorithm": "fedavgm"},
    "fedadam": {"algorithm": "fedadam"},
    "scaffold": {"algorithm": "scaffold"},
    "median": {"aggregator": "median"},
    "trimmed mean": {"aggregator": {"name": "trimmed_mean", "f": 1}},
    "fltrust": {"aggregator": "fltrust"},
    "centered clipping": {"aggregator": {"name": "centered_clipping", "tau": 1.0}},
    "bucketing": {"aggregator": {"name": "bucketing", "size": 2, "rule": "median"}},
    "krum": {"aggregator": {"name": "krum", "f": 1}},
    "feddf": {
        "algorithm": {"name": "feddf", "steps": 2},
        "public": {"name": "held_out", "fraction": 0.1},
        "partition": {"num_clients": 3},
    },
    "codec": {"uplink": [{"name": "top_k", "fraction": 0.1}]},
}


@pytest.mark.parametrize(("server", "utility"), [*((name, "loss") for name in SERVERS), ("fedavg", "accuracy")])
def test_shares_add_up_to_what_the_run_gained(server: str, utility: str) -> None:
    """For any rule and server step: each round starts from the model of the previous one."""
    result = run(plan_with({"name": "shapley", "utility": utility}, **SERVERS[server]))
    first_D = build_job(result.plan).first_D
    gained = worth(result, result.params_D, utility) - worth(result, first_D, utility)
    assert sum(result.contribution.values()) == pytest.approx(gained, abs=1e-6)
    assert abs(gained) > 1e-3
    sums = {
        client: sum(row["contribution"]["clients"][str(client)] for row in result.history)
        for client in result.contribution
    }
    assert dict(result.contribution) == sums


def test_equal_updates_are_worth_the_same() -> None:
    """Of three clients with as many samples each, the second sends what the first sends."""
    attack = {"attack": {"name": "mimic", "row": 0}, "attackers": {"clients": [1]}}
    plan = plan_with("shapley", partition={"num_clients": 3}, **attack)
    assert {build_job(plan).federation.num_samples(client) for client in range(3)} == {479}
    found = run(plan).contribution
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert abs(found[2] - found[1]) > 1e-2


def weightless() -> Attack:
    """Send an honest update that claims no samples: the mean does not see it."""

    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(weight=0 * honest.weight)

    return Attack(update=update)


@pytest.mark.parametrize("name", every("contribution"))
def test_who_has_no_weight_adds_nothing(name: str) -> None:
    result = run(plan_with(name, attack=Part(weightless), attackers={"clients": [3]}))
    assert result.contribution[3] == pytest.approx(0.0, abs=1e-5)
    assert min(abs(result.contribution[client]) for client in (0, 1, 2, 4)) > 1e-3


def test_a_coalition_too_small_for_the_rule_leaves_the_model_unchanged() -> None:
    job, updates, _ = first_round(plan_with("shapley", aggregator={"name": "krum", "f": 1}))
    start_D = before(job).params_D
    for num in range(6):
        model_D = coalition_model(job, before(job), updates.rows(torch.arange(5) < num))
        assert torch.equal(model_D, start_D) == (num < 5)


def test_the_order_of_training_does_not_matter() -> None:
    job, updates, clients = first_round(plan_with("shapley"))
    scores = Trainer(job).own_scores
    order = [3, 1, 4, 0, 2]
    for name in every("contribution"):
        how: Contribution = Part(name, **examples("contribution", name)[0]).build("contribution")
        one = shares_of(job, how, before(job), clients, updates, scores)
        other = shares_of(job, how, before(job), [clients[i] for i in order], updates.rows(torch.tensor(order)), scores)
        assert other.clients == pytest.approx(one.clients, abs=1e-6) and other.evaluations == one.evaluations


def test_an_exploded_model_spoils_no_sum() -> None:
    job, updates, clients = first_round(plan_with("shapley"))
    wild = updates._replace(delta_D=updates.delta_D.clone())
    wild.delta_D[2] = 1e38
    found = shares_of(job, Part("shapley").build("contribution"), before(job), clients, wild, Trainer(job).own_scores)
    assert all(np.isfinite(share) for share in found.clients.values())
    assert min(found.clients, key=found.clients.__getitem__) == clients[2]
    assert found.clients[clients[2]] == pytest.approx(-WORST, rel=1e-3)


def test_measuring_contributions_changes_nothing() -> None:
    for aggregator in ("mean", "median"):
        looked = run(plan_with("shapley", aggregator=aggregator))
        plain = run(plan_with(None, aggregator=aggregator, server={}))
        assert torch.allclose(looked.params_D, plain.params_D, atol=1e-6)
        assert plain.contribution == {} and "contribution" not in plain.history[0]


HONEST: dict[str, Any] = {"rounds": 4, "partition": {"num_clients": 8}, "server": {"samples": 200}}
FLIPPED: dict[str, Any] = {
    **HONEST,
    "partition": {"name": "dirichlet", "num_clients": 8, "alpha": 0.5},
    "attack": "label_flip",
    "attackers": {"clients": [2, 6]},
}


@cache
def exact(flipped: bool) -> Result:
    return run(plan_with("shapley", **(FLIPPED if flipped else HONEST)))


@pytest.mark.parametrize(
    ("name", "flipped", "truncate", "error", "cost"),
    [
        ("gtg_shapley", True, 0.001, 0.15, 0.95),  # clients differ much, and hardly an order is cut
        pytest.param("tmc_shapley", True, 0.001, 0.15, 1.0, marks=pytest.mark.slow),
        ("gtg_shapley", False, 0.001, 0.15, 0.6),
        pytest.param("tmc_shapley", False, 0.001, 0.15, 0.9, marks=pytest.mark.slow),
        pytest.param(
            "gtg_shapley", False, 0.01, 0.3, 0.15, marks=pytest.mark.slow
        ),  # the first client brings nearly all of the gain
        ("tmc_shapley", False, 0.01, 0.3, 0.15),
    ],
)
def test_sampled_shares_are_close_to_exact_and_cost_less(
    name: str, flipped: bool, truncate: float, error: float, cost: float
) -> None:
    """The error is the sum of all differences as a share of the sum of all sizes; exact takes 256 models a round."""
    settings = FLIPPED if flipped else HONEST
    found, want = run(plan_with({"name": name, "truncate": truncate}, **settings)), exact(flipped)
    size = sum(abs(share) for share in want.contribution.values())
    assert sum(abs(found.contribution[c] - share) for c, share in want.contribution.items()) < error * size
    assert all(row["contribution"]["evaluations"] == 256 for row in want.history)
    assert sum(row["contribution"]["evaluations"] for row in found.history) < cost * 4 * 256
    lost = abs(sum(found.contribution.values()) - sum(want.contribution.values()))
    assert lost <= 4 * truncate  # an order that is cut loses less than `truncate`
    if flipped:
        assert min(found.contribution, key=found.contribution.__getitem__) == 6


@pytest.mark.parametrize("attack", ["label_flip", pytest.param("free_rider", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", every("contribution"))
def test_bad_clients_come_out_lowest(name: str, attack: str) -> None:
    plan = plan_with(name, rounds=3, partition={"num_clients": 6}, attack=attack, attackers={"clients": [2, 5]})
    totals = run(plan).contribution
    assert set(sorted(totals, key=lambda client: totals[client])[:2]) == {2, 5}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (place % 2)) for place, name in enumerate(every("contribution"))],
)
def test_resume_and_workers_change_nothing(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 4, "partition": {"num_clients": 8}, "policy": {"size": 4}}
    plan = plan_with(name, **settings, evaluation={"clients_every": 1})
    whole = run(plan, out=tmp_path / "whole", report=False)
    run(plan.replace({"rounds": 2}), out=tmp_path / "stopped", report=False)
    again = run(plan, out=tmp_path / "stopped", report=False, resume=True)
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")
    assert again.contribution == whole.contribution
    results = [json.loads((tmp_path / where / "result.json").read_text()) for where in ("whole", "stopped")]
    assert results[0]["contribution"] == results[1]["contribution"]
    assert results[0]["contribution"] == {str(c): whole.contribution[c] for c in sorted(whole.contribution)}
    farmed = [run(plan.replace({"engine": {"name": "processes", "workers": n, "stack": 2}})) for n in (1, 2)]
    assert timeless(farmed[0].history) == timeless(farmed[1].history)
    assert farmed[0].contribution == farmed[1].contribution
    stacked = run(plan.replace({"engine": {"name": "vectorised", "stack": 4}}))
    for other in (farmed[0], stacked):
        assert other.contribution == pytest.approx(whole.contribution, abs=1e-4)


def test_a_quarantined_client_gets_nothing() -> None:
    strict = {"name": "cosine", "decay": 0.0}
    attack = {"attack": {"name": "sign_flip", "scale": 1.0}, "attackers": {"clients": [2]}}
    plan = plan_with("shapley", partition={"num_clients": 6}, detection=strict, **attack)
    result = run(plan)
    assert result.history[0]["detection"]["quarantined"] == [2]
    assert set(result.contribution) == {0, 1, 3, 4, 5}


def my_way(power: float = 1.0) -> Contribution:
    """All get the same."""

    def values(game: Game, rng: np.random.Generator) -> np.ndarray:
        return np.full(game.num_clients, game.value(game.all_clients) / game.num_clients**power)

    return Contribution(values, "accuracy")


def test_a_contribution_rule_of_the_user() -> None:
    result = run(plan_with(Part(my_way), rounds=1))
    assert result.history[0]["contribution"]["evaluations"] == 1
    assert sum(result.contribution.values()) == pytest.approx(worth(result, result.params_D, "accuracy"))


def test_what_cannot_be_is_refused_with_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"set server\.samples"):
        build_job(plan_with("shapley", server={}))
    with pytest.raises(PlanError, match=r'contribution compares .* use policy = "cohort"'):
        build_job(plan_with("gtg_shapley", policy={"name": "buffered", "size": 2}))
    with pytest.raises(PlanError, match="clients of fedmd keep their own"):
        build_job(plan_with("gtg_shapley", algorithm="fedmd", public={"name": "held_out", "fraction": 0.1}))
    eleven = {"partition": {"num_clients": 11}}
    with pytest.raises(PlanError, match=r"at most 10 clients, but a round may have 11: use gtg_shapley"):
        build_job(plan_with("shapley", **eleven))
    with pytest.raises(PlanError, match="a round may have 11"):
        build_job(plan_with("shapley", **eleven, policy={"size": 4}, sampler="poisson"))
    build_job(plan_with("shapley", **eleven, policy={"size": 10}))
    build_job(plan_with("gtg_shapley", **eleven))
    with pytest.raises(PlanError, match="there is no 'shapely' in contribution"):
        build_job(plan_with("shapely"))


def test_the_report_draws_what_each_client_added(tmp_path: Path) -> None:
    settings = {"attack": "label_flip", "attackers": {"clients": [1]}, "partition": {"num_clients": 5}}
    run(plan_with("leave_one_out", **settings), out=tmp_path / "run", report=False)
    page = write_report([tmp_path / "run"]).read_text()
    assert "Contribution of each client" in page and "fall of the loss on 100 samples" in page
    record = read_run(tmp_path / "run")
    [panel] = contribution_picture(record).axes
    totals = json.loads((tmp_path / "run/result.json").read_text())["contribution"]
    assert contributions(record) == pytest.approx(totals)
    names = [tick.get_text() for tick in panel.get_xticklabels()]
    assert names == sorted(totals, key=totals.__getitem__) and names[0] == "1"
    assert [bar.get_height() for bar in panel.patches] == pytest.approx([totals[name] for name in names])
    assert [bar.get_facecolor() for bar in panel.patches].count(panel.patches[0].get_facecolor()) == sum(
        share < 0 for share in totals.values()
    )
