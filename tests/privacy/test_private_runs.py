"""Tests of whole private runs: sensitivity, published numbers, budgets, and resuming."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rows
from privacy.watching import CHANGED, watching

from atoll import Plan, run
from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import NOT_PRIVATE, guarded
from atoll.core.algorithm import Algorithm
from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Aggregate
from atoll.core.parts import Part
from atoll.core.sampler import Population
from atoll.privacy.ledger import NAME, Ledger
from atoll.train.build import build_job
from atoll.train.federation import build_federation

CENTRAL: dict[str, Any] = {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-3}
ALL: dict[str, dict[str, Any]] = {
    "central": {"sampler": "poisson", "privacy": CENTRAL},
    "adaptive": {"sampler": "poisson", "privacy": {**CENTRAL, "quantile": 0.5, "bit_sigma": 2.0}},
    "ftrl": {"sampler": "round_robin", "privacy": {**CENTRAL, "name": "ftrl"}},
    "local": {"sampler": "uniform", "privacy": {**CENTRAL, "name": "local"}},
    "distributed": {"sampler": "round_robin", "privacy": {**CENTRAL, "name": "distributed", "dropouts": 1}},
}
TEST_NOISE = {"privacy.test_noise": True}


def plan_of(kind: str = "central", **changes: Any) -> Plan:
    base = {
        "partition": {"name": "iid", "num_clients": 30},
        "policy": {"size": 6},
        "local": {"steps": 2, "batch_size": 8},
        "rounds": 5,
        "engine": "inline",
    }
    return Plan(**{**base, **ALL[kind], **changes})


# ---- what one client can move


def recorded(seen: list[Aggregate], name: str) -> Callable[[], Algorithm]:
    """Return an algorithm that records releases and keeps its model."""

    def noted() -> Algorithm:
        def server_step(params_D: Any, aggregate: Aggregate, server: Any, task: Any) -> Any:
            seen.append(aggregate)
            return params_D, server

        built: Algorithm = Part(name).build("algorithms")
        return built._replace(server_step=server_step)

    return noted


def released(name: str, privacy: dict[str, Any], bad: float | None, **changes: Any) -> torch.Tensor:
    """All that rounds release if client 3 sends an update full of one number, or does what it should, (T, V)."""
    attack = {"attack": {"name": "privacy.watching:broken", "value": bad}, "attackers": {"clients": [3]}}
    seen: list[Aggregate] = []
    plan = plan_of(
        algorithm=recorded(seen, name),
        sampler={"name": "poisson", "rate": 1.0},
        privacy={**CENTRAL, "test_noise": True, **privacy},
        rounds=2,
        **({} if bad is None else attack),
        **changes,
    )
    run(plan)  # whose first step is a rehearsal
    return torch.stack([torch.cat([a.delta_D, *(v.flatten() for v in a.aux.values())]).double() for a in seen[1:]])


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
@pytest.mark.parametrize("bad", [1e6, -1e-3, math.nan, math.inf])
def test_one_client_moves_what_is_released_by_no_more_than_the_clip(name: str, bad: float) -> None:
    """The noise is the same in both runs, so that what is left is the one client's part, in all vectors together."""
    moved_T = (released(name, {}, bad) - released(name, {}, None)).norm(dim=1)
    most = 2 * CENTRAL["clip"] / 30  # one update for another
    assert float(moved_T.max()) <= most * (1 + 1e-5)
    assert float(moved_T.min()) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy": {"per_layer": True}},
        {"uplink": ["quantise"]},
        {"uplink": [{"name": "top_k", "fraction": 0.1, "error_feedback": True}]},
        {"partition": {"name": "quantity", "num_clients": 30}},
        {"server": {"lr": 2.0}},
    ],
)
def test_layers_codecs_and_sizes_do_not_raise_the_sensitivity(changes: dict[str, Any]) -> None:
    privacy = changes.pop("privacy", {})
    moved_T = (released("fedavg", privacy, 1e3, **changes) - released("fedavg", privacy, None, **changes)).norm(dim=1)
    assert 0 < float(moved_T.max()) <= 2 * CENTRAL["clip"] / 30 * (1 + 1e-5)


