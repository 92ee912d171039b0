"""Whole runs under secure aggregation: the real protocol, the same model, and nothing that needs single updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rows, timeless

from atoll import Plan, run
from atoll.core.errors import PlanError
from atoll.core.messages import Update
from atoll.secagg.encoding import encode, finest
from atoll.secagg.masks import Stream
from atoll.train.secure import EXTRAS, MOST_LOSS, Largest, from_sum, length, to_integers

PLAN = Plan(rounds=4, partition={"num_clients": 12}, local={"lr": 0.5}, engine="inline")
NOISE = {"clip": 1.0, "sigma": 20.0, "delta": 1e-4}
LOSSY = {"lost": 0.25, "scheme": {"name": "pairwise", "server": "curious", "dropouts": 0.5}}


def close(left: Any, right: Any, atol: float) -> None:
    for name, tensor in left.model.state_dict().items():
        assert torch.allclose(tensor, right.model.state_dict()[name], atol=atol), name


@pytest.mark.parametrize("scheme", ["pairwise", {"name": "pairwise", "server": "curious"}, "additive", "ckks"])
def test_the_model_is_that_of_the_plain_run_but_for_rounding(scheme: Any) -> None:
    plain, secret = run(PLAN), run(PLAN.replace({"secagg": {"scheme": scheme}}))
    close(plain, secret, atol=1e-5)
    told = secret.history[-1]["secagg"]
    assert (told["asked"], told["lost"], told["cut"]) == (12, 0, 0.0)
    for before, now in zip(plain.history, secret.history, strict=True):
        assert now["clients"] == 12 and now["samples"] == before["samples"]
        assert now["train_loss"] == pytest.approx(before["train_loss"], abs=1e-5)
        assert now["bytes_up"] > before["bytes_up"]


@pytest.mark.parametrize("algorithm", ["scaffold", "fednova", {"name": "feddyn"}])
def test_extra_vectors_and_other_weights_are_added_too(algorithm: Any) -> None:
    plan = PLAN.replace({"algorithm": algorithm, "local.lr": 0.1})
    close(run(plan), run(plan.replace({"secagg": {"clip": 16.0, "modulus_bits": 64}})), atol=1e-6)
    close(run(plan), run(plan.replace({"secagg": {"clip": 16.0}})), atol=2e-4)  # a weight of 1 of 150 costs 7 bits


def test_batch_norm_statistics_are_added_too() -> None:
    plan = PLAN.replace({"model": "helpers:normed", "local.lr": 0.05, "rounds": 2})
    close(run(plan), run(plan.replace({"secagg": {"modulus_bits": 64}})), atol=1e-5)  # whatever the clip


@pytest.mark.parametrize("engine", ["inline", {"name": "vectorised", "stack": 4}, {"name": "processes", "workers": 2}])
def test_masks_are_new_every_time_and_the_result_is_not(engine: Any) -> None:
    plan = PLAN.replace({"secagg": LOSSY, "engine": engine})
    first, second = run(plan), run(plan)
    close(first, second, atol=0)
    assert timeless(first.history) == timeless(second.history)


def test_engines_agree() -> None:
    plan = PLAN.replace({"secagg": LOSSY})
    inline, stacked = run(plan), run(plan.replace({"engine": {"name": "processes", "workers": 2, "stack": 3}}))
    close(inline, stacked, atol=1e-5)
    assert [row["secagg"]["lost"] for row in inline.history] == [row["secagg"]["lost"] for row in stacked.history]


def test_a_resumed_run_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    plan = PLAN.replace({"secagg": {**LOSSY, "groups": 2}, "algorithm": "scaffold", "local.lr": 0.1})
    whole = run(plan, out=tmp_path / "whole", report=False)
    run(plan.replace({"rounds": 2}), out=tmp_path / "half", report=False)
    resumed = run(plan, out=tmp_path / "half", report=False, resume=True)
    close(whole, resumed, atol=0)
    assert timeless(rows(tmp_path / "whole")) == timeless(rows(tmp_path / "half"))


def test_lost_clients_are_left_out_and_counted() -> None:
    history = run(PLAN.replace({"rounds": 8, "secagg": LOSSY})).history
    assert all(row["clients"] + row["secagg"]["lost"] == row["secagg"]["asked"] == 12 for row in history)
    assert len({row["secagg"]["lost"] for row in history}) > 1
    assert 0.1 < sum(row["secagg"]["lost"] for row in history) / (8 * 12) < 0.3  # those after their vector still count


def test_devices_that_fail_are_lost_at_some_step() -> None:
    plan = PLAN.replace({"devices": {"name": "fleet", "dropout": 0.2}, "secagg": {**LOSSY, "lost": 0.0}, "rounds": 6})
    history = run(plan).history
    assert sum(row["secagg"]["lost"] for row in history) == history[-1]["failed"] > 0


def test_an_attempt_with_too_many_lost_is_abandoned_and_the_next_one_goes_on() -> None:
    secagg = {"lost": 0.3, "scheme": {"name": "pairwise", "dropouts": 0.25}}
    result = run(PLAN.replace({"secagg": secagg, "rounds": 6}))
    last = result.history[-1]
    assert last["round"] == 6 and last["abandoned"] > 0
    assert all(row["secagg"]["lost"] <= 3 for row in result.history)
    assert last["bytes_up"] > 6 * 9 * 2600  # what the abandoned ones cost counts


@pytest.mark.parametrize("scheme", ["additive", "ckks"])
def test_a_sum_of_two_is_opened_only_if_the_plan_says_so(scheme: str) -> None:
    plan = PLAN.replace({"partition.num_clients": 4, "rounds": 6, "secagg": {"scheme": scheme, "lost": 0.4}})
    for settings, fewest in (({}, 3), ({"secagg.min_survivors": 2}, 2)):
        history = run(plan.replace(settings)).history
        assert min(row["clients"] for row in history) == fewest


def test_who_has_nan_refuses_to_add_it() -> None:
    plan = PLAN.replace({"attack": "not_finite", "attackers": {"num": 2}, "secagg": LOSSY | {"lost": 0.0}})
    result = run(plan)
    assert [row["clients"] for row in result.history] == [10] * 4
    assert result.history[-1]["rejected"] == 8
    assert all(bool(tensor.isfinite().all()) for tensor in result.model.state_dict().values())


PRIVATE = PLAN.replace(
    {
        "sampler": "round_robin",
        "privacy": {"name": "distributed", "clip": 0.5, "sigma": 0.5, "delta": 1e-4, "dropouts": 3, "test_noise": True},
    }
)


@pytest.mark.parametrize("scheme", ["pairwise", "additive", "ckks"])
def test_noise_that_clients_share_is_added_under_masks_to_the_bit(scheme: str) -> None:
    open_, masked = run(PRIVATE), run(PRIVATE.replace({"secagg.scheme": scheme}))
    close(open_, masked, atol=0)
    assert [row["privacy"] for row in open_.history] == [row["privacy"] for row in masked.history]
    assert "train_loss" not in masked.history[-1] and "samples" not in masked.history[-1]


def test_a_private_sum_that_lacks_too_much_noise_is_never_opened() -> None:
    plan = PRIVATE.replace({"rounds": 6, "secagg": LOSSY})
    history = run(plan).history
    assert history[-1]["abandoned"] > 0
    assert all(row["clients"] >= 12 - 3 for row in history)


@pytest.mark.parametrize(("name", "options"), [("local", {"clip": 0.5}), ("sample", {"clip": 1.0})])
def test_clients_that_protect_themselves_may_add_in_secret(name: str, options: dict[str, float]) -> None:
    privacy = {"name": name, "sigma": 0.5, "delta": 1e-4, "test_noise": True, **options}
    plan = PLAN.replace({"privacy": privacy, "rounds": 2})
    open_, masked = run(plan), run(plan.replace({"secagg": {"modulus_bits": 64}}))
    close(open_, masked, atol=1e-5)
    assert "train_loss" not in masked.history[-1]


def test_groups_of_let_a_robust_rule_see_sums() -> None:
    """Two of twenty send large nonsense: it drowns the mean, and the median of the groups' means hardly moves."""
    plan = Plan(
        rounds=6,
        partition={"num_clients": 20},
        local={"lr": 0.5},
        engine="inline",
        attack={"name": "sign_flip", "scale": 30.0},
        attackers={"num": 2},
    )
    bare = run(plan.replace({"secagg": {"scheme": "additive"}})).test["accuracy"]
    held = run(
        plan.replace({"secagg": {"scheme": "additive", "groups": 7, "min_survivors": 2}, "aggregator": "median"})
    )
    assert bare < 0.5 < 0.75 < held.test["accuracy"]
    assert held.history[-1]["clients"] == 20


