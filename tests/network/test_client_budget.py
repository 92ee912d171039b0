"""A client's privacy over all runs and servers, and the runs that its owner agrees to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from network.test_client_agreement import PLAN, PRIVATE, One, info_of

from atoll.core.errors import RunError
from atoll.core.messages import Task, Update
from atoll.network.client.budget import Budget, Cost, Overspent
from atoll.network.client.client import Client, OwnerOutput
from atoll.network.client.consent import asked_for, every_run
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.messages import Order
from atoll.privacy.composing import as_event, as_plain, spent_together

PAID = PLAN.replace({"privacy": PRIVATE, "rounds": 3})
"""Costs 1.33 in each run, and 1.95 in two."""


def work_for(one: One, client: Client, *runs: str, attempts: int = 3) -> list[str]:
    """Ask a client for all rounds of some runs, one run after another; what it refused."""
    for run in runs:
        one.begin(info_of(one.plan, run=run))
        for attempt in range(attempts):
            one.order(attempt, run=run)
            client.step()
    return one.reasons()


def pay(budget: Budget, attempts: int, most: float | None, unit: str = "client") -> None:
    """Charge so many Gaussians of deviation 5."""
    event = as_plain(dp.SelfComposedDpEvent(dp.GaussianDpEvent(5.0), attempts))

    def cost(done: int) -> Cost:
        return Cost(attempts=attempts, done=done, unit=unit, delta=1e-5, event=event)

    budget.charge(attempts - 1, cost, most)


def test_max_epsilon_is_over_all_runs(tmp_path: Path) -> None:
    """Two runs that each spend less than the floor, and together more."""
    one = One(tmp_path, PAID, Floors(max_epsilon=1.8))
    with one.joined() as client:
        client._consent = every_run
        refused = work_for(one, client, "run", "second", "third")
    assert len(one.server.deliveries) == 3
    assert "would bring epsilon to 1.95 with what 1 other run spent" in refused[0]
    lines = [json.loads(line) for line in (tmp_path / "home" / "budget.jsonl").read_text().splitlines()]
    assert [(line["run"], line["cost"]["attempts"]) for line in lines] == [("run", 1), ("run", 2), ("run", 3)]
    assert (tmp_path / "home" / "budget.jsonl").stat().st_mode & 0o077 == 0


def test_a_run_that_was_agreed_to_stops_when_another_has_spent_the_rest(tmp_path: Path) -> None:
    one = One(tmp_path, PAID, Floors(max_epsilon=1.8))
    with one.joined() as client:
        client._consent = every_run
        work_for(one, client, "run", "second", attempts=1)
        for attempt in (1, 2, 3, 4, 5):
            for run in ("run", "second"):
                one.order(attempt, run=run)
                client.step()
    charged = Budget(tmp_path / "home" / "budget.jsonl", "", "")._read()
    epsilon, _ = spent_together([as_event(cost.event) for cost in charged.values()], 1e-5)
    assert 1.7 < epsilon <= 1.8
    assert len(one.server.deliveries) == sum(cost.attempts for cost in charged.values()) == 5


def test_what_was_spent_is_on_disk_before_work_and_is_charged_once(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    budget = Budget(path, "server", "run")
    for attempts in (1, 2, 2, 1):
        pay(budget, attempts, None)
    assert len(path.read_bytes().splitlines()) == 2
    with path.open("ab") as file:
        file.write(b'{"server": "cut')
    pay(Budget(path, "server", "run"), 3, 2.0)
    assert [json.loads(line)["cost"]["attempts"] for line in path.read_bytes().splitlines()] == [1, 2, 3]
    path.write_bytes(b"nonsense\n")
    with pytest.raises(RunError, match="damaged"):
        pay(budget, 4, 2.0)


def test_homes_share_a_file_and_servers_with_equal_names_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    for server in ("a", "b"):
        pay(Budget(path, server, "run"), 3, 2.5)
    with pytest.raises(Overspent, match="with what 2 other runs spent"):
        pay(Budget(path, "c", "run"), 6, 2.5)


def test_runs_that_protect_others_cannot_be_added_up(tmp_path: Path) -> None:
    path = tmp_path / "budget.jsonl"
    pay(Budget(path, "a", "one"), 1, 2.0)
    with pytest.raises(Overspent, match="protects each sample"):
        pay(Budget(path, "a", "two"), 1, 2.0, unit="sample")
    pay(Budget(path, "a", "two"), 1, None, unit="sample")


def test_events_of_all_kinds_are_composed_and_not_their_epsilons() -> None:
    sampled = dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(1.0)), 100)
    plain = dp.SelfComposedDpEvent(dp.GaussianDpEvent(5.0), 4)
    tree = dp.ComposedDpEvent([dp.SingleEpochTreeAggregationDpEvent(6.0, 10)])
    for event in (sampled, plain, tree):
        assert as_event(json.loads(json.dumps(as_plain(event)))) == event
    alone = [spent_together([event], 1e-5)[0] for event in (sampled, plain, tree)]
    both, accountant = spent_together([sampled, plain], 1e-5)
    assert accountant == "pld"
    assert max(alone) < both < 0.9 * (alone[0] + alone[1])
    all_three, accountant = spent_together([sampled, plain, tree], 1e-5)
    assert accountant == "rdp"
    assert both < all_three < sum(alone)
    gaussians = [dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), 3), dp.GaussianDpEvent(2.0)]
    exact = dp.get_epsilon_gaussian((3 / 16 + 1 / 4) ** -0.5, 1e-5)
    assert spent_together(gaussians, 1e-5)[0] == pytest.approx(exact, rel=2e-3)
    assert spent_together([], 1e-5) == (0.0, "rdp")


@pytest.mark.parametrize(
    ("consent", "agreed", "says"),
    [
        (asked_for(), ["run"], "has not agreed to run second: join with --runs second, or with --all-runs"),
        (asked_for(["second"]), ["second"], "has not agreed to run run"),
        (asked_for(ask=lambda question: "second" not in question), ["run"], "does not agree to run second"),
        (asked_for(ask=lambda question: True), ["run", "second"], ""),
        (every_run, ["run", "second"], ""),
    ],
)
def test_a_client_takes_part_in_runs_that_its_owner_agreed_to(
    tmp_path: Path, consent: Any, agreed: list[str], says: str
) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        client._consent = consent
        refused = work_for(one, client, "run", "second", attempts=2)
        assert one.home.runs() == agreed
    assert len(one.server.deliveries) == 2 * len(agreed)
    assert [reason for reason in refused if says not in reason] == []
    assert bool(refused) == bool(says)


def test_what_was_agreed_to_holds_when_the_client_is_started_again(tmp_path: Path) -> None:
    one = One(tmp_path)
    with one.joined() as client:
        work_for(one, client, "run", attempts=1)
        output = OwnerOutput(lambda text: None, one.said.append)
        again = Client(one.app, one.home, client._connection, output, consent=asked_for(["other"]))
        one.order(1, run="run")
        again.step()
    assert len(one.server.deliveries) == 2
    assert not one.reasons()


@pytest.mark.parametrize(
    ("privacy", "says"),
    [
        ({**PRIVATE, "name": "sample", "delta": 0.009}, "set it below"),
        ({"name": "proportional", "noise": 0.5, "epsilon": 1.0, "delta": 1e-5}, "whose length nothing protects"),
    ],
)
def test_epsilons_that_mean_nothing_are_refused(tmp_path: Path, privacy: dict[str, Any], says: str) -> None:
    one = One(tmp_path, PLAN.replace({"privacy": privacy}), Floors(max_epsilon=5.0))
    with one.joined(info_of(one.plan, num_clients=20)) as client:
        one.server.orders[0] = [Order("run", 0, 0, one.server.put(b"nothing"))]
        client.step()
    assert says in one.reasons()[0]


def test_a_server_that_asks_out_of_turn_is_charged_for_each_time(tmp_path: Path) -> None:
    """In turn, one of five clients a round, a client may be asked once in five attempts, and not five times."""
    plan = PLAN.replace({"privacy": PRIVATE, "rounds": 5, "sampler": "round_robin", "policy": {"size": 1}})
    one = One(tmp_path, plan, Floors(max_epsilon=1.2))
    with one.joined() as client:
        refused = work_for(one, client, "run", attempts=5)
    assert len(one.server.deliveries) == 2  # of which each costs as much as five rounds should
    assert "would bring epsilon to 1.33" in refused[0]


@pytest.mark.parametrize(("privacy", "told"), [(None, True), (PRIVATE, False), ({**PRIVATE, "name": "sample"}, False)])
def test_a_loss_that_is_no_number_is_only_told_where_nothing_is_protected(
    tmp_path: Path, privacy: dict[str, Any] | None, told: bool
) -> None:
    work = One(tmp_path, PLAN.replace({"privacy": privacy})).work
    zeros = Update(torch.zeros(1, work.job.spec.num_params), torch.ones(1), {})
    task = Task(0, 0, 0)
    assert work._is_usable(task, zeros, math.nan) != told
    assert work._is_usable(task, zeros, 1.0)
    assert not work._is_usable(task, zeros._replace(delta_D=zeros.delta_D + math.inf), 1.0)
