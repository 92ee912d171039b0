"""Engines with kernels: which jobs have them, that bits depend on nothing else, and machines without a compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import batch_normed, dropped, timeless, with_kernels
from torch import nn

from atoll import Dataset, Plan, run
from atoll.core.algorithm import LocalTask
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast
from atoll.core.parts import Part, members
from atoll.train.kernels import build

needs_compiler = pytest.mark.skipif(not with_kernels(), reason="there is no C compiler: install gcc or clang")
KERNELS = {"name": "vectorised", "stack": 3, "kernels": True}


@needs_compiler
@pytest.mark.parametrize(
    "algorithm", ["fedavg", {"name": "fedprox", "mu": 0.2}, "scaffold", "feddyn", "fednova", "qffl"]
)
def test_kernels_train_as_the_plain_loop_does(digits_plan: Plan, algorithm: Any) -> None:
    plan = digits_plan.replace({"algorithm": algorithm, "evaluation": {"every": 1, "clients_every": 3}})
    fast, plain = run(plan.replace({"engine": KERNELS})), run(plan)
    assert fast.engine["kernels"] is True
    torch.testing.assert_close(fast.params_D, plain.params_D, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(fast.history, plain.history, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-4)
        assert mine["test"]["loss"] == pytest.approx(theirs["test"]["loss"], rel=1e-4)
    assert fast.history[-1]["clients_test"] == pytest.approx(plain.history[-1]["clients_test"], rel=1e-3, abs=1e-3)


@needs_compiler
def test_bits_depend_on_no_worker_stack_or_end(digits_plan: Plan, tmp_path: Path) -> None:
    """Stacks change the order in which updates are added up, so that sizes are compared by single clients' norms."""
    plan = digits_plan.replace({"algorithm": "feddyn", "local.optimizer": {"name": "sgd", "momentum": 0.5}})
    whole = run(plan.replace({"engine": KERNELS}), out=tmp_path / "whole", report=False)
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["engine"]["kernels"] is True
    for engine in ({**KERNELS, "name": "processes", "workers": n} for n in (1, 2)):
        other = run(plan.replace({"engine": engine}))
        assert torch.equal(other.params_D, whole.params_D)
        assert timeless(other.history) == timeless(whole.history)
    short = plan.replace({"rounds": 1, "engine": KERNELS})
    run(short, out=tmp_path / "run", report=False)
    resumed = run(plan.replace({"engine": "inline"}), out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(resumed.params_D, whole.params_D)


def double(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes)).double()


def squashed(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, num_classes))


LEFT_ALONE: dict[str, dict[str, Any]] = {
    "single precision": {"model": double},
    "no kernel for Tanh": {"model": squashed},
    "drops units": {"model": dropped},
    "buffers": {"model": batch_normed},
    "slot within steps": {"algorithm": "fedsam"},
    "optimiser": {"local.optimizer": "adam"},
    "loss": {"loss": {"name": "cross_entropy", "label_smoothing": 0.1}},
    "poison": {"attack": "label_flip", "attackers": {"num": 1}},
    "private": {
        "privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True},
        "sampler": "poisson",
    },
    "keep": {"algorithm": "fedper"},
}


@needs_compiler
@pytest.mark.parametrize("reason", LEFT_ALONE)
def test_what_kernels_do_not_know_is_trained_as_before(digits_plan: Plan, reason: str, tmp_path: Path) -> None:
    plan = digits_plan.replace({**LEFT_ALONE[reason], "rounds": 1})
    fast = run(plan.replace({"engine": KERNELS}), out=tmp_path / "run", report=False)
    plain = run(plan.replace({"engine": {"name": "vectorised", "stack": 3}}))
    assert "kernels" not in fast.engine
    assert reason in json.loads((tmp_path / "run" / "run.json").read_text())["no_kernels"]
    assert torch.equal(fast.params_D, plain.params_D)


