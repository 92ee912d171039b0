"""Memories of many clients: beyond a bound they lie in files, and nobody can tell but by the memory that is free."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import timeless

import atoll.commit.client_states as module
from atoll import Plan, run
from atoll.commit.client_states import ClientStates
from atoll.core.messages import State
from atoll.core.tensor_file import Deferred

KILOBYTE = 256  # floats


def memory(value: float) -> State:
    return {"a": torch.full((KILOBYTE,), value), "b": torch.tensor([int(value)])}


def spilled_files(states: ClientStates) -> list[Path]:
    assert states._folder is not None
    return sorted(states._folder.path.iterdir())


def test_the_oldest_go_to_files_and_read_back_alike() -> None:
    states = ClientStates(bound=4 * 1024 + 200)
    for client in range(10):
        states = states.updated({client: memory(client)})
    kinds = [all(isinstance(each, Deferred) for each in entry.values()) for _, entry in states.entries()]
    assert kinds == sorted(kinds, reverse=True) and 5 <= sum(kinds) < 10
    assert list(states) == list(range(10)) and len(states) == 10 and 3 in states and 11 not in states
    for client in range(10):
        assert torch.equal(states[client]["a"], memory(client)["a"]) and states[client]["b"].dtype == torch.int64


def test_a_value_stays_what_it_was() -> None:
    before = ClientStates(bound=2000).updated({0: memory(0), 1: memory(1), 2: memory(2)})
    after = before.updated({0: memory(7)})
    assert float(before[0]["a"][0]) == 0 and float(after[0]["a"][0]) == 7


def test_files_go_with_the_values_that_refer_to_them() -> None:
    states = ClientStates(bound=2000).updated({client: memory(client) for client in range(6)})
    folder, num = spilled_files(states)[0].parent, len(spilled_files(states))
    states = states.updated({0: memory(9)})
    gc.collect()
    assert len(list(folder.iterdir())) <= num
    del states
    gc.collect()
    assert not folder.exists()


def test_a_run_that_spills_ends_with_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = Plan(
        algorithm="scaffold", partition={"num_clients": 12}, policy={"size": 5}, rounds=6, engine="inline", seed=3
    )
    whole = run(plan)
    monkeypatch.setattr(module.ClientStates.__init__, "__defaults__", (6000,))
    run(plan.replace({"rounds": 3}), out=tmp_path / "run", report=False)
    resumed = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(resumed.params_D, whole.params_D)
    assert timeless(resumed.history) == timeless(whole.history)


def test_some_are_taken_without_reading_any() -> None:
    states = ClientStates(bound=4 * 1024 + 200).updated({client: memory(client) for client in range(6)})
    some = states.of([5, 1, 8])
    assert list(some) == [5, 1] and float(some[1]["a"][0]) == 1
    assert [isinstance(entry["a"], Deferred) for _, entry in some.entries()] == [False, True]
    num = len(spilled_files(states))
    del states
    gc.collect()
    assert len(spilled_files(some)) <= num and float(some[1]["a"][0]) == 1


MANY = """
import json, sys
import own_works
own_works.REMEMBERED = 1_660_000
from atoll import Plan, run
from atoll.train.resident import own_peak_memory
plan = Plan(partition={"num_clients": 1000, "samples_per_client": 2}, policy={"size": 20}, sampler="round_robin",
            rounds=50, engine="inline", evaluation={"every": 0}).replace(json.loads(sys.argv[2]))
run(plan.replace({"rounds": 49}), out=sys.argv[1], report=False, checkpoint_seconds=1e9)
result = run(plan, out=sys.argv[1], report=False, resume=True, checkpoint_seconds=1e9)
assert len(result.history) == 50
assert result.history[-1].get("clients_test", {}).get("num_clients", 1000) == 1000
print(own_peak_memory() // (1 << 20))
"""
DITTO = {
    "algorithm": "ditto",
    "model": {"name": "mlp_2nn", "hidden": 1250},
    "local": {"steps": 1, "batch_size": 2},
    "evaluation": {"every": 0, "clients_every": 50},
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"work": "own_works:remembering"}, DITTO], ids=["work", "ditto"])
def test_a_thousand_clients_that_keep_much_take_little_memory(tmp_path: Path, change: dict[str, object]) -> None:
    """1.66 million floats each: 6.6 GB in all, written to a checkpoint, resumed from it, and measured one by one."""
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(tmp_path / "run"), json.dumps(change)],
        env={"PYTHONPATH": f"{tests}:{tests.parent / 'src'}", "TMPDIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1000  # MB
