"""Where engines compute: memory of a device, workers that begin anew, precision, and what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pretend_device
import pytest
import torch
from helpers import timeless
from torch import nn

from atoll import Plan, resume, run
from atoll.core.errors import PlanError, RunError
from atoll.engine.build import build_engine
from atoll.engine.rebuild import blueprint, rebuilt_job
from atoll.engine.spawned import Spawned
from atoll.train.build import build_job
from atoll.train.devices import Place, TorchSettings, settled
from atoll.train.federation import build_federation
from atoll.train.placing import DeviceFederation
from atoll.train.trainer import Trainer

SIZES = {"name": "mlp_2nn", "hidden": 32}


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pretend_device.known():
        yield
    torch.set_num_threads(threads)


def plan_of(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "partition": {"num_clients": 16},
        "policy": {"size": 16},
        "local": {"lr": 0.05, "batch_size": 8, "steps": 2},
        "model": SIZES,
        "rounds": 2,
    }
    return Plan(**{**settings, **changes})


def test_a_stack_that_does_not_fit_is_halved_and_the_bits_stay() -> None:
    engine = {"name": "vectorised", "stack": 16, "device": "pretend"}
    whole = run(plan_of(engine=engine))
    trainer = Trainer(build_job(plan_of()), stack=16, place=Place("pretend"))
    of_all = pretend_device.MEMORY.peak - pretend_device.MEMORY.taken
    del trainer
    with pretend_device.at_most(of_all * 2 // 3) as memory:
        squeezed = run(plan_of(engine=engine))
        assert memory.refused
    assert squeezed.engine == whole.engine
    assert torch.equal(squeezed.params_D, whole.params_D)
    assert timeless(squeezed.history) == timeless(whole.history)


def test_a_device_without_room_for_one_client_is_refused_with_a_way_out() -> None:
    plan = plan_of(engine={"name": "vectorised", "stack": 4, "device": "pretend"})
    with pretend_device.at_most(40_000), pytest.raises(PlanError, match=r"out of memory.*lower local\.batch_size"):
        run(plan)


@pytest.mark.slow
def test_a_stack_is_as_large_as_measured_memory_allows() -> None:
    """With twice the memory there are more clients in a stack, and never more than fit."""
    stacks = []
    for room in (3_000_000, 12_000_000):
        with pretend_device.at_most(room) as memory:
            made = run(
                plan_of(
                    engine={"name": "vectorised", "device": "pretend"},
                    partition={"num_clients": 64},
                    policy={"size": 64},
                )
            )
            assert not memory.refused
        stacks.append(made.engine["stack"])
    assert 1 < stacks[0] < stacks[1] <= 64


@pytest.mark.slow
def test_auto_takes_the_accelerator_that_is_there_and_a_resumed_run_stays_on_it(tmp_path: Path) -> None:
    plan = plan_of(engine={"name": "auto", "device": "auto", "workers": 1})
    first = run(plan, out=tmp_path / "run")
    assert first.engine == {"name": "vectorised", "stack": 16, "compile": False, "device": "pretend"}
    longer = plan.replace({"rounds": 3})
    gone_on = resume(tmp_path / "run", longer)
    assert gone_on.engine == first.engine
    assert torch.equal(gone_on.params_D, run(longer.replace({"engine": first.engine})).params_D)


@pytest.mark.slow
def test_samples_that_do_not_fit_are_sent_in_batches_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = build_federation(plan_of())
    kept = DeviceFederation(federation, torch.device("pretend"))
    sent = DeviceFederation(federation, torch.device("pretend"), free=1000)
    assert kept.on_device and not sent.on_device
    indices = torch.arange(6).view(2, 3)
    assert torch.equal(kept.take(indices).cpu(), sent.take(indices).cpu())
    plan = plan_of(engine={"name": "inline", "device": "pretend"})
    whole = run(plan)
    monkeypatch.setattr("atoll.train.placing.KEPT_SHARE", 0.0)
    assert torch.equal(run(plan).params_D, whole.params_D)


@pytest.mark.parametrize("metrics", [None, ["accuracy", "auroc", "brier"]])
def test_a_device_without_float64_trains_and_measures(metrics: Any) -> None:
    from atoll.train import evaluate

    plan = plan_of(evaluation={"clients_every": 1} | ({} if metrics is None else {"metrics": metrics}), engine="inline")
    here = run(plan)
    with pytest.MonkeyPatch.context() as patch, pretend_device.without_double():
        patch.setattr(evaluate, "WITHOUT_DOUBLE", ("pretend",))
        there = run(plan.replace({"engine": {"name": "inline", "device": "pretend"}}))
    assert torch.equal(here.params_D, there.params_D)
    assert timeless(here.history) == timeless(there.history)


@pytest.mark.parametrize("engine", ["inline", "vectorised", "auto", "processes"])
def test_a_device_that_is_not_there_is_refused(engine: str) -> None:
    for device, match in (
        ("cuda:1", r'"cuda:1", which torch .* does not find \(here is cpu, pretend:0.*set engine.device'),
        ("pretend:7", r'"pretend:7", which torch'),
        ("meta", r'"meta", which torch'),
        ("gpu", r"must be \"auto\", \"cpu\", \"cuda\""),
    ):
        with pytest.raises(PlanError, match=match):
            run(plan_of(engine={"name": engine, "device": device}))


@pytest.mark.parametrize("engine", [{"name": "inline"}, {"name": "vectorised", "stack": 4}])
def test_lower_precision_trains_almost_the_same_model(engine: dict[str, Any]) -> None:
    """The products are rounded to 8 or 11 bits, and nothing else is."""
    full = run(plan_of(engine=engine, rounds=3))
    for precision, most in (("bf16", 0.05), ("fp16", 0.01)):
        lowered = run(plan_of(engine={**engine, "precision": precision}, rounds=3))
        assert lowered.engine["precision"] == precision
        far = (lowered.params_D - full.params_D).norm() / (full.params_D - build_job(plan_of()).first_D).norm()
        assert 0 < far < most
        assert lowered.params_D.dtype == torch.float32
        assert np.isfinite(lowered.test["loss"])


class Tiny(nn.Module):
    """A model whose loss is so small that its gradients vanish in float16."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs that hardly depend on the parameters."""
        return self.layer(x.flatten(1)) * 1e-5


