"""Local training against plain PyTorch written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import FRAME
from torch import Tensor, nn
from torch.nn import functional

from atoll import Dataset, Plan, run
from atoll.core.messages import Broadcast, Task
from atoll.core.parts import Part
from atoll.engine.inline import inline
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.job import Job

ONE_CLIENT = {"name": "iid", "num_clients": 1}


def by_hand(job: Job, optimizer: torch.optim.Optimizer | None = None, mu: float = 0.0, lr: float = 0.1) -> Tensor:
    """Train the job's first client from the job's first parameters with torch alone."""
    federation = job.federation
    x = federation.train_x.to(job.spec.dtype) * federation.dataset.scale
    model = fresh(job)
    start = [p.detach().clone() for p in model.parameters()]
    steps = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    for indices in client_batches(job, Task(0, 0, 0)):
        loss = functional.cross_entropy(model(x[indices]), federation.train_y[indices])
        pull = sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), start, strict=True))
        steps.zero_grad()
        (loss + mu / 2 * pull).backward()
        steps.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def fresh(job: Job) -> nn.Module:
    """The job's model, as it was before training."""
    model = job.model
    views = job.spec.views(job.first_D.clone())
    for name, parameter in model.named_parameters():
        parameter.data = views[name].clone()
    return model


def central_steps(job: Job, lrs: list[float]) -> Tensor:
    """Full-batch gradient descent on all training samples at once."""
    federation, model = job.federation, fresh(job)
    x = federation.train_x.float() * federation.dataset.scale
    for lr in lrs:
        model.zero_grad()
        functional.cross_entropy(model(x), federation.train_y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("engine", ["inline", "vectorised"])
@pytest.mark.parametrize("partition", ["iid", {"name": "dirichlet", "alpha": 0.3, "num_clients": 12}])
def test_fedsgd_with_everybody_is_gradient_descent_on_all_data(engine: str, partition: Any) -> None:
    model = {"name": "mlp_2nn", "hidden": 20}
    plan = Plan(algorithm="fedsgd", partition=partition, model=model, local={"lr": 0.5}, rounds=3, engine=engine)
    expected_D = central_steps(build_job(plan), [0.5, 0.5, 0.5])
    result = run(plan)
    assert (result.params_D - expected_D).abs().max() < 2e-6
    assert (build_job(plan).first_D - expected_D).abs().max() > 1e-2


def test_one_epoch_of_one_batch_is_fedsgd(digits_plan: Plan) -> None:
    whole_batches = digits_plan.replace({"local.batch_size": "all", "local.epochs": 1})
    fedsgd = Plan(**{**vars(digits_plan), "algorithm": "fedsgd", "local": {"lr": 0.1}})
    assert torch.equal(run(whole_batches).params_D, run(fedsgd).params_D)


def test_fedprox_without_a_pull_is_fedavg_to_the_bit(digits_plan: Plan) -> None:
    plain = run(digits_plan).params_D
    assert torch.equal(plain, run(digits_plan.replace({"algorithm": "fedprox", "algorithm.mu": 0.0})).params_D)
    assert not torch.equal(plain, run(digits_plan.replace({"algorithm": "fedprox", "algorithm.mu": 0.1})).params_D)


def test_fedprox_pulls_towards_the_broadcast_model() -> None:
    plan = Plan(
        algorithm={"name": "fedprox", "mu": 0.7},
        partition=ONE_CLIENT,
        model={"name": "mlp_2nn", "hidden": 12},
        local={"steps": 9, "batch_size": 32, "lr": 0.2},
        rounds=1,
        engine="inline",
    )
    expected_D = by_hand(build_job(plan), mu=0.7, lr=0.2)
    assert (run(plan).params_D - expected_D).abs().max() < 1e-6
    assert (by_hand(build_job(plan), mu=0.0, lr=0.2) - expected_D).abs().max() > 1e-4


@pytest.mark.parametrize("engine", ["inline", "vectorised"])
@pytest.mark.parametrize(
    ("part", "reference"),
    [
        ({"name": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.05)),
        ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        ({"name": "sgd", "weight_decay": 0.1}, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
        (
            {"name": "sgd", "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, weight_decay=0.01, nesterov=True),
        ),
        ({"name": "adam"}, lambda p: torch.optim.Adam(p, lr=0.05)),
        (
            {"name": "adam", "beta1": 0.7, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1},
            lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.7, 0.9), eps=1e-3, weight_decay=0.1),
        ),
    ],
    ids=["sgd", "momentum", "decay", "nesterov", "adam", "adam with everything"],
)
def test_optimisers_equal_those_of_torch(engine: str, part: dict[str, Any], reference: Any) -> None:
    """Seven steps in double precision, so that only a wrong formula can differ."""
    plan = Plan(
        partition=ONE_CLIENT,
        model=double_mlp,
        local={"steps": 7, "batch_size": 40, "lr": 0.05, "optimizer": part},
        rounds=1,
        engine=engine,
    )
    job = build_job(plan)
    expected_D = by_hand(job, reference(fresh(job).parameters()))
    params_D = run(plan).params_D
    assert params_D.dtype == torch.float64
    assert (params_D - expected_D).abs().max() < 1e-10
    assert (job.first_D - expected_D).abs().max() > 1e-2


def double_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 11), nn.Tanh(), nn.Linear(11, 10)).double()


