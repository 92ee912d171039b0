"""What a plan becomes, and what is refused while it is built."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll import Dataset, Plan, run
from atoll.core.errors import DataError, PlanError, TrainingError
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part
from atoll.data.index import Partition, dealt
from atoll.engine.inline import inline
from atoll.engine.processes import processes
from atoll.engine.vectorised import vectorised
from atoll.train.build import build_job
from atoll.train.federation import build_federation

BAD = 3
"""The client whose samples carry a mark."""


def marked() -> Dataset:
    """Five owners of 20 samples; the first feature of one owner's samples is 100."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(140, 4)).astype(np.float32)
    y = (x[:, 1] > 0).astype(np.int64)
    owners = np.repeat(np.arange(5), 20)
    x[:100][owners == BAD, 0] = 100
    return Dataset(
        name="marked", train_x=x[:100], train_y=y[:100], test_x=x[100:], test_y=y[100:], num_classes=2, owners=owners
    )


class NanForMarked(nn.Module):
    def __init__(self, mark: float) -> None:
        super().__init__()
        self.linear, self.mark = nn.Linear(4, 2), mark

    def forward(self, x: Tensor) -> Tensor:
        poison = torch.where(x[..., :1] > self.mark, torch.nan, 0.0)
        return self.linear(x) + poison


def nan_for_marked(mark: float = 50.0) -> nn.Module:
    return NanForMarked(mark)


def marked_plan(engine: str = "inline", **changes: Any) -> Plan:
    return Plan(**{"data": marked, "partition": "natural", "model": nan_for_marked, "engine": engine, **changes})


@pytest.mark.parametrize("build", [inline, vectorised, processes])
def test_one_client_with_nan_is_left_out_and_counted(build: Any) -> None:
    plan = marked_plan(engine=build.__name__, local={"lr": 0.5}, rounds=4)
    result = run(plan)
    assert [row["clients"] for row in result.history] == [4, 4, 4, 4]
    assert [row["rejected"] for row in result.history] == [1, 2, 3, 4]
    assert [row["samples"] for row in result.history] == [80, 80, 80, 80]
    assert all(np.isfinite(row["train_loss"]) for row in result.history)
    assert result.accuracy > 0.7
    job = build_job(plan)
    engine = build(job)
    sent = {0: Broadcast(job.first_D, {})}
    everybody = engine.train([Task(client, 0, 0) for client in range(5)], sent, {})
    engine.close()
    engine = inline(job)
    others = engine.train([Task(client, 0, 0) for client in range(5) if client != BAD], sent, {})
    engine.close()
    assert torch.allclose(everybody.folded["delta"], others.folded["delta"], atol=1e-5)
    assert [report.client for report in everybody.reports if not report.valid] == [BAD]


@pytest.mark.parametrize("engine", ["inline", "vectorised", "processes"])
def test_nan_for_everybody_ends_the_run_with_advice(engine: str) -> None:
    plan = marked_plan(engine=engine, model=Part(nan_for_marked, mark=-1e9), rounds=4)
    with pytest.raises(
        TrainingError,
        match=r"round 1: all 5 updates hold NaN.*lower local\.lr \(now 0\.1\)",
    ):
        run(plan)


class NanForMarkedNormed(NanForMarked):
    def __init__(self) -> None:
        super().__init__(50.0)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x > 50, torch.nan, self.norm(torch.nan_to_num(x))))


def test_a_rejected_client_does_not_remember_its_nan() -> None:
    """Its next task starts from what it remembered before, so that one bad round does not shut it out for good."""
    job = build_job(marked_plan(model=NanForMarkedNormed, local={"buffers": "local"}))
    engine = inline(job)
    work = engine.train([Task(client, 0, 0) for client in range(5)], {0: Broadcast(job.first_D, {})}, {})
    engine.close()
    assert [report.client for report in work.reports if not report.valid] == [BAD]
    assert sorted(work.states) == [0, 1, 2, 4]


def test_too_few_valid_updates_abandon_rounds_until_the_run_gives_up() -> None:
    result = run(marked_plan("vectorised", policy={"min_reports": 5}, rounds=3))
    assert result.reason.startswith("gave up")
    assert result.history == []
    assert torch.equal(result.params_D, build_job(marked_plan()).first_D)


# --- who attacks ------------------------------------------------------------------------------------------------------


def attackers(num_clients: int = 20, seed: int = 0, **who: Any) -> frozenset[int]:
    return build_job(
        Plan(seed=seed, partition={"num_clients": num_clients}, attack="sign_flip", attackers=who)
    ).attackers


