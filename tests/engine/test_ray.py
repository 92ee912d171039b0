"""Ray gives the bits of `processes` on one machine and on several, whatever becomes of workers and machines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timeless
from laws.random_plans import random_plan

from atoll.api import Result, run
from atoll.core.errors import DataError, PlanError, RunError, TrainingError
from atoll.core.events import ClientReported, Event, RoundCommitted
from atoll.core.plan import Plan
from atoll.engine.ray_cluster import connect

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'atoll[ray]'")

MARK = f"ATOLL_TEST={os.getpid()}"
os.environ["ATOLL_TEST"] = str(os.getpid())  # which clusters of this process, and their workers, inherit
STACK: dict[str, Any] = {"stack": 2}
LATE = {"name": "buffered", "size": 4, "concurrency": 12}
PLAN = Plan(
    partition={"name": "dirichlet", "num_clients": 24, "alpha": 0.5},
    model={"name": "mlp_2nn", "hidden": 16},
    algorithm="scaffold",
    policy={"size": 12},
    local={"batch_size": 16},
    evaluation={"every": 2, "clients_every": 2, "new_clients": 2, "holdout": 0.2},
    rounds=4,
    engine={"name": "processes", "workers": 2, **STACK},
)


def on_ray(plan: Plan, **options: Any) -> Plan:
    return plan.replace({"engine": {"name": "ray", "patience": 300, **STACK, **options}})


def must_agree(one: Result, other: Result) -> None:
    assert torch.equal(one.params_D, other.params_D)
    assert timeless(one.history) == timeless(other.history)
    assert one.new_clients == other.new_clients
    for client, model in one.models.items():
        theirs = other.models[client].state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for another process."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def workers() -> list[int]:
    """The workers of runs that this test began, by the name that Ray gives their processes."""
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    named = [pid for pid in pids if read(Path(f"/proc/{pid}/cmdline")).startswith(b"ray::RayWorker")]
    return [pid for pid in named if MARK.encode() in read(Path(f"/proc/{pid}/environ"))]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    """A cluster of one machine with two CPUs, which this process is connected to."""
    cluster = connect("local", what="the test", cpus=2)
    yield
    cluster.close()


class Killing:
    """A reader of events that ends a worker of this machine in the middle of a round."""

    def __init__(self, in_round: int) -> None:
        self._rounds, self._in_round, self.killed = 0, in_round, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self._rounds = event.row["round"]
        if isinstance(event, ClientReported) and self._rounds == self._in_round - 1 and not self.killed:
            self.killed = workers()[0]
            os.kill(self.killed, signal.SIGKILL)


def test_a_run_on_ray_has_the_bits_of_processes_and_leaves_nobody_behind(here: None) -> None:
    """A worker is killed in its second round: what it was at is dealt out again, and another takes its place."""
    killing, signals = Killing(in_round=2), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    result = run(on_ray(PLAN), watch=[killing])
    must_agree(run(PLAN), result)
    assert killing.killed and result.engine == {"name": "ray", "stack": 2, "compile": False}
    assert ray.is_initialized()  # whoever connects before a run stays connected after it
    until(lambda: not workers())
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == signals


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "fedavg", "aggregator": {"name": "median"}},
        {"algorithm": "ditto"},
        {"algorithm": "fedbn", "model": "helpers:normed"},
        {"algorithm": "fedmd", "public": {"name": "held_out", "fraction": 0.1}, "models": ["mlp_2nn", "logistic"]},
        {"algorithm": "fedavg", "secagg": {}, "evaluation": {"every": 1}},
        {
            "algorithm": "fedavg",
            "uplink": [{"name": "top_k", "fraction": 0.1}],
            "policy": LATE,
        },
        {"algorithm": "fedavg", "attack": "alie", "attackers": {"num": 4}, "aggregator": {"name": "krum", "f": 4}},
        {
            "algorithm": "fedavg",
            "sampler": "uniform",
            "privacy": {"name": "distributed", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True},
            "secagg": {},
            "evaluation": {"every": 1},
        },
        {
            "algorithm": "fedavg",
            "privacy": {"name": "local", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True},
            "sampler": "poisson",
            "evaluation": {"every": 1},
        },
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_kind_of_run_has_the_bits_of_processes(here: None, changes: dict[str, Any]) -> None:
    keep = {"evaluation": {"every": 2, "clients_every": 2}, "rounds": 2}
    plan = PLAN.replace({**keep, **changes})
    must_agree(run(plan), run(on_ray(plan, workers=2)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_random_plan_has_the_bits_of_processes(here: None, seed: int) -> None:
    try:
        plan = Plan(**random_plan(seed)).replace({"engine": {"name": "processes", "workers": 2, **STACK}})
        whole = run(plan)
    except (PlanError, DataError):
        return  # with a reason, as the composition law sees to
    if plan.privacy is not None and not plan.privacy.options.get("test_noise"):
        return  # its noise is secret, and no run repeats it
    must_agree(whole, run(on_ray(plan, workers=1 + seed % 2)))


@pytest.mark.slow
def test_too_few_cpus_are_refused_with_a_reason(here: None) -> None:
    why = r"[012] of 3 workers found room within 20 seconds.*1 node with 2 CPUs.*set engine.workers lower"
    with pytest.raises(RunError, match=why):
        run(on_ray(PLAN, workers=3, patience=20.0))
    until(lambda: not workers())
    with pytest.raises(RunError, match=r"0 of 1 workers found room within 2 seconds, .* a CPU and 1 GPUs of its own"):
        run(on_ray(PLAN, workers=1, gpus_per_worker=1, patience=2.0))


@pytest.mark.slow
def test_clients_that_kill_every_worker_end_the_run(here: None, tmp_path: Path) -> None:
    model = {"name": "engine.ray_models:deadly", "path": str(tmp_path / "deaths")}
    plan = PLAN.replace({"model": model, "algorithm": "fedavg", "evaluation": {"every": 2}, "engine.stack": 0})
    whole = run(plan)
    (tmp_path / "deaths").write_text("two")
    must_agree(whole, run(on_ray(plan, workers=2, stack=0)))
    assert (tmp_path / "deaths").read_text() == ""
    (tmp_path / "deaths").write_text("all")
    with pytest.raises(RunError, match=r"3 workers were lost one after another at the same clients.*--resume"):
        run(on_ray(plan, workers=2, stack=0))


@pytest.mark.slow
def test_what_workers_cannot_do_is_said_by_the_run(here: None) -> None:
    with pytest.raises(RunError, match=r"what differs is the model: give every machine the same code"):
        run(on_ray(PLAN.replace({"model": "engine.ray_models:elsewhere_other"}), workers=1, stack=0))
    with pytest.raises(TrainingError, match=r"ArithmeticError: one number too many \(.*ray_models.py, line \d+\)"):
        run(on_ray(PLAN.replace({"model": "engine.ray_models:raising"}), workers=1, stack=0))
    until(lambda: not workers())


@pytest.mark.slow
def test_a_run_goes_on_with_other_workers_elsewhere(here: None, tmp_path: Path) -> None:
    whole = run(PLAN)
    plan = on_ray(PLAN, workers=2)
    run(plan.replace({"rounds": 2}), out=tmp_path / "run", report=False)
    assert "workers" not in json.loads((tmp_path / "run" / "run.json").read_text())["engine"]
    resumed = run(plan.replace({"engine.workers": 1}), out=tmp_path / "run", report=False, resume=True)
    must_agree(whole, resumed)


@pytest.fixture
def two() -> Iterator[Any]:
    """A cluster of two machines with one CPU each, as far as one machine can play them."""
    if ray.is_initialized():
        ray.shutdown()
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster
    assert not ray.is_initialized()
    assert len(cluster.list_all_nodes()) >= 1  # a cluster that a run did not begin goes on
    cluster.shutdown()


class Machines:
    """A reader of events that lets machines of a cluster die, or join."""

    def __init__(self, does: Callable[[], None], in_round: int) -> None:
        self._does, self._in_round, self._rounds = does, in_round, 0
        self.done = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, RoundCommitted):
            self._rounds = event.row["round"]
        if isinstance(event, ClientReported) and self._rounds == self._in_round - 1 and not self.done:
            self.done = True
            self._does()


@pytest.mark.slow
def test_two_machines_one_that_dies_and_one_that_joins_change_no_bit(two: Any) -> None:
    whole, plan = run(PLAN), on_ray(PLAN, address=two.address)
    must_agree(whole, run(plan))
    [other] = two.worker_nodes
    dies = Machines(lambda: two.remove_node(other, allow_graceful=False), in_round=2)
    started = time.monotonic()
    must_agree(whole, run(plan, watch=[dies]))
    assert dies.done and time.monotonic() - started < 60
    most: list[int] = []

    def joins() -> None:
        two.add_node(num_cpus=1)

    longer = PLAN.replace({"rounds": 400, "evaluation": {"every": 0}, "stop": {"seconds": 120}})
    started_by = Machines(joins, in_round=2)

    def stop_when_two(event: Event) -> None:
        if isinstance(event, RoundCommitted):
            most.append(len(workers()))
            if most[-1] >= 2:
                raise KeyboardInterrupt  # as a user would, who has seen enough

    ended = run(on_ray(longer, address=two.address), watch=[started_by, stop_when_two])
    assert ended.reason == "interrupted"
    assert most[0] == 1 and most[-1] == 2


DRIVER = """
import signal, sys, torch
from atoll import Plan, run
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
torch.set_num_threads(1)
plan = Plan.from_toml(open("plan.toml").read())
run(plan, out="run", watch=[lambda event: print(type(event).__name__, flush=True)], report=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_ends_leaves_no_process_behind(tmp_path: Path, how: signal.Signals) -> None:
    plan = on_ray(PLAN, address="local", workers=2).replace({"rounds": 100_000, "evaluation": {"every": 0}})
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    before = len(workers())
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as driver:
        assert driver.stdout is not None
        while driver.stdout.readline() != "RoundCommitted\n":
            assert driver.poll() is None
        assert len(workers()) == before + 2
        if how is signal.SIGINT:
            os.killpg(driver.pid, how)  # all of them, as a terminal does it
        else:
            driver.kill()
        for _ in driver.stdout:
            pass
    until(lambda: len(workers()) == before)
    if how is signal.SIGINT:
        assert driver.returncode == 0
        assert json.loads((tmp_path / "run" / "result.json").read_text())["reason"] == "interrupted"