def test_adam_in_single_precision_stays_close_to_torch() -> None:
    local = {"steps": 7, "batch_size": 40, "lr": 0.05, "optimizer": "adam"}
    plan = Plan(partition=ONE_CLIENT, local=local, rounds=1, engine="inline")
    job = build_job(plan)
    expected_D = by_hand(job, torch.optim.Adam(fresh(job).parameters(), lr=0.05))
    assert (run(plan).params_D - expected_D).abs().max() < 2e-5


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Part("constant"), [1, 1, 1, 1, 1]),
        (Part("exponential", decay=0.5), [1, 0.5, 0.25, 0.125, 0.0625]),
        (Part("inverse_time", decay=1.0), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
        (Part("step", every=2, factor=0.1), [1, 1, 0.1, 0.1, 0.01]),
    ],
)
def test_schedules(schedule: Part, expected: list[float]) -> None:
    job = build_job(Plan(local={"lr": 3.0, "schedule": schedule}))
    assert [job.lr_of(version) for version in range(5)] == pytest.approx([3 * factor for factor in expected])


def test_the_schedule_counts_rounds() -> None:
    local = {"lr": 0.8, "schedule": {"name": "step", "every": 2, "factor": 0.25}}
    plan = Plan(algorithm="fedsgd", local=local, rounds=3, engine="inline")
    expected_D = central_steps(build_job(plan), [0.8, 0.8, 0.2])
    assert (run(plan).params_D - expected_D).abs().max() < 2e-6


