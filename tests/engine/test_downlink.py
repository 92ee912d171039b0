"""What clients hear, what it costs, and budgets of bytes that are never exceeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rows, timeless
from hypothesis import given
from hypothesis import strategies as st

from atoll import Plan, run
from atoll.core.downlink import Downlink
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, Payload, State
from atoll.core.params import spec_of
from atoll.core.parts import Part
from atoll.core.transform import Encoding, chain
from atoll.core.wire import packed_size

QUANTISED = [{"name": "quantise", "bits": 8}]
BY_DIFFERENCE = ["delta", {"name": "top_k", "fraction": 0.05}]


def downlink(*parts: Part) -> Downlink:
    return Downlink(chain(*(part.build("transforms", error_feedback=False) for part in parts)))


def encoding(attempt: int, num: int) -> Encoding:
    return Encoding(spec_of(torch.nn.Linear(num - 1, 1)), attempt, np.random.default_rng(attempt))


@given(st.lists(st.floats(-2, 2, width=32), min_size=6, max_size=6), st.integers(2, 6))
def test_what_is_known_comes_to_a_model_that_stands_still(values: list[float], kept: int) -> None:
    """Each difference carries the largest of what is missing, so that a few make it whole."""
    way, memory = downlink(Part("delta"), Part("top_k", count=kept)), State()
    heard, memory = way.send(Broadcast(torch.zeros(6), {}), memory, encoding(0, 6))
    target = torch.tensor(values)
    for attempt in range(1, 4):
        heard, memory = way.send(Broadcast(target, {}), memory, encoding(attempt, 6))
    assert torch.allclose(heard.broadcast.params_D, target)
    assert torch.equal(memory["known"], heard.broadcast.params_D)


def test_differences_cost_what_they_pack_to_and_the_first_is_whole() -> None:
    way, num = downlink(Part("delta"), Part("quantise", bits=2)), 1000
    vector = torch.randn(num, generator=torch.Generator().manual_seed(0))
    first, memory = way.send(Broadcast(vector, {}), {}, encoding(0, num))
    assert first.num_bytes == first.whole_bytes == packed_size(Payload(vector))
    assert torch.equal(first.broadcast.params_D, vector)
    second, _ = way.send(Broadcast(vector * 1.01, {}), memory, encoding(1, num))
    assert second.num_bytes < second.whole_bytes / 11
    assert second.whole_bytes == first.whole_bytes


def test_extra_vectors_go_the_same_way(digits_plan: Plan) -> None:
    plain = run(digits_plan.replace({"algorithm": "scaffold", "rounds": 2, "evaluation.every": 1}))
    half = run(digits_plan.replace({"algorithm": "scaffold", "rounds": 2, "evaluation.every": 1, "downlink": ["half"]}))
    assert half.history[-1]["bytes_down"] < 0.51 * plain.history[-1]["bytes_down"]
    assert not torch.equal(half.params_D, plain.params_D)
    assert torch.allclose(half.params_D, plain.params_D, atol=1e-2)


def test_who_missed_broadcasts_is_sent_them_or_all(digits_plan: Plan) -> None:
    """With everybody in every round a difference is all that travels; with few, most must catch up."""
    everybody = digits_plan.replace({"downlink": BY_DIFFERENCE, "rounds": 4, "policy.size": 12})
    sizes = np.diff([0, *(row["bytes_down"] for row in run(everybody).history)])
    whole = packed_size(Payload(run(digits_plan.replace({"rounds": 0})).params_D))
    assert sizes[0] == 12 * whole
    assert (sizes[1:] < 0.09 * sizes[0]).all()  # 5 % of the values and their places
    few = digits_plan.replace({"downlink": BY_DIFFERENCE, "rounds": 12, "policy.size": 3})
    costs = np.diff([0, *(row["bytes_down"] for row in run(few).history)])
    assert costs.max() == 3 * whole
    assert sizes[1] / 12 * 3 <= costs.min() < 3 * whole  # some have been there before


@pytest.mark.parametrize("policy", [{"size": 4}, {"name": "buffered", "size": 3, "concurrency": 8}])
@pytest.mark.parametrize("way", [QUANTISED, BY_DIFFERENCE, ["delta", {"name": "low_rank", "rank": 2}]])
def test_a_resumed_run_remembers_what_clients_know(
    digits_plan: Plan, way: list[Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    fleet = {"name": "fleet", "dropout": 0.2}
    plan = digits_plan.replace({"downlink": way, "policy": policy, "devices": fleet, "rounds": 6})
    whole = run(plan)
    run(plan.replace({"rounds": 3}), out=tmp_path / "run", report=False)
    resumed = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(whole.params_D, resumed.params_D)
    assert timeless(resumed.history) == timeless(whole.history)


def test_chains_that_make_no_sense_are_refused(digits_plan: Plan) -> None:
    for changes, advice in (
        ({"uplink": ["delta"]}, "leave delta out"),
        ({"downlink": [*QUANTISED, "delta"]}, "put delta first"),
        ({"downlink": ["delta", {"name": "top_k", "error_feedback": True}]}, "leave error_feedback out"),
    ):
        with pytest.raises(PlanError, match=advice):
            run(digits_plan.replace(changes))


# --- budgets of bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds_paid", "extra"), [(1, 0), (2, -1), (2, 0), (2, 1), (5, 1000)])
def test_a_budget_is_never_exceeded(digits_plan: Plan, rounds_paid: int, extra: int) -> None:
    plan = digits_plan.replace({"evaluation.every": 0, "rounds": 9})
    one = sum(run(plan.replace({"rounds": 1})).history[0][key] for key in ("bytes_up", "bytes_down"))
    budget = rounds_paid * one + extra
    result = run(plan.replace({"stop.bytes": budget}))
    assert len(result.history) == budget // one
    assert result.history[-1]["bytes_up"] + result.history[-1]["bytes_down"] <= budget
    assert 0 < result.accuracy <= 1  # the last round was measured, although nobody knew before that it was the last
    assert result.reason == "byte budget spent"


def test_a_budget_survives_resume_and_writes_the_last_round_once(tmp_path: Path, digits_plan: Plan) -> None:
    plan = digits_plan.replace({"evaluation.every": 0, "rounds": 50})
    one = sum(run(plan.replace({"rounds": 1})).history[0][key] for key in ("bytes_up", "bytes_down"))
    plan = plan.replace({"stop.bytes": 4 * one + one // 2})
    whole = run(plan, out=tmp_path / "whole", report=False)
    assert [row["round"] for row in rows(tmp_path / "whole")] == [1, 2, 3, 4]
    assert rows(tmp_path / "whole")[-1]["test"] == whole.history[-1]["test"]
    run(plan.replace({"rounds": 2}), out=tmp_path / "run", report=False)
    resumed = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(resumed.params_D, whole.params_D)
    assert resumed.reason == whole.reason == "byte budget spent"
    again = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert timeless(again.history)[-1] == timeless(resumed.history)[-1]


def test_a_budget_too_small_for_one_round_is_refused(digits_plan: Plan) -> None:
    with pytest.raises(PlanError, match="does not pay for one round"):
        run(digits_plan.replace({"stop.bytes": 100}))