def test_attackers_are_picked_by_number_share_name_and_seed() -> None:
    assert len(attackers(num=6)) == 6
    assert attackers(num=6) == attackers(num=6)
    assert attackers(num=6) != attackers(num=6, seed=1)
    assert len(attackers(fraction=0.25)) == 5
    assert attackers(fraction=1.0) == frozenset(range(20))
    assert attackers(num=0) == attackers(fraction=0.0) == frozenset()
    assert attackers(clients=[3, 11, 3]) == {3, 11}
    assert build_job(Plan(attackers={"num": 3})).attackers == frozenset()  # nobody attacks without an attack


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ({"num": 21}, "attackers.num is 21 but the federation has 20 clients"),
        ({"clients": [20]}, "attackers.clients names client 20, but there are only 0 to 19"),
        ({"clients": [-1]}, r"attackers.clients\[0\] must be 0 or more, got -1"),
        ({}, "there is an attack but nobody attacks"),
        ({"num": 1, "clients": [2]}, "give one of num, fraction, clients and added"),
        ({"num": 1, "added": 1}, "give one of num, fraction, clients and added"),
        ({"added": -1}, "attackers.added must be 0 or more"),
        ({"fraction": 1.2}, r"attackers.fraction must be in \[0, 1\]"),
    ],
)
def test_attackers_that_cannot_be_are_refused(who: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        attackers(**who)


def test_added_attackers_leave_all_others_honest() -> None:
    plan = Plan(
        rounds=1,
        partition={"num_clients": 4},
        attack="zero",
        attackers={"added": 6},
        evaluation={"clients_every": 1},
        engine="inline",
    )
    job = build_job(plan)
    alone = build_job(plan.replace({"attack": None}))  # nobody joins without an attack
    assert alone.federation.num_clients == 4 and not alone.federation.added
    assert job.federation.num_clients == 10 and job.attackers == frozenset(range(4, 10))
    held = [job.federation.train_indices(client).tolist() for client in range(10)]
    assert held[:4] == [alone.federation.train_indices(client).tolist() for client in range(4)]
    assert all(len(set(one)) == len(one) == len(held[0]) for one in held[4:])
    assert len({tuple(one) for one in held}) == 10
    assert job.federation.partition.sizes().tolist() == [len(one) for one in held]
    honest, attacked = run(plan.replace({"attack": None})).history[0], run(plan).history[0]
    assert (honest["clients"], attacked["clients"]) == (4, 10)
    assert honest["clients_test"]["num_clients"] == attacked["clients_test"]["num_clients"] == 4


# --- what is refused --------------------------------------------------------------------------------------------------


def empty_client(dataset: Dataset) -> Partition:
    return dealt(np.arange(dataset.num_train), np.array([0, 700, 700, dataset.num_train]))


def no_partition(dataset: Dataset) -> Any:
    return [[0, 1], [2, 3]]


def two_tuples() -> Any:
    return (np.zeros((3, 2)), np.zeros(3)), (np.zeros((3, 2)), np.zeros(3))


def failing_data() -> Dataset:
    raise FileNotFoundError(2, "No such file or directory", "mine.npz")


def no_model() -> Any:
    return "a model"


def nothing_to_train() -> nn.Module:
    return nn.Flatten()


def all_frozen() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).requires_grad_(False)


def for_other_data() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(63, 10))


def few_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4))


def failing_model() -> nn.Module:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"partition": empty_client}, DataError, "client 1 has no samples, and 1 of 3 are empty: use fewer clients"),
        ({"partition": no_partition}, PlanError, "gave list: make one with dealt or drawn"),
        ({"data": two_tuples}, PlanError, "gave tuple: it must return an atoll.Dataset"),
        ({"data": failing_data}, PlanError, "failed with FileNotFoundError: .*mine.npz"),
        ({"model": no_model}, PlanError, "gave str: a factory must return an nn.Module"),
        ({"model": nothing_to_train}, PlanError, "has no parameters: there is nothing to train"),
        ({"model": all_frozen}, PlanError, "no trainable parameters: set requires_grad"),
        ({"model": for_other_data}, PlanError, r"does not fit samples of shape \(1, 8, 8\) with 10 classes"),
        ({"model": few_outputs}, PlanError, "the model has 4 outputs for 10 classes"),
        ({"model": failing_model}, PlanError, "failing_model failed with ZeroDivisionError"),
        ({"model": Part(few_outputs, depth=3)}, PlanError, "few_outputs has no option 'depth'"),
        ({"model": {"name": "mlp_2nn", "hiden": 3}}, PlanError, "no option 'hiden': did you mean 'hidden'"),
        ({"loss": "cross_entropi"}, PlanError, "did you mean 'cross_entropy'"),
        (
            {"engine": "base"},
            PlanError,
            "there is no 'base' in engine: Known: auto, inline, processes, ray",
        ),
        ({"policy": "samplers"}, PlanError, "there is no 'samplers' in rounds"),
        ({"policy": {"size": 11}}, PlanError, "policy.size is 11 but the federation has 10 clients"),
        ({"policy": {"fraction": 1.01}}, PlanError, r"policy.fraction must be in \[0, 1\], got 1.01"),
        ({"policy": {"size": 4, "min_reports": 5}}, PlanError, "min_reports is 5 but a cohort has 4 clients"),
        ({"algorithm": "fedsgd", "local": {"epochs": 2}}, PlanError, "fedsgd fixes local.epochs = 1"),
        ({"uplink": "clip"}, PlanError, r"clip: uplink\[0\].norm is missing: give it a value"),
        ({"partition": {"num_clients": 1438}}, PlanError, "ask for at most 1437 clients"),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
