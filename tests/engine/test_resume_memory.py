"""What a run resumes from lies in memory as what it would have had."""

from __future__ import annotations

from pathlib import Path

from atoll.api import run
from atoll.core.plan import Plan
from atoll.report.record import read_state

ALIGNED = 64
"""Where torch begins its own tensors: vectorised sums take another order, and round otherwise, elsewhere."""


def test_tensors_of_a_checkpoint_begin_where_torch_begins_its_own(tmp_path: Path) -> None:
    plan = Plan(partition={"num_clients": 4}, algorithm="moon", policy={"size": 3}, rounds=1, engine="inline")
    run(plan, out=tmp_path / "run", report=False)
    state = read_state(tmp_path / "run" / "checkpoint.safetensors", plan.identity())
    tensors = [state.params_D, *(value for memory in state.clients.values() for value in memory.values())]
    assert len(tensors) == 4
    assert [tensor.data_ptr() % ALIGNED for tensor in tensors] == [0] * 4