@pytest.mark.slow
def test_small_gradients_survive_fp16_since_losses_are_scaled() -> None:
    plan = plan_of(
        model=lambda num_classes: Tiny(num_classes), local={"lr": 1.0, "steps": 1, "batch_size": 64}, rounds=1
    )
    first_D = build_job(plan).first_D
    full, lowered = (run(plan.replace({"engine": {"name": "inline", "precision": p}})) for p in ("float32", "fp16"))
    moved = [each.params_D - first_D for each in (full, lowered)]
    assert (moved[0] - moved[1]).norm() / moved[0].norm() < 0.05


def test_torch_is_told_what_a_cuda_device_needs_and_gets_its_settings_back() -> None:
    """The settings of torch are the processor's business, and can be seen without a device."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def told() -> tuple[bool, ...]:
        tf32 = matmul.allow_tf32, cudnn.allow_tf32
        return *tf32, cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()

    before = told()
    for tf32 in (False, True):
        settings = TorchSettings(Place("cuda", "float32", tf32))
        assert told() == (tf32, tf32, True, False, True)
        settings.restore()
        assert told() == before
    TorchSettings(Place("cpu"))
    assert told() == before


def test_the_place_of_a_plan_is_written_only_where_it_is_not_the_default() -> None:
    assert Place().described() == {}
    assert Place("cuda:1", "bf16", True).described() == {"device": "cuda:1", "precision": "bf16", "tf32": True}
    assert settled(Place("auto")).device == "pretend"


@pytest.mark.slow
def test_workers_that_begin_anew_end_with_the_bits_of_forked_ones(tmp_path: Path) -> None:
    """Also of a private run, whose secret they are told, with memories of clients, uplink and evaluation of clients."""
    for changes in (
        {"algorithm": "scaffold", "uplink": [{"name": "top_k", "fraction": 0.2}], "evaluation": {"clients_every": 1}},
        {"privacy": {"name": "sample", "clip": 0.5, "sigma": 2.0, "delta": 1e-5, "test_noise": True}},
    ):
        plan = plan_of(**changes)
        forked = run(plan.replace({"engine": {"name": "processes", "workers": 2, "stack": 4}}))
        spawned = run(plan.replace({"engine": {"name": "processes", "workers": 2, "stack": 4, "spawn": True}}))
        assert spawned.engine == forked.engine
        assert torch.equal(spawned.params_D, forked.params_D)
        assert timeless(spawned.history) == timeless(forked.history)


@pytest.mark.slow
def test_two_devices_have_a_worker_each_with_the_bits_of_one() -> None:
    """Workers import what makes the pretend device known with the plan's model."""
    plan = plan_of(model="pretend_models:small", engine={"name": "processes", "device": "pretend"})
    both = run(plan)
    assert both.engine == {"name": "processes", "stack": 16, "compile": False, "device": "pretend"}
    alone = run(plan.replace({"engine": {"name": "vectorised", "stack": 16}}))
    assert torch.equal(both.params_D, alone.params_D)


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_with_a_way_out() -> None:
    plan = plan_of()
    job = build_job(plan)
    engine = Spawned(job, blueprint(plan, job), Place(), workers=2, cohort=16, stack=4, compile=False, kernels=False)
    try:
        os.kill(engine._workers[1]._child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        engine._workers[1].join()
        with pytest.raises(RunError, match=r"a worker process died \(exit code -9\).*--resume"):
            list(engine.slices(job.first_D, [0, 100, 200, 300]))
    finally:
        engine.close()


@pytest.mark.slow
def test_a_worker_refuses_what_the_device_refuses() -> None:
    plan = plan_of(
        loss="pretend_models:planted", engine={"name": "processes", "device": "pretend"}, model="pretend_models:small"
    )
    with pytest.raises(PlanError, match=r"does not run on pretend.*same device"):
        run(plan)


def test_a_plan_with_functions_of_a_script_is_refused_where_it_must_be_rebuilt() -> None:
    plan = plan_of(model=lambda num_classes: Tiny(num_classes), engine={"name": "processes", "spawn": True})
    with pytest.raises(PlanError, match=r"which workers of processes cannot find.*put it into a module"):
        run(plan)


def test_a_blueprint_rebuilds_the_job_to_the_bit() -> None:
    plan = plan_of(privacy={"name": "sample", "clip": 0.5, "sigma": 2.0, "delta": 1e-5})
    job = build_job(plan)
    again = rebuilt_job(blueprint(plan, job))
    assert torch.equal(job.first_D, again.first_D)
    assert job.secret == again.secret
    assert [job.federation.train_indices(c).tolist() for c in range(4)] == [
        again.federation.train_indices(c).tolist() for c in range(4)
    ]


def test_an_engine_without_its_plan_cannot_spawn() -> None:
    from atoll.commit.coordinator import build_coordinator

    plan = plan_of(engine={"name": "processes", "spawn": True})
    job = build_job(plan)
    with pytest.raises(PlanError, match="build the plan themselves"):
        build_engine(plan.engine, job, build_coordinator(plan, job.federation))