def test_groups_of_are_drawn_anew_each_round_and_leave_nobody_out() -> None:
    from atoll.commit.secure_sum import groups_of
    from atoll.core.messages import Task
    from atoll.train.build import build_job

    job = build_job(PLAN.replace({"secagg": {"groups": 3}}))
    drawn = [groups_of(job, [Task(client, 0, attempt) for client in range(11)]) for attempt in range(4)]
    assert all(sorted(client for group in each for client in group) == list(range(11)) for each in drawn)
    assert all({len(group) for group in each} == {3, 4} for each in drawn)
    assert len({tuple(each) for each in drawn}) == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"aggregator": "median"}, "secagg.groups"),
        ({"aggregator": {"name": "krum", "f": 2}, "secagg.groups": 4}, "2f \\+ 3"),
        ({"aggregator": "majority", "server.lr": 0.01}, "secagg.groups"),
        ({"secagg.groups": 7}, "leaves 1 of 12 clients"),
        ({"secagg.groups": 5}, "fewer than 3"),
        ({"secagg.scheme": "additive", "secagg.groups": 6}, "fewer than 3"),
        ({"uplink": ["quantise"]}, "quantise does not survive addition"),
        ({"policy": {"name": "buffered", "concurrency": 6, "size": 3}, "devices": "fleet"}, "cohort"),
        ({"sampler": "importance"}, "each client's norm"),
        ({"detection": "distance"}, "hides"),
        ({"contribution": "leave_one_out", "server.samples": 50}, "hides"),
        ({"evaluation.clients_every": 1}, "hides"),
        ({"algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}}, "leave secagg out"),
        ({"sampler": "poisson", "privacy": {"name": "central", **NOISE}}, "privacy distributed"),
        ({"sampler": "round_robin", "privacy": {"name": "distributed", **NOISE}, "secagg.groups": 3}, "leave secagg"),
        ({"sampler": "round_robin", "privacy": {"name": "distributed", "bits": 24, **NOISE}}, "does not fit"),
        ({"secagg.clip": 0.0}, "above 0"),
        ({"secagg.groups": 0}, "at least 1"),
        ({"secagg.lost": 1.0}, "in \\[0, 1\\)"),
        ({"secagg.scheme": "rot13"}, "pairwise"),
        ({"secagg.modulus_bits": 16}, "16"),
        ({"secagg.rubbish": 1}, "unknown key"),
    ],
)
def test_what_needs_more_than_sums_is_refused_with_the_way_out(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        run(PLAN.replace({"secagg": {}} | settings))


LARGEST, LAYOUT = Largest(100.0, 100), Update(torch.zeros(5), torch.tensor(0.0), {"c": torch.zeros(5)})


def added(*vectors: np.ndarray) -> np.ndarray:
    return np.sum(np.stack(vectors).astype(np.uint64), axis=0).astype(np.uint32)


def honest(values: list[float], weight: float, samples: int, loss: float, num: int) -> np.ndarray:
    update = LAYOUT.rebuilt(torch.tensor(values))._replace(weight=torch.tensor(weight))
    return to_integers(update, samples, loss, LARGEST, finest(1.0, num), Stream(bytes(32)))


def test_a_sum_says_the_weighted_mean_and_no_more() -> None:
    one = honest([0.5, 0, -0.25, 2.0, 0, 0.1, 0.2, 0, 0, 0], 100, 50, 3.0, 2)
    two = honest([0.0, 1, -0.25, 0.5, 0, 0.1, 0.4, 0, 0, 0], 25, 10, 1000.0, 2)
    found = from_sum(added(one, two), 2, LAYOUT, LARGEST, finest(1.0, 2))
    assert found is not None
    assert torch.allclose(found.update.delta_D, torch.tensor([0.4, 0.2, -0.25, 0.9, 0.0]), atol=1e-6)
    assert torch.allclose(found.update.aux["c"], torch.tensor([0.1, 0.24, 0, 0, 0]), atol=1e-6)
    assert float(found.update.weight) == pytest.approx(125)
    assert found.samples == 60 and found.loss == pytest.approx((50 * 3 + 10 * MOST_LOSS) / 60, abs=1e-4)
    assert found.cut == pytest.approx(1 / 20)


@pytest.mark.parametrize("modulus_bits", [32, 64])
def test_exact_extras_are_neither_cut_nor_rounded(modulus_bits: Any) -> None:
    """A count of steps or a variance is far beyond the clip of 1, and arrives to the last bits all the same."""
    encoding = finest(1.0, 500, modulus_bits)
    layout = Update(torch.zeros(5), torch.zeros(()), {"steps": torch.zeros(1), "statistics": torch.zeros(3)})
    told = [(100.0, 50.0, [1e5, -3e-7, 0.0]), (25.0, 7.0, [-1e3, 2e-6, 1.5])]
    vectors = [
        to_integers(
            layout._replace(
                weight=torch.tensor(weight), aux={"steps": torch.tensor([s]), "statistics": torch.tensor(v)}
            ),
            50,
            1.0,
            LARGEST,
            encoding,
            Stream(bytes(32)),
        )
        for weight, s, v in told
    ]
    assert all(len(each) == length(layout, encoding) for each in vectors)
    found = from_sum(sum(vectors[1:], start=vectors[0]), 2, layout, LARGEST, encoding)
    assert found is not None
    assert torch.allclose(found.update.aux["steps"], torch.tensor([(100 * 50.0 + 25 * 7) / 125]), rtol=1e-6, atol=0)
    wanted = torch.tensor([(100 * a + 25 * b) / 125 for a, b in zip(told[0][2], told[1][2], strict=True)])
    assert torch.allclose(found.update.aux["statistics"], wanted, rtol=1e-6, atol=1e-11)


def test_no_client_can_move_a_mean_beyond_the_clip() -> None:
    encoding = finest(1.0, 3)
    good = [honest([0.1] * 10, 100, 50, 1.0, 3) for _ in range(2)]
    rng = np.random.default_rng(0)
    kept = 0
    for _ in range(300):
        bad = rng.integers(0, 1 << 32, 10 + EXTRAS + 1, dtype=np.uint32)
        bad[-1] = encode(np.zeros(0), 1.0, encoding, Stream(bytes(32)))[0]  # a lie about the count is found out
        found = from_sum(added(*good, bad), 3, LAYOUT, LARGEST, encoding)
        if found is not None:
            kept += 1
            assert float(found.update.vector().abs().max()) <= 1.0 and found.update.weight <= 300
    assert 0 < kept < 300
    bad[-1] += 5 * encoding.levels
    assert from_sum(added(*good, bad), 3, LAYOUT, LARGEST, encoding) is None