@needs_compiler
def test_a_client_whose_samples_overflow_is_left_out() -> None:
    rng = np.random.default_rng(0)
    x, owners = rng.normal(size=(60, 6)).astype(np.float32), np.repeat(np.arange(6), 10)
    y = rng.integers(0, 3, 60)
    x[owners == 2, 0] = 3e38
    data = Dataset(train_x=x, train_y=y, test_x=x[:20], test_y=y[:20], num_classes=3, owners=owners, name="huge")
    plan = Plan(
        data=lambda: data, partition="natural", model="logistic", policy={"size": 6}, rounds=2, local={"lr": 0.1}
    )
    fast, plain = (run(plan.replace({"engine": engine})) for engine in (KERNELS, "inline"))
    assert fast.engine["kernels"] is True
    assert [row["clients"] for row in fast.history] == [row["clients"] for row in plain.history] == [5, 5]
    torch.testing.assert_close(fast.params_D, plain.params_D, rtol=1e-4, atol=1e-6)


@needs_compiler
def test_auto_takes_kernels_and_says_why_not(digits_plan: Plan, tmp_path: Path) -> None:
    plan = digits_plan.replace({"engine": "auto", "rounds": 1})
    assert run(plan).engine["kernels"] is True
    run(plan.replace({"model": Part(squashed)}), out=tmp_path / "run", report=False)
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert "kernels" not in described["engine"]
    assert described["no_kernels"] == "there is no kernel for Tanh"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine that has compiled nothing yet; the data that it has stay where they are."""
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.delenv("CC", raising=False)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def test_without_a_compiler_everything_works_as_before(
    digits_plan: Plan, no_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(no_library))
    result = run(digits_plan.replace({"engine": "auto"}), out=no_library / "run", report=False)
    described = json.loads((no_library / "run" / "run.json").read_text())
    assert "kernels" not in result.engine
    assert "no C compiler" in described["no_kernels"]
    with pytest.raises(PlanError, match=r"engine\.kernels is true, but there is no C compiler: install one"):
        run(digits_plan.replace({"engine": KERNELS}))


@pytest.mark.parametrize("does", ["exit 1", "echo nonsense > /dev/null", "touch"])
def test_a_compiler_that_fails_is_named(
    does: str, digits_plan: Plan, no_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = no_library / "broken"
    broken.write_text(
        '#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done\n' + (f"{does} $2" if does == "touch" else does)
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(PlanError, match="broken"):
        run(digits_plan.replace({"engine": KERNELS}))
    assert "kernels" not in run(digits_plan.replace({"engine": "auto", "rounds": 1})).engine


@needs_compiler
def test_a_library_is_kept_and_mended(no_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))  # in less time
    assert not build.is_built()
    build.library()
    [path] = (no_library / "kernels").iterdir()
    assert build.is_built()
    path.unlink()
    path.write_bytes(b"cut off")
    build.library.cache_clear()
    build.library()
    assert path.stat().st_size > 1000
    os.chmod(path, 0o777)
    assert not build.is_built(), "somebody else could have written it"


@pytest.mark.parametrize("name", members("algorithms"))
def test_a_drift_is_what_an_algorithm_adds_to_its_gradients(name: str) -> None:
    try:
        algorithm = Part(name).build("algorithms")
    except PlanError:
        return  # it needs an option, and has no drift in any case that is tested here
    if algorithm.drift is None:
        return
    torch.manual_seed(0)
    grad_D, params_D, sent_D = torch.randn(3, 50)
    server = {key: torch.randn_like(value) for key, value in algorithm.init_server(sent_D).items()}
    memory = {key: torch.randn_like(value) for key, value in algorithm.init_client(sent_D).items()}
    one = torch.ones(())
    task = LocalTask(
        broadcast=Broadcast(sent_D, algorithm.broadcast(sent_D, server)),
        state=memory,
        lr=one / 10,
        num_steps=one,
        num_samples=one,
        outputs=None,  # type: ignore[arg-type]
        grad_at=None,  # type: ignore[arg-type]
        features=None,  # type: ignore[arg-type]
        first_loss=one,
        step=one,
        end_D=sent_D,
    )
    drift = algorithm.drift(task)
    shift_D = torch.zeros(50) if drift.shift_D is None else drift.shift_D
    expected_D = grad_D + drift.pull * (params_D - sent_D) + shift_D
    torch.testing.assert_close(algorithm.local_grad(grad_D, params_D, task), expected_D)