def test_epochs_show_every_sample_and_steps_go_on_where_an_epoch_ends(digits_plan: Plan) -> None:
    job = build_job(digits_plan.replace({"local.epochs": 3}))
    for client in range(12):
        own = np.sort(job.federation.train_indices(client))
        batches = client_batches(job, Task(client, 0, 0))
        assert len(batches) == job.num_steps(client) == 3 * -(-len(own) // 16)
        each = np.array_split(np.arange(len(batches)), 3)
        for epoch in each:
            assert np.array_equal(np.sort(np.concatenate([batches[i] for i in epoch])), own)
        assert not np.array_equal(batches[0], batches[each[1][0]])  # every epoch has an order of its own
    job = build_job(digits_plan.replace({"local.steps": 50}))
    batches = client_batches(job, Task(0, 0, 0))
    own = job.federation.train_indices(0)
    assert len(batches) == job.num_steps(0) == 50
    seen = np.bincount(np.concatenate(batches), minlength=1437)[own]
    assert seen.min() >= seen.max() - 1 > 0


def test_batches_differ_from_round_to_round_and_client_to_client(digits_plan: Plan) -> None:
    job = build_job(digits_plan.replace({"partition": "iid"}))
    first, again = client_batches(job, Task(0, 0, 0)), client_batches(job, Task(0, 0, 0))
    later = client_batches(job, Task(0, 1, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], later[0])
    job = build_job(digits_plan.replace({"local.batch_size": 10_000}))  # larger than any client: one batch of all
    assert [len(batch) for batch in client_batches(job, Task(0, 0, 0))] == [job.federation.num_samples(0)]


def test_the_server_moves_by_its_learning_rate(digits_plan: Plan) -> None:
    plan = digits_plan.replace({"rounds": 1})
    first_D, whole_D = build_job(plan).first_D, run(plan).params_D
    half_D = run(plan.replace({"server.lr": 0.5})).params_D
    assert torch.allclose(half_D - first_D, (whole_D - first_D) / 2, atol=1e-7)


# --- models of one's own ---------------------------------------------------------------------------------------------


def counting_words() -> Dataset:
    """Sequences that count upwards modulo 6, each owner from a start of its own."""
    starts = np.arange(120) % 6
    tokens = (starts[:, None] + np.arange(9)) % 6
    x, y = tokens[:, :-1].astype(np.uint8), tokens[:, 1:]
    return Dataset(
        name="counting", train_x=x, train_y=y, test_x=x[:30], test_y=y[:30], num_classes=6, tokens=True, owners=starts
    )


def test_a_language_model_learns_to_count() -> None:
    plan = Plan(
        data=counting_words,
        partition="natural",
        model={"name": "char_lstm", "hidden": 16, "layers": 1},
        local={"lr": 0.05, "epochs": 4, "batch_size": 5, "optimizer": "adam"},
        rounds=6,
    )
    result = run(plan)
    assert result.accuracy > 0.95
    assert result.history[0]["clients"] == 6
    tokens = torch.from_numpy(counting_words().test_x).long()
    with torch.no_grad():
        scores = result.model(tokens)
    assert scores.shape == (30, 8, 6)
    assert (scores.argmax(-1).numpy() == counting_words().test_y).mean() == pytest.approx(result.accuracy)


class BagOfTokens(nn.Module):
    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, width)
        self.output = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens))


def bag_of_tokens(num_classes: int, width: int = 4) -> nn.Module:
    return BagOfTokens(num_classes, width)


def test_embeddings_stack() -> None:
    plan = Plan(
        data=counting_words,
        partition="natural",
        model=Part(bag_of_tokens, width=7),
        local={"lr": 0.5, "batch_size": 4, "epochs": 2},
        rounds=3,
    )
    ends = [run(plan.replace({"engine": engine})) for engine in ("inline", "vectorised")]
    assert ends[0].params_D.numel() == 6 * 7 + 7 * 6 + 6
    assert (ends[0].params_D - ends[1].params_D).abs().max() < 1e-5
    first_D = build_job(plan).first_D
    assert (ends[0].params_D - first_D)[: 6 * 7].abs().min() > 0  # every row of the embedding was moved


def plain_factory() -> nn.Module:
    """Asks for nothing about the data."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))


class WholeModel(nn.Module):
    """A class may be a factory too."""

    def __init__(self, num_classes: int, hidden: int = 3) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("model", "num_params"),
    [(plain_factory, 640), (WholeModel, 65 * 3 + 40), (Part(WholeModel, hidden=5), 65 * 5 + 60)],
)
def test_a_factory_gets_what_it_asks_for(model: Any, num_params: int) -> None:
    result = run(Plan(model=model, rounds=1, engine="inline"))
    assert result.params_D.numel() == num_params
    assert result.history[0]["bytes_up"] == 10 * (4 * num_params + FRAME)


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize("engine", ["inline", "vectorised", "processes"])
def test_frozen_parameters_do_not_travel(engine: str) -> None:
    plan = Plan(model=half_frozen, rounds=3, local={"lr": 0.5}, engine=engine)
    before = {name: tensor.clone() for name, tensor in build_job(plan).model.state_dict().items()}
    result = run(plan)
    after = result.model.state_dict()
    assert result.params_D.numel() == 170
    assert result.history[0]["bytes_up"] == result.history[0]["bytes_down"] == 10 * (4 * 170 + FRAME)
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert torch.equal(after["1.bias"], before["1.bias"])
    assert (after["3.weight"] - before["3.weight"]).abs().max() > 0.1


def test_double_precision_is_kept_all_the_way(digits_plan: Plan) -> None:
    plan = Plan(**{**vars(digits_plan), "model": double_mlp})
    ends = [run(plan.replace({"engine": engine})) for engine in ("inline", "vectorised", "processes")]
    assert all(end.params_D.dtype == torch.float64 for end in ends)
    assert all(parameter.dtype == torch.float64 for parameter in ends[0].model.parameters())
    assert (ends[0].params_D - ends[1].params_D).abs().max() < 1e-13
    assert (ends[0].params_D - ends[2].params_D).abs().max() < 1e-13
    assert ends[0].history[0]["bytes_up"] == 5 * (8 * ends[0].params_D.numel() + FRAME)


# --- batch norm -------------------------------------------------------------------------------------------------------


def normed_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


def cumulative() -> nn.Module:
    """Batch norm that averages over all batches so far, so that it matters how many it has seen."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 10))


