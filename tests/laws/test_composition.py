"""Any plan is refused before training with a way out, or runs to a finite end with all laws intact."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless, with_kernels
from laws.random_plans import OPTIONS, calm, personal_plan, random_plan, split_plan, vertical_plan

from atoll.api import Result, run
from atoll.commit.finish import without_nan
from atoll.core.errors import DataError, PlanError, RunError
from atoll.core.parts import find, members
from atoll.core.plan import SOLVES_FOR_ROUNDS, Plan
from atoll.engine.base import InProcess

NUM_FAST, NUM_SLOW = 40, 2110
LAWS = ("vectorised", "workers", "resume")
ADVICE = re.compile(
    r"\b(set|use|leave|lower|raise|choose|put|ask|take|give|change|name|pass|let|add|correct|make|start|say|allow)\b"
)
ENDS = {"all rounds done", "bytes", "privacy", "no progress"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(NUM_FAST))
def test_a_random_plan_holds_its_laws(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hold(seed, LAWS[seed % 3 : seed % 3 + 1], monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_FAST, NUM_FAST + NUM_SLOW))
def test_many_random_plans_hold_all_laws(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hold(seed, LAWS, monkeypatch, tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_own_models_beside_other_parts_hold_their_laws(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold_for(personal_plan(seed), LAWS[seed % 3 : seed % 3 + 1], monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 420))
def test_own_models_beside_other_parts_hold_all_laws(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold_for(personal_plan(seed), LAWS, monkeypatch, tmp_path)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 300))])
def test_a_model_that_is_cut_holds_its_laws_beside_other_parts(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold_for(split_plan(seed), ["resume"], monkeypatch, tmp_path)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 200))])
def test_parties_that_hold_columns_keep_their_laws_beside_other_parts(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hold_for(vertical_plan(seed), ["resume"], monkeypatch, tmp_path)


def hold(seed: int, laws: Iterable[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run the plan of a seed, and check some laws on it."""
    hold_for(random_plan(seed), laws, monkeypatch, tmp_path)


