"""Whatever a client does has a seat: engines, resume, codecs, secure sums, privacy and rules take it as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_works import REMEMBERED

from atoll import Plan, run
from atoll.commit.run_state import read_state
from atoll.core.client_work import ClientWork
from atoll.core.errors import PlanError, TrainingError
from atoll.core.parts import members
from atoll.data.catalog.digits import digits
from atoll.testing import Case, cases
from atoll.train.array_work import Arrays, ArrayTask, Result, array_work
from atoll.train.federation import build_federation

PLAN = Plan(
    work="own_works:centroids",
    partition={"name": "dirichlet", "num_clients": 8, "alpha": 0.5, "min_samples": 5},
    policy={"size": 8},
    rounds=2,
    engine="inline",
)
WORKS = ("own_works:centroids", "own_works:remembering")


def test_the_mean_of_clients_centroids_is_that_of_all_samples() -> None:
    result = run(PLAN)
    dataset = digits()
    x = dataset.train_x.reshape(dataset.num_train, -1) * dataset.scale
    sums = np.stack([x[dataset.train_y == label].sum(0) for label in range(10)]) / len(x)
    found = result.model.get_parameter("sums").detach().numpy()
    assert np.allclose(found, sums, atol=1e-5)
    assert result.reason == "all rounds done"
    assert result.accuracy > 0.85 and set(result.test) == {"accuracy", "loss"}


@pytest.mark.parametrize("change", [{}, {"secagg": {}}], ids=str)
def test_work_without_a_loss_has_no_training_loss_in_metrics(change: dict[str, Any]) -> None:
    assert ["train_loss" in row for row in run(PLAN.replace(change)).history] == [False, False]


def test_the_training_loss_is_the_mean_over_clients_that_have_one() -> None:
    def sometimes() -> ClientWork:
        def train(arrays: Arrays, task: ArrayTask, memory: Arrays) -> Result:
            num = len(task.x)
            return {"w": np.ones(1)}, num, {"loss": float(num)} if num % 2 else {}

        return array_work(first=lambda dataset: {"w": np.zeros(1)}, train=train, evaluate=lambda arrays, task: {})

    plan = Plan(**{**PLAN.to_dict(), "work": sometimes})
    sizes = build_federation(plan).partition.sizes()
    told = sizes[sizes % 2 == 1]
    assert 0 < len(told) < len(sizes)
    assert run(plan).history[0]["train_loss"] == pytest.approx((told * told).sum() / told.sum())


@pytest.mark.parametrize("case", cases("train.works", *WORKS), ids=str)
def test_works_from_elsewhere_keep_the_laws(case: Case) -> None:
    case.check()


def test_memory_may_be_larger_than_what_travels(tmp_path: Path) -> None:
    plan = PLAN.replace({"work": "own_works:remembering"})
    result = run(plan, out=tmp_path / "run", report=False)
    state = read_state(tmp_path / "run" / "checkpoint.safetensors", plan.identity())
    assert len(result.params_D) == 1
    assert {client: memory["seen"].shape for client, memory in state.clients.items()} == dict.fromkeys(
        range(8), (REMEMBERED,)
    )
    assert result.history[-1]["bytes_up"] < 8 * 2 * 200


@pytest.mark.parametrize(
    "change",
    [
        {"algorithm": "fedadam"},
        {"uplink": ["half"]},
        {"uplink": [{"name": "top_k", "fraction": 0.5}], "downlink": ["delta", "half"]},
        {"aggregator": "median", "attack": "sign_flip", "attackers": {"num": 2}},
        {"detection": "distance", "attack": "gaussian", "attackers": {"num": 1}},
        {"aggregator": "fltrust", "server": {"samples": 50}},
        {"contribution": "leave_one_out", "server": {"samples": 50}},
        {"secagg": {}},
        {"policy": {"name": "buffered", "size": 3, "concurrency": 6}, "devices": "fleet"},
        {
            "privacy": {"name": "central", "clip": 1.0, "sigma": 0.5, "delta": 1e-5, "test_noise": True},
            "sampler": "poisson",
        },
    ],
    ids=str,
)
def test_other_parts_take_it_as_it_comes(change: dict[str, Any]) -> None:
    result = run(PLAN.replace(change))
    assert bool(result.params_D.isfinite().all()) and len(result.history) == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"algorithm": "scaffold"}, "does not take the steps that scaffold changes"),
        ({"algorithm": "qffl"}, "does not take the steps that qffl changes"),
        ({"algorithm": "fedmd", "public": {"name": "held_out", "fraction": 0.1}}, "leave work out"),
        ({"attack": "label_flip", "attackers": {"num": 1}}, "reads its samples itself"),
        ({"privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5}, "sampler": "poisson"}, "private"),
        ({"models": ["logistic", "mlp_2nn"]}, "set model, not models"),
        ({"work": "own_works:missing"}, "own_works"),
        ({"work": "sdg"}, "sgd"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(change: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        run(PLAN.replace(change))


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (({"w": np.zeros(4)}, 1, {}), r"\(4,\).*\(3,\).*same names and shapes"),
        (({"v": np.zeros(3)}, 1, {}), "same names and shapes"),
        (({"w": np.full(3, np.nan)}, 1, {}), "NaN or Inf in 'w'"),
        (({"w": np.array(["a", "b", "c"])}, 1, {}), "'w' as <U1: return numbers"),
        (({"w": np.zeros(3)}, 0, {}), "returned 0 samples"),
        (({"w": np.zeros(3)}, 1.5, {}), "returned 1.5 samples"),
        ({"w": np.zeros(3)}, r"returned dict: return \(arrays, number of samples, metrics\)"),
        (([np.zeros(3)], 1, {}), "returned list as arrays"),
    ],
    ids=str,
)
def test_what_a_function_returns_wrongly_is_refused_by_its_name_and_line(returned: Any, why: str) -> None:
    def mistaken(arrays: Arrays, task: ArrayTask, memory: Arrays) -> Any:
        return returned

    def wrong() -> ClientWork:
        return array_work(first=lambda dataset: {"w": np.zeros(3)}, train=mistaken, evaluate=lambda arrays, task: {})

    with pytest.raises(TrainingError, match=why) as error:
        run(Plan(**{**PLAN.to_dict(), "work": wrong}))
    assert "mistaken (" in str(error.value) and "test_works.py, line" in str(error.value)


def test_works_of_the_catalogue() -> None:
    assert {"consensus", "sgd"} <= set(members("train.works"))