def test_what_cannot_be_right_is_refused_before_training(changes: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        run(Plan(**{"engine": "inline", **changes}))


def test_a_part_with_its_options_baked_in_is_refused() -> None:
    """Its options would be missing from the written plan, and two different runs would look alike."""
    with pytest.raises(PlanError, match="a part is a name, a function or a class"):
        Plan(model=partial(nan_for_marked, mark=1.0))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "samples_per_client is None: leave it out"),
        (object(), "must be a number, text, list or table, got object"),
        (torch.ones(3), "got Tensor"),
    ],
)
def test_options_that_a_plan_file_cannot_hold_are_refused(value: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan(partition={"name": "iid", "samples_per_client": value})


def test_options_come_as_they_would_from_a_plan_file() -> None:
    plan = Plan(model=Part("mlp_2nn", hidden=np.int64(5)), attack=Part("sign_flip", scale=np.float32(0.5)))
    assert plan.model.options == {"hidden": 5}
    assert type(plan.model.options["hidden"]) is int
    assert Part("mine", shape=(3, 4)).options == {"shape": [3, 4]}
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan.from_toml(plan.to_toml()).identity() == plan.identity()


def test_arrays_that_torch_dislikes_are_taken(recwarn: pytest.WarningsRecorder) -> None:
    x = np.arange(80, dtype=np.float32).reshape(20, 4)[::-1]
    y = (np.arange(20) % 2)[::-1]
    x.flags.writeable = False
    data = Dataset(name="turned", train_x=x, train_y=y, test_x=x, test_y=y, num_classes=2)
    federation = build_federation(Plan(data=lambda: data, partition={"num_clients": 2}))
    assert torch.equal(federation.train_x[0], torch.tensor([76.0, 77.0, 78.0, 79.0]))
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.parametrize("num_clients", [1437, 1])
def test_the_smallest_and_the_largest_client(num_clients: int) -> None:
    policy = {"fraction": 0.0}  # one client
    for engine in ("inline", "vectorised"):
        result = run(Plan(partition={"num_clients": num_clients}, policy=policy, rounds=2, engine=engine))
        assert [row["clients"] for row in result.history] == [1, 1]
        assert result.history[0]["samples"] == 1437 // num_clients


def test_batch_norm_with_one_sample_says_what_to_do() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    plan = {"model": normed, "partition": {"num_clients": 1437}, "policy": {"size": 2}}
    for engine in ("auto", "inline", "processes", "vectorised"):
        with pytest.raises(PlanError, match=r"batch of 1.*more than 1 value per channel.*batch norm needs two samples"):
            run(Plan(**plan, engine=engine))


class AsksForItem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1)) * (2 if x.sum().item() > 0 else 1)


def test_a_model_that_cannot_be_stacked_runs_in_every_engine() -> None:
    engines = ("inline", "auto", "vectorised", "processes")
    ends = [run(Plan(model=AsksForItem, rounds=1, engine=engine)).params_D for engine in engines]
    assert all(torch.equal(ends[0], end) for end in ends[1:])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x.flatten(1))))))


@pytest.mark.parametrize("engine", ["inline", "vectorised"])
def test_tied_weights_stay_tied_and_are_counted_once(engine: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    result = run(Plan(model=Tied, rounds=2, engine=engine), out=tmp_path / "run", report=False)
    assert result.params_D.numel() == 64 * 64 + 64 + 64 + 650
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert torch.equal(written["first.weight"], written["second.weight"])
    assert torch.equal(written["first.weight"], result.model.first.weight)
    assert result.model.first.weight is result.model.second.weight


class Convolving(nn.Module):
    def __init__(self, views: bool) -> None:
        super().__init__()
        self.conv, self.linear, self.views = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 10), views

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x).relu()
        return self.linear(found.view(len(x), -1) if self.views else found.flatten(1))


def convolving(views: bool = False) -> nn.Module:
    return Convolving(views)


def test_images_lie_channels_last_where_the_model_takes_them_so() -> None:
    plans = [
        Plan(model=Part(convolving, views=views), rounds=3, local={"lr": 0.5}, engine="inline")
        for views in (False, True)
    ]
    jobs = [build_job(plan) for plan in plans]
    assert [job.layout for job in jobs] == [torch.channels_last, torch.contiguous_format]
    x = jobs[0].inputs(jobs[0].federation.features(jobs[0].federation.train_x[:5]))
    assert x.stride() == (64, 1, 8, 1)
    assert build_job(Plan(model="mlp_2nn")).layout == torch.contiguous_format
    results = [run(plan) for plan in plans]
    for one, other in zip(*(result.model.parameters() for result in results), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