def test_an_adaptive_clip_moves_towards_the_quantile() -> None:
    """Clients send updates of length 1; of the first clip, far above, all are within, and it falls."""
    seen: list[Aggregate] = []

    def unit(delta_D: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(delta_D) / math.sqrt(delta_D.numel())

    plan = plan_of(
        algorithm=watching(seen, unit),
        policy={"size": 30},
        privacy={**CENTRAL, "clip": 8.0, "sigma": 0.01, "quantile": 0.5, "bit_sigma": 0.5, "clip_lr": 0.3},
        local={"steps": 1},
        engine={"name": "vectorised", "stack": 30},
        evaluation={"every": 0},
        rounds=40,
    )
    run(plan)
    del seen[0]  # the rehearsal
    lengths = [float(aggregate.delta_D.norm()) for aggregate in seen]
    assert lengths[0] == pytest.approx(1, rel=0.1)  # the noise is small beside it
    assert lengths[-1] == pytest.approx(1, rel=0.25)  # the clip has come to 1 and stays there
    late = [float(aggregate.delta_D.std()) for aggregate in seen[-10:]]
    assert np.mean(late) < 0.2 * float(seen[0].delta_D.std())  # with it the noise, which is in proportion


# ---- what is told


@pytest.mark.parametrize("kind", ALL)
def test_only_numbers_that_the_guarantee_covers_are_published(tmp_path: Path, kind: str) -> None:
    result = run(plan_of(kind), out=tmp_path / "run", report=False)
    hidden = {"train_loss", "samples", "samples_trained"}
    always = {"round", "privacy", "round_seconds", "seconds", "test"}
    counts = {"clients", "bytes_up", "bytes_down", "failed", "rejected", "abandoned"}
    for row in result.history:
        assert not hidden & set(row)
        assert set(row) == (always if kind in ("central", "adaptive") else always | counts)
        assert set(row["privacy"]) == {"epsilon", "delta", "unit", "relation", "accountant"}
    spent = [row["privacy"]["epsilon"] for row in result.history]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert not (tmp_path / "run" / "partition.json").exists()
    stated = json.loads((tmp_path / "run" / "run.json").read_text())["privacy"]
    assert stated["unit"] == "client"
    assert "client" in stated["neighbours"]
    assert len(stated["assumptions"]) > 2
    assert (tmp_path / "run" / NAME).stat().st_mode & 0o777 == 0o600


def test_test_noise_is_marked_everywhere(tmp_path: Path) -> None:
    result = run(plan_of().replace(TEST_NOISE), out=tmp_path / "run", report=False)
    assert all(row["privacy"]["warning"] == NOT_PRIVATE for row in result.history)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["privacy"]["warning"] == NOT_PRIVATE


def test_the_cohort_depends_on_the_secret_not_on_the_seed() -> None:
    plan = plan_of()

    def cohorts(secret: bytes | None) -> list[tuple[int, ...]]:
        federation = build_federation(plan)
        job = build_job(plan, federation, secret=secret)
        _, coordinator, _ = guarded(plan, job, build_coordinator(plan, federation), Ledger(job.secret))
        everyone = Population(30, lambda client: True, lambda: np.ones(30), {}, 0)
        assert coordinator.secret_rng is not None
        return [
            tuple(pick.client for pick in coordinator.sampler.sample(coordinator.secret_rng(attempt), 6, everyone))
            for attempt in range(30)
        ]

    assert cohorts(bytes(32)) == cohorts(bytes(32))
    assert cohorts(None) != cohorts(None)
    sizes = [len(cohort) for cohort in cohorts(bytes(32))]
    assert len(set(sizes)) > 3


# ---- when it stops, and odd cohorts


def test_a_run_stops_before_the_round_that_would_exceed_its_budget() -> None:
    free = run(plan_of(rounds=12)).history
    budget = free[6]["privacy"]["epsilon"] + 1e-5
    result = run(plan_of(rounds=12, evaluation={"every": 5}, privacy={**CENTRAL, "epsilon": budget}))
    assert result.reason == "privacy budget spent"
    assert [row["round"] for row in result.history] == list(range(1, 8))
    assert result.history[-1]["privacy"]["epsilon"] <= budget < free[7]["privacy"]["epsilon"]
    assert "test" in result.history[-1]  # although the last round was not known before


def test_a_budget_below_one_round_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not pay for one round"):
        run(plan_of(privacy={**CENTRAL, "epsilon": 0.01}), out=tmp_path / "run", report=False)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_budget(tmp_path: Path) -> None:
    budget = run(plan_of(rounds=4)).history[3]["privacy"]["epsilon"] + 1e-5
    plan = plan_of(rounds=3, privacy={**CENTRAL, "epsilon": budget})
    run(plan, out=tmp_path / "run", report=False)
    result = run(plan.replace({"rounds": 50}), out=tmp_path / "run", report=False, resume=True)
    assert result.reason == "privacy budget spent"
    assert result.history[-1]["round"] == 4


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_an_empty_cohort_releases_noise(algorithm: str) -> None:
    plan = plan_of(sampler={"name": "poisson", "rate": 1e-6}, algorithm=algorithm, rounds=3)
    result = run(plan)
    assert [row["round"] for row in result.history] == [1, 2, 3]
    assert (result.params_D - build_job(plan).first_D).abs().min() > 0


@pytest.mark.parametrize(
    ("kind", "bad"),  # under local, a bad client sends what it likes after its own noise: a robust rule is for that
    [(kind, bad) for kind in ALL for bad in (math.nan, math.inf, 0.0, 3e38) if kind != "local" or bad == 0],
)
def test_bad_updates_of_all_clients_do_not_end_a_run(kind: str, bad: float) -> None:
    attack = {"attack": {"name": "privacy.watching:broken", "value": bad}, "attackers": {"fraction": 1.0}}
    result = run(plan_of(kind, rounds=2, **attack))
    assert result.params_D.isfinite().all()
    assert len(result.history) == 2


def test_too_many_drop_outs_release_nothing() -> None:
    plan = plan_of("distributed", devices="privacy.test_releases:losing", sampler="uniform")
    result = run(plan)  # three of six are lost, one may be
    assert result.history == []
    assert result.reason.startswith("gave up")


# ---- engines, and going on


@pytest.mark.parametrize("kind", ALL)
def test_workers_do_not_change_the_result(kind: str) -> None:
    plan = plan_of(kind, rounds=2).replace(TEST_NOISE)
    ends = [
        run(plan.replace({"engine": {"name": "processes", "stack": 2, "workers": workers}})).params_D
        for workers in (1, 2)
    ]
    assert torch.equal(*ends)
    one_by_one = run(plan).params_D
    assert torch.allclose(one_by_one, ends[0], atol=1e-4)


@pytest.mark.parametrize("kind", ALL)
def test_a_resumed_run_has_the_same_result(tmp_path: Path, kind: str) -> None:
    """Two copies of one stopped run go on, one of them from its last checkpoint and one from nothing but its ledger."""
    plan = plan_of(kind, rounds=3)
    run(plan, out=tmp_path / "one", report=False)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    (tmp_path / "other" / "checkpoint.safetensors").unlink()
    longer = plan.replace({"rounds": 5})
    ends = [run(longer, out=tmp_path / name, report=False, resume=True) for name in ("one", "other")]
    assert torch.equal(ends[0].params_D, ends[1].params_D)
    assert rows(tmp_path / "one") == rows(tmp_path / "other")
    assert (tmp_path / "one" / NAME).read_bytes() == (tmp_path / "other" / NAME).read_bytes()
    assert Ledger.read(tmp_path / "one" / NAME, plan.identity()).num_charged == 5


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    run(plan_of(data="privacy.watching:changing", rounds=3), out=tmp_path / "run", report=False)
    return tmp_path / "run"


def go_on(path: Path, **changes: Any) -> None:
    plan = plan_of(data="privacy.watching:changing", rounds=5).replace(changes)
    run(plan, out=path, report=False, resume=True)


def test_a_resumed_run_cannot_change_its_privacy(stopped: Path) -> None:
    for changes in ({"privacy.sigma": 0.5}, {"privacy.epsilon": 100.0}, {"privacy.test_noise": True}):
        with pytest.raises(RunError, match="other privacy settings"):
            go_on(stopped, **changes)
    go_on(stopped)


def test_a_missing_ledger_is_refused(stopped: Path) -> None:
    (stopped / NAME).unlink()
    for _ in range(2):
        with pytest.raises(RunError, match="is gone"):
            go_on(stopped)
        (stopped / "checkpoint.safetensors").unlink(missing_ok=True)


def test_a_ledger_that_was_rolled_back_is_refused(stopped: Path) -> None:
    lines = (stopped / NAME).read_bytes().splitlines(keepends=True)
    (stopped / NAME).write_bytes(b"".join(lines[:-1]))
    with pytest.raises(RunError, match="rolled back"):
        go_on(stopped)
    (stopped / NAME).write_bytes(b"".join(lines))
    go_on(stopped)


def test_another_runs_ledger_or_checkpoint_is_refused(stopped: Path, tmp_path: Path) -> None:
    run(plan_of(data="privacy.watching:changing", rounds=3), out=tmp_path / "twin", report=False)
    own = (stopped / NAME).read_bytes()
    shutil.copy(tmp_path / "twin" / NAME, stopped / NAME)
    with pytest.raises(RunError, match="not the one that this run began with"):
        go_on(stopped)
    (stopped / NAME).write_bytes(own)
    shutil.copy(tmp_path / "twin" / "checkpoint.safetensors", stopped / "checkpoint.safetensors")
    with pytest.raises(RunError, match="another"):
        go_on(stopped)


def test_the_same_noise_is_never_added_to_other_data(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stopped / "checkpoint.safetensors").unlink()
    monkeypatch.setitem(CHANGED, "now", True)
    with pytest.raises(RunError, match="other updates than it has now"):
        go_on(stopped)
    monkeypatch.setitem(CHANGED, "now", False)
    go_on(stopped)


def test_a_cut_line_was_never_charged_and_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    ledger = Ledger.begin(bytes(range(32)), "plan", path)
    for attempt in range(3):
        ledger.charge(attempt, [b"sum", bytes([attempt])])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    again = Ledger.read(path, "plan")
    assert (again.num_charged, again.secret) == (2, bytes(range(32)))
    again.charge(2, [b"sum", b"\2"])
    assert path.read_bytes() == whole
    with pytest.raises(RunError, match="belongs to another plan"):
        Ledger.read(path, "other")
    path.write_bytes(whole.replace(b'"attempt": 1', b'"attempt": 9'))
    with pytest.raises(RunError, match="damaged"):
        Ledger.read(path, "plan")
    path.write_bytes(b"")
    with pytest.raises(RunError, match="damaged"):
        Ledger.read(path, "plan")


def test_an_attempt_is_charged_once_and_its_sum_is_kept() -> None:
    ledger = Ledger(bytes(32))
    ledger.charge(0)
    ledger.charge(0, [b"one"])
    ledger.charge(0)
    ledger.charge(0, [b"one"])
    assert ledger.num_charged == 1
    with pytest.raises(RunError, match="other updates"):
        ledger.charge(0, [b"two"])
    with pytest.raises(RunError, match="rolled back"):
        ledger.charge(2)


def test_devices_that_fail_or_are_late_count_as_nothing() -> None:
    """A fleet loses some of every cohort; every round is released all the same, at the same price."""
    fleet = {"name": "fleet", "dropout": 0.3}
    result = run(plan_of(devices=fleet, policy={"size": 6, "deadline": 30.0}, rounds=4))
    assert [row["round"] for row in result.history] == [1, 2, 3, 4]
    assert result.history[-1]["privacy"] == run(plan_of(rounds=4)).history[-1]["privacy"]


def test_busy_clients_are_not_replaced_in_round_robin_sampling() -> None:
    """A replacement would be asked more often than the accountant assumes."""
    plan = plan_of("ftrl")
    federation = build_federation(plan)
    job = build_job(plan, federation)
    _, coordinator, _ = guarded(plan, job, build_coordinator(plan, federation), Ledger(job.secret))
    asked = []
    for attempt in range(5):
        population = Population(30, lambda client: client not in (7, 8), lambda: np.ones(30), {}, attempt)
        asked += [pick.client for pick in coordinator.sampler.sample(np.random.default_rng(0), 6, population)]
    assert sorted(asked) == [client for client in range(30) if client not in (7, 8)]