def running_means(job: Job, client: int) -> Tensor:
    """One client's running mean after its first task, by torch alone."""
    model = fresh(job).train()
    model[2].reset_running_stats()
    x = job.federation.train_x.float() / 16
    optimizer = torch.optim.SGD(model.parameters(), lr=job.local.lr)
    for indices in client_batches(job, Task(client, 0, 0)):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[indices]), job.federation.train_y[indices]).backward()
        optimizer.step()
    return model[2].running_mean.clone()


def test_statistics_of_batch_norm_are_averaged_with_the_model() -> None:
    plan = Plan(model=normed_mlp, partition={"num_clients": 3}, local={"batch_size": "all", "lr": 0.1}, rounds=1)
    job = build_job(plan)
    sizes = torch.tensor([float(job.federation.num_samples(client)) for client in range(3)])
    means = torch.stack([running_means(job, client) for client in range(3)])
    result = run(plan)
    expected = (sizes[:, None] * means).sum(0) / sizes.sum()
    assert torch.allclose(result.model[2].running_mean, expected, atol=1e-6)
    assert expected.abs().max() > 1e-3
    assert result.params_D.numel() == 64 * 8 + 8 + 8 + 8 + 80 + 10 + 16


def test_local_statistics_stay_with_their_client() -> None:
    plan = Plan(
        model=normed_mlp,
        partition={"num_clients": 3},
        local={"batch_size": "all", "lr": 0.1, "buffers": "local"},
        rounds=1,
        engine="inline",
    )
    job = build_job(plan)
    assert job.spec.num_params == 64 * 8 + 8 + 8 + 8 + 80 + 10
    expected = {client: running_means(job, client) for client in range(3)}
    job = build_job(plan)
    engine, sent = inline(job), {0: Broadcast(job.first_D, {})}
    for order in ([0, 1, 2], [2, 0, 1]):  # nobody inherits what the client before left behind
        states = engine.train([Task(client, 0, 0) for client in order], sent, {}).states
        for client in range(3):
            assert torch.allclose(states[client]["buffer.2.running_mean"], expected[client], atol=1e-6)
    second = engine.train([Task(0, 1, 1)], {1: sent[0]}, states).states[0]["buffer.2.running_mean"]
    batch_mean = (expected[0] - 0) / 0.1  # the running mean starts at 0 and moves a tenth of the way
    assert torch.allclose(second, 0.9 * expected[0] + 0.1 * batch_mean, atol=1e-5)
    engine.close()


def test_counters_of_batch_norm_do_not_depend_on_who_was_trained_before() -> None:
    plan = Plan(model=cumulative, partition={"num_clients": 4}, local={"batch_size": 36, "lr": 0.1}, rounds=2)
    ends = [run(plan.replace({"engine": "inline"})).params_D]
    for workers in (1, 2):
        ends.append(run(plan.replace({"engine": "processes", "engine.workers": workers})).params_D)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
