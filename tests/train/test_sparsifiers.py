"""Sparsifiers of the uplink: what travels, what it weighs, what is remembered. Shapes: V values, D parameters."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import timeless
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.aggregators.majority import majority
from atoll.api import run
from atoll.core.errors import DataError, PlanError
from atoll.core.messages import Payload, State, Update
from atoll.core.params import ParamSpec, spec_of
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.transform import Chain, Encoding, chain
from atoll.train.build import build_job
from atoll.transforms.feedback import largest_positions, pack_positions, unpack_positions
from atoll.transforms.random_k import draw_positions

MODEL = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(30, 20), nn.Linear(20, 10))
SPEC = spec_of(MODEL)  # 224 + 620 + 210 = 1054 parameters
WITH_FEEDBACK = [
    {"name": "top_k", "fraction": 0.02},
    {"name": "random_k", "fraction": 0.2, "error_feedback": True},
    {"name": "threshold", "magnitude": 3.0},
    {"name": "low_rank", "rank": 1},
    {"name": "sign", "scale": True, "error_feedback": True},
    {"name": "layers", "patterns": ["0.*"], "others_every": 3, "error_feedback": True},
]


def uplink(*parts: Any) -> Chain:
    return chain(*(Part.of(part).build("transforms") for part in parts))


def encoding(seed: int = 0, spec: ParamSpec = SPEC, attempt: int = 1) -> Encoding:
    return Encoding(spec, attempt, np.random.default_rng(seed))


def sent(steps: Chain, vector_V: torch.Tensor, memory: State | None = None, **given: Any) -> tuple[Payload, Any, State]:
    payload, memory = steps.encode(vector_V, memory or {}, encoding(**given))
    return payload, steps.decode(payload), memory


def weight(payload: Payload) -> int:
    """Bytes of all tensors that travel."""
    return payload.carrier.nbytes + sum(tensor.nbytes for side in payload.sides for tensor in side.values())


def randn(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.data())
def test_the_largest_are_kept_exactly_and_ties_change_no_count(numbers: list[int], data: st.DataObject) -> None:
    vector_V = torch.tensor(numbers, dtype=torch.float32)
    count = data.draw(st.integers(1, len(numbers)))
    kept_K = largest_positions(vector_V, count)
    assert len(set(kept_K)) == count
    assert list(kept_K) == sorted(kept_K)
    expected = sorted(map(abs, numbers), reverse=True)[:count]
    assert sorted(map(abs, vector_V[kept_K].tolist()), reverse=True) == expected
    _, decoded_V, _ = sent(uplink({"name": "top_k", "count": count, "error_feedback": False}), vector_V)
    assert torch.equal(decoded_V, torch.zeros_like(vector_V).index_copy(0, torch.tensor(kept_K), vector_V[kept_K]))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200_000), st.floats(0, 1), st.integers(0, 10**6))
def test_positions_survive_the_wire_at_any_density(num: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept_K = np.flatnonzero(rng.random(num) < share**6)  # often very few
    side = pack_positions(kept_K, num)
    assert np.array_equal(unpack_positions(side), kept_K)
    assert sum(v.nbytes for v in side.values()) <= 8 + min((num + 7) // 8, 2 * len(kept_K)) + num // 255


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.data())
def test_redrawn_positions_are_a_set_of_the_right_size(num: int, data: st.DataObject) -> None:
    count, seed = data.draw(st.integers(1, num)), data.draw(st.integers(0, 2**63 - 1))
    kept_K = draw_positions(seed, num, count)
    assert len(np.unique(kept_K)) == len(kept_K) == count
    assert kept_K.min() >= 0
    assert kept_K.max() < num
    assert np.array_equal(kept_K, draw_positions(seed, num, count))


def test_random_k_is_unbiased() -> None:
    """2,000 encodings of 500 values each: a million draws."""
    num, count, times = 1000, 500, 2000
    steps, vector_V = uplink({"name": "random_k", "count": count}), randn(num)
    shared = encoding()
    sum_V = torch.zeros(num, dtype=torch.float64)
    for _ in range(times):
        sum_V += steps.decode(steps.encode(vector_V, {}, shared)[0])
    z_V = (sum_V / times - vector_V) / (vector_V.abs().double() * (num / count - 1) ** 0.5 / times**0.5)
    assert abs(float(z_V.mean())) * num**0.5 < 4
    assert 0.85 < float(z_V.std()) < 1.15
    assert float(z_V.abs().max()) < 5  # of a thousand standard normals


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 4))
def test_threshold_sends_what_reaches_it(seed: int, magnitude: float) -> None:
    vector_V = randn(300, seed)
    steps = uplink({"name": "threshold", "magnitude": magnitude, "error_feedback": False})
    payload, decoded_V, _ = sent(steps, vector_V)
    assert torch.equal(decoded_V, torch.where(vector_V.abs() >= magnitude, vector_V, 0.0))
    assert payload.carrier.numel() == int((vector_V.abs() >= magnitude).sum())


def test_prune_keeps_to_its_first_choice() -> None:
    steps, first_V, second_V = uplink({"name": "prune", "fraction": 0.05}), randn(1054, 1), randn(1054, 2)
    _, decoded_V, memory = sent(steps, first_V)
    chosen_V = decoded_V != 0
    assert int(chosen_V.sum()) == 53
    assert first_V[chosen_V].abs().min() > first_V[~chosen_V].abs().max()
    payload, decoded_V, again = sent(steps, second_V, memory)
    assert torch.equal(decoded_V, torch.where(chosen_V, second_V, 0.0))
    assert torch.equal(memory["0.gaps"], again["0.gaps"])
    assert weight(payload) <= 4 * 53 + 8 + 53 + 1054 // 255
    with pytest.raises(PlanError, match="selected from 1054 values but got 1000"):
        steps.encode(second_V[:1000], memory, encoding())


def matrix_of(decoded_V: torch.Tensor) -> torch.Tensor:
    return decoded_V[224:824].view(20, 30)


def with_matrix(matrix_NM: torch.Tensor) -> torch.Tensor:
    vector_V = randn(1054 + 7, 3)  # seven values of an extra vector
    vector_V[224:824] = matrix_NM.flatten()
    return vector_V


def test_low_rank_is_exact_for_what_has_that_rank_and_leaves_the_rest_alone() -> None:
    vector_V = with_matrix(randn(20 * 3).view(20, 3) @ randn(3 * 30, 1).view(3, 30))
    payload, decoded_V, _ = sent(uplink({"name": "low_rank", "rank": 3, "error_feedback": False}), vector_V)
    torch.testing.assert_close(matrix_of(decoded_V), matrix_of(vector_V), atol=1e-5, rtol=1e-5)
    for start, stop in [(216, 224), (824, 844), (1044, 1061)]:  # biases and the extra vector
        assert torch.equal(decoded_V[start:stop], vector_V[start:stop])
    assert weight(payload) == 4 * (3 * (8 + 27 + 20 + 30 + 10 + 20) + 8 + 20 + 10 + 7) + 3 * 16
    small = spec_of(nn.Linear(3, 2))  # rank 3 would not make it smaller
    assert torch.equal(sent(uplink({"name": "low_rank", "rank": 3}), randn(8), spec=small)[1], randn(8))


def test_the_error_of_low_rank_falls_with_rank_and_with_rounds() -> None:
    matrix_NM = randn(600, 5).view(20, 30)
    vector_V, best = with_matrix(matrix_NM), torch.linalg.svdvals(matrix_NM)

    def errors(rank: int, rounds: int) -> list[float]:
        steps, memory, found = uplink({"name": "low_rank", "rank": rank, "error_feedback": False}), {}, []
        for _ in range(rounds):
            _, decoded_V, memory = sent(steps, vector_V, memory)
            found.append(float((matrix_of(decoded_V) - matrix_NM).norm()))
        return found

    first = [errors(rank, 1)[0] for rank in (1, 2, 4, 8)]
    assert first == sorted(first, reverse=True)
    rounds = errors(2, 40)
    assert all(after <= before + 1e-4 for before, after in pairwise(rounds))
    assert rounds[0] > 1.05 * rounds[-1]
    assert rounds[-1] == pytest.approx(float(best[2:].norm()), rel=0.01)  # the best that rank 2 can do


@pytest.mark.parametrize("part", WITH_FEEDBACK, ids=lambda part: part["name"])
def test_sent_vector_and_residual_sum_to_the_input(part: Any) -> None:
    steps, memory = uplink(part), {}
    sum_in, sum_out = torch.zeros(1054, dtype=torch.float64), torch.zeros(1054, dtype=torch.float64)
    for number in range(50):
        vector_V = randn(1054, number)
        _, decoded_V, memory = sent(steps, vector_V, memory, seed=number, attempt=number)
        sum_in, sum_out = sum_in + vector_V, sum_out + decoded_V
    assert (sum_out + memory["0.residual"] - sum_in).abs().max() < 1e-3
    assert memory["0.residual"].abs().max() > 0.1  # something is kept back
    assert not steps.linear
    assert steps.sensitivity(1.0) == float("inf")


def test_sign_sends_bits_and_a_scale() -> None:
    vector_V = torch.cat([randn(1054), torch.tensor([0.5, -2.0])])
    payload, decoded_V, _ = sent(uplink("sign"), vector_V)
    assert weight(payload) == 132 + 12 + 8
    assert torch.equal(decoded_V[:1054], vector_V[:1054].sign())
    assert torch.equal(decoded_V[1054:], vector_V[1054:])  # extra vectors keep their numbers
    _, decoded_V, _ = sent(uplink({"name": "sign", "scale": True}), vector_V)
    torch.testing.assert_close(decoded_V[:1054], vector_V[:1054].abs().mean() * vector_V[:1054].sign())
    assert uplink({"name": "sign", "scale": True}).sensitivity(2.0) == 2.0
    assert sent(uplink("sign"), torch.zeros(1054))[1].min() == 1.0


def test_layers_sends_what_matches_and_extra_vectors() -> None:
    vector_V = randn(1054 + 5)
    payload, decoded_V, _ = sent(uplink({"name": "layers", "patterns": ["0.*", "2.bias"]}), vector_V)
    kept_V = torch.zeros(1059, dtype=torch.bool)
    kept_V[:224] = kept_V[1044:] = True
    assert torch.equal(decoded_V, torch.where(kept_V, vector_V, 0.0))
    assert weight(payload) == 4 * 239 + 2 * 8 + 8
    sometimes = uplink({"name": "layers", "patterns": "0.*", "others_every": 4})
    assert torch.equal(sent(sometimes, vector_V, attempt=8)[1], vector_V)
    assert not sent(sometimes, vector_V, attempt=9)[1][224:1054].any()


def test_payloads_weigh_what_the_guide_says() -> None:
    vector_V = randn(100_000)
    top, _, _ = sent(uplink("top_k"), vector_V)
    assert weight(top) == pytest.approx(5.09 * 1000 + 8, rel=0.01)
    assert weight(sent(uplink("random_k"), vector_V)[0]) == 4 * 1000 + 16
    half, _, _ = sent(uplink({"name": "prune", "fraction": 0.5}), vector_V)
    assert weight(half) == 4 * 50_000 + 100_000 // 8 + 8


def test_sparsifiers_compose_and_their_values_go_on() -> None:
    vector_V = randn(1054)
    steps = uplink({"name": "top_k", "fraction": 0.1, "error_feedback": False}, {"name": "sign", "scale": True})
    payload, decoded_V, _ = sent(steps, vector_V)
    assert payload.carrier.nbytes == 14  # 106 bits
    kept_V = decoded_V != 0
    assert int(kept_V.sum()) == 106
    assert torch.equal(decoded_V[kept_V].sign(), vector_V[kept_V].sign())


def test_nan_stays_visible_and_is_not_kept_in_the_residual() -> None:
    for part in ("top_k", {"name": "threshold", "magnitude": 1.0}, {"name": "low_rank", "rank": 1}, "sign"):
        vector_V = randn(1054)
        vector_V[500] = torch.nan
        assert sent(uplink(part), vector_V)[1].isnan().any(), part
    steps = uplink({"name": "random_k", "count": 1, "error_feedback": True})
    assert sent(steps, vector_V)[2]["0.residual"].isfinite().all()
    assert list(largest_positions(torch.full((5,), torch.nan), 2)) == [0, 1]


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"name": "top_k", "fraction": 0.1, "count": 3}, "leave one out"),
        ({"name": "top_k", "fraction": 1.5}, r"top_k: fraction must be in \(0, 1\], got 1.5"),
        ({"name": "random_k", "count": 0}, "count must be at least 1"),
        ({"name": "threshold", "magnitude": 0.0}, "magnitude must be above 0"),
        ({"name": "low_rank", "rank": 0}, "rank must be at least 1"),
        ({"name": "sign", "error_feedback": True}, "needs scale = true"),
        ({"name": "layers", "patterns": "0.*", "error_feedback": True}, "would never be sent"),
        ({"name": "layers", "patterns": []}, "patterns must name tensors"),
        ({"name": "layers", "patterns": "0.*", "others_every": -1}, "others_every must be 0"),
    ],
)
def test_options_that_cannot_be_right_are_refused(part: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        uplink(part)


CLIP = {"name": "clip", "norm": 1.0}


def test_a_bound_on_factors_is_no_bound_on_their_product() -> None:
    low_rank = {"name": "low_rank", "rank": 1, "error_feedback": False}
    assert uplink(CLIP, low_rank).sensitivity() == 1.0
    assert uplink(low_rank, CLIP).sensitivity() == math.inf
    assert uplink("top_k", CLIP).sensitivity() == 1.0


def test_a_vote_needs_a_step(digits_plan: Plan) -> None:
    with pytest.raises(PlanError, match="set it"):
        run(digits_plan.replace({"aggregator": "majority"}))


def test_what_cannot_be_encoded_or_decoded_is_refused() -> None:
    for later in ("top_k", "random_k", {"name": "threshold", "magnitude": 1.0}, "prune", "low_rank", "sign", CLIP):
        with pytest.raises(PlanError, match=r"got torch.uint8: put \w+ earlier"):
            sent(uplink("sign", later), randn(1054))
    for later in ("low_rank", {"name": "layers", "patterns": "0.*"}):
        with pytest.raises(PlanError, match="needs all 1054 parameters but got 11 values"):
            sent(uplink("top_k", later), randn(1054))
    with pytest.raises(PlanError, match=r"no tensor of the model matches 'fc\*'"):
        sent(uplink({"name": "layers", "patterns": "fc*"}), randn(1054))
    steps = uplink({"name": "threshold", "magnitude": 1.0}, "top_k")
    memory = sent(steps, randn(1054))[2]
    with pytest.raises(PlanError, match="before steps that change their number"):
        sent(steps, randn(1054, 1), memory)
    payload, _, _ = sent(uplink("top_k"), randn(1054))
    with pytest.raises(DataError, match="got 10 values with 11 positions"):
        uplink("top_k").decode(payload._replace(carrier=payload.carrier[:10]))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.integers(0, 10**6))
def test_the_majority_decides(num: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    updates_CD = rng.integers(-2, 3, (num, size)).astype(np.float32)
    extra_C3 = rng.normal(size=(num, 3)).astype(np.float32)
    weight_C = torch.from_numpy(rng.uniform(1, 100, num))
    update = Update(torch.from_numpy(updates_CD), weight_C, {"extra": torch.from_numpy(extra_C3)})
    rule = majority()
    found, _ = rule.finish(rule.add(rule.zero(), update), rule.init())
    plain = [int(np.sign(sum(np.sign(value) for value in column))) for column in updates_CD.T]
    assert found.delta_D.tolist() == plain
    np.testing.assert_allclose(found.aux["extra"], extra_C3.mean(0), atol=1e-5)
    assert not rule.needs_individuals


@pytest.mark.parametrize(
    "part", [{"name": "top_k", "fraction": 0.05}, "prune", {"name": "low_rank", "rank": 1}], ids=str
)
def test_memory_survives_resume_and_processes(digits_plan: Plan, part: Any, tmp_path: Path) -> None:
    plan = digits_plan.replace({"uplink": [Part.of(part).to_dict()], "rounds": 6})
    whole = run(plan)
    run(plan.replace({"rounds": 3}), out=tmp_path / "run", report=False)
    resumed = run(plan, out=tmp_path / "run", report=False, resume=True)
    assert torch.equal(resumed.params_D, whole.params_D)
    assert timeless(resumed.history) == timeless(whole.history)
    apart = run(plan.replace({"engine": {"name": "processes", "workers": 2}}))
    assert torch.equal(apart.params_D, run(plan.replace({"engine": "vectorised"})).params_D)


@pytest.mark.slow
def test_error_feedback_makes_one_percent_enough() -> None:
    """1 % of the values, each client's largest: as good as all of them in the end, but only if nothing is forgotten."""

    def accuracy(uplink: list[Any]) -> float:
        plan = Plan(
            partition={"name": "dirichlet", "num_clients": 5, "alpha": 0.5},
            model={"name": "mlp_2nn", "hidden": 32},
            policy={"size": 5},
            local={"lr": 0.3, "batch_size": 64},
            uplink=uplink,
            rounds=200,
            evaluation={"every": 0},
            engine={"name": "vectorised", "stack": 5},
        )
        return run(plan).accuracy

    whole = accuracy([])
    assert whole > 0.95
    assert accuracy([{"name": "top_k", "fraction": 0.01}]) > whole - 0.01
    assert accuracy([{"name": "top_k", "fraction": 0.01, "error_feedback": False}]) < whole - 0.03


def test_signs_and_a_vote_train_a_model(digits_plan: Plan) -> None:
    vote = {"uplink": ["sign"], "aggregator": "majority", "server.lr": 0.01, "evaluation.every": 0}
    plan = digits_plan.replace({**vote, "model": "logistic", "partition": {"name": "iid", "num_clients": 12}})
    assert run(plan.replace({"rounds": 40})).accuracy > 0.85
    steps_D = (run(plan.replace({"rounds": 1})).params_D - build_job(plan).first_D).abs()
    torch.testing.assert_close(steps_D, torch.full_like(steps_D, 0.01), atol=1e-6, rtol=0)  # five votes: never even