def hold_for(settings: dict[str, Any], laws: Iterable[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run a plan, and check some laws on it."""
    begun: list[bool] = []
    works = InProcess.works

    def watched(self: InProcess, *args: Any) -> Any:
        begun.append(True)
        return works(self, *args)

    monkeypatch.setattr(InProcess, "works", watched)
    try:
        plan = Plan(**settings)
        whole = run(plan.replace({"engine": "inline"}))
    except (PlanError, DataError) as refusal:
        assert not begun, f"refused after training had begun: {refusal}\n{settings}"
        assert ADVICE.search(str(refusal)), f"no way out: {refusal}\n{settings}"
        return
    monkeypatch.undo()
    must_be_finite(whole, settings)
    for law in laws:
        CHECKS[law](plan, whole, tmp_path)


ENGINES = (
    {"name": "vectorised", "stack": 3},
    {"name": "processes", "workers": 2, "stack": 2},
    {"name": "vectorised", "stack": 3, **with_kernels()},
)


@pytest.mark.parametrize("seed", range(0, NUM_FAST, 2))
def test_a_random_plan_trains_alike_in_another_engine(seed: int) -> None:
    train_alike(seed, ENGINES[seed // 2 % 3 :][:1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_FAST, NUM_FAST + NUM_SLOW))
def test_many_random_plans_train_alike_in_every_engine(seed: int) -> None:
    train_alike(seed, ENGINES)


def train_alike(seed: int, engines: Iterable[dict[str, Any]]) -> None:
    """Compare engines by the plan of a seed without the parts that amplify rounding, whether or not it was refused."""
    try:
        plan = Plan(**calm(random_plan(seed)))
        inline = run(plan.replace({"engine": "inline"}))
    except (PlanError, DataError):
        return  # with a reason, as the other law sees to
    for engine in engines:
        other = run(plan.replace({"engine": engine}))
        torch.testing.assert_close(other.params_D, inline.params_D, atol=1e-4, rtol=1e-4, msg=plan.to_toml)
        for mine, theirs in zip(inline.history, other.history, strict=True):
            losses = [row.get("train_loss") for row in (theirs, mine) if row.get("train_loss") is not None]
            assert len(losses) in (0, 2), plan.to_toml()
            assert not losses or losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-3), plan.to_toml()
            assert counted(theirs) == counted(mine), plan.to_toml()
        if not plan.evaluation.validation:  # which choose between models by a score
            must_have_models(inline, other, plan, atol=1e-4, rtol=1e-3)


def must_have_models(one: Result, other: Result, plan: Plan, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Clients have the same models of their own in two runs; a few of them are compared."""
    assert sorted(one.models) == sorted(other.models), plan.to_toml()
    for client in sorted(one.models)[:3]:
        ours, theirs = (result.models[client].state_dict() for result in (one, other))
        for name, value in ours.items():
            torch.testing.assert_close(theirs[name], value, atol=atol, rtol=rtol, equal_nan=True, msg=plan.to_toml)


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """What of a round no rounding changes: clients, samples, bytes."""
    return {key: value for key, value in row.items() if isinstance(value, int)}


def must_be_finite(result: Result, settings: dict[str, Any]) -> None:
    assert bool(result.params_D.isfinite().all()), settings
    for row in result.history:
        for name in ("train_loss", "seconds"):
            value = row.get(name)
            assert math.isfinite(value) if value is not None else "work" in settings or name not in row, (row, settings)
        assert all(math.isfinite(value) for value in row.get("test", {}).values() if value is not None), (row, settings)


def same_course_when_stacked(plan: Plan, whole: Result, tmp_path: Path) -> None:
    """Stacked training rounds differently, and codecs, votes and unit steps amplify that: compare what is left."""
    together = run(plan.replace({"engine": {"name": "vectorised", "stack": 3}}))
    assert together.params_D.shape == whole.params_D.shape
    assert len(together.history) == len(whole.history)


def same_for_any_workers(plan: Plan, whole: Result, tmp_path: Path) -> None:
    by = with_kernels() if plan.seed % 2 else {}
    ends = [run(plan.replace({"engine": {"name": "processes", "workers": n, "stack": 2, **by}})) for n in (1, 2)]
    assert torch.equal(ends[0].params_D, ends[1].params_D), plan.to_toml()
    assert timeless(ends[0].history) == timeless(ends[1].history), plan.to_toml()
    assert without_nan(ends[0].new_clients) == without_nan(ends[1].new_clients), plan.to_toml()
    must_have_models(*ends, plan)


def same_after_resume(plan: Plan, whole: Result, tmp_path: Path) -> None:
    inline = plan.replace({"engine": "inline", "evaluation.every": 1})
    straight = run(inline)
    run(inline.replace({"rounds": 1}), out=tmp_path / "run", report=False)
    if plan.privacy is not None and plan.privacy.name in SOLVES_FOR_ROUNDS:
        with pytest.raises(RunError, match="resume it with its own plan"):
            run(inline, out=tmp_path / "run", report=False, resume=True)
        return
    reported = plan.seed % 4 == 0  # it takes longer than the run
    resumed = run(inline, out=tmp_path / "run", resume=True, report=reported)
    assert (tmp_path / "run" / "report.html").exists() == reported
    assert torch.equal(resumed.params_D, straight.params_D), plan.to_toml()
    assert timeless(resumed.history) == timeless(straight.history), plan.to_toml()
    assert without_nan(resumed.new_clients) == without_nan(straight.new_clients), plan.to_toml()
    must_have_models(straight, resumed, plan)


CHECKS = {"vectorised": same_course_when_stacked, "workers": same_for_any_workers, "resume": same_after_resume}


def test_options_are_of_members() -> None:
    for family, name in OPTIONS:
        assert name in members(family)
        assert find(family, name)


def test_every_member_is_drawn() -> None:
    """The plans that are tried hold every member of the families that they are drawn from, however many there are."""
    families = ("algorithms", "rounds", "rounds.samplers", "transforms", "aggregators", "attacks", "detection")
    missing = {(family, name) for family in families for name in members(family)}
    for seed in range(NUM_FAST + NUM_SLOW):
        drawn = repr(random_plan(seed))
        missing = {(family, name) for family, name in missing if f"'{name}'" not in drawn}
        if not missing:
            break
    assert not missing
