"""Parties that hold columns train to the bits of the whole model, and what is refused, lost or broken ends clearly."""

from __future__ import annotations

import math
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import rows
from split.parties import LOCAL, THREE, vertical_plan

from atoll import Dataset, Plan, resume, run
from atoll.core.errors import AtollError, DataError, PlanError, TrainingError
from atoll.core.events import Event, RoundCommitted
from atoll.core.messages import Task
from atoll.simulation.cut_seat import watch_cut
from atoll.split.columns import build_vertical
from atoll.split.half import Half
from atoll.split.joint import JointExchange
from atoll.split.messages import VALUES, Kind, Message, NotFinite, SplitError
from atoll.split.vertical import VerticalEngine, rehearse_vertical
from atoll.train.build import build_job
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.trainer import Trainer

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"local": {**LOCAL, "lr": 0.01, "optimizer": "adam"}},
    "batch norm": {
        "model": "split.parties:normed",
        "parties": [{**party, "model": "split.parties:normed"} for party in THREE],
    },
    "dropout": {
        "model": "split.parties:dropped",
        "parties": [{**party, "model": "split.parties:dropped"} for party in THREE],
    },
    "one party": {"parties": [{"name": "all", "columns": ["0-63"]}]},
    "binary": {
        "data": "split.test_vertical:risks",
        "parties": [{**THREE[0], "columns": ["a*"]}, {**THREE[1], "columns": ["b"]}],
    },
}


def risks() -> Dataset:
    """A table of two columns of numbers and one of categories, to which the target is due in parts."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(240, 5)).astype(np.float32)
    y = (x @ np.array([1.0, 0.5, -1.0, 0.3, 1.0]) > 0).astype(bool)
    names = ("a1", "a2", "b=x", "b=y", "b=z")
    return Dataset(name="risks", train_x=x[:160], train_y=y[:160], test_x=x[160:], test_y=y[160:], feature_names=names)


def whole(plan: Plan) -> torch.Tensor:
    """The end of the ordinary loop on the model with all columns, of one client that has the labels' number."""
    job = build_job(plan)
    client = plan.split.label_holder if plan.split else 0
    model_M = job.first_D
    for version in range(plan.rounds):
        sent = broadcast_of(job, model_M, first_server(job, model_M))
        update = Trainer(job).train_one(Task(client, version, version), sent, {}).update
        model_M = model_M + torch.cat([update.delta_D, *update.aux.values()])[: len(model_M)]
    return model_M


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) < 1e-6


FAST = [("plain", False), ("plain", True), ("dropout", True), ("batch norm", False), ("binary", True)]
BOTH = [(kind, tail) for kind in KINDS for tail in (False, True)]


@pytest.mark.parametrize(
    ("kind", "tail"), [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST)) for case in BOTH]
)
def test_parties_end_with_the_whole_model(kind: str, tail: bool) -> None:
    fields = {**KINDS[kind], **({"split_tail": 3} if tail else {})}
    plan = vertical_plan(fields.pop("parties", None), **fields)
    assert close(run(plan).params_D, whole(plan))


def test_gradients_are_those_of_the_whole_model() -> None:
    """Of the first batch: what each side's step of plain descent with a rate of 1 takes away."""
    plan = vertical_plan(local={"steps": 1, "batch_size": 16, "lr": 1.0}, rounds=1)
    job = build_job(plan)
    task = Task(1, 0, 0)
    from atoll.train.batches import client_batches
    from atoll.train.loop import load_batch

    batch = load_batch(job, torch.from_numpy(client_batches(job, task)[0]), task, job.first_D[:0], 0)
    loss = (job.loss(job.model(batch.x), batch.y) * batch.weight).sum()
    grads = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(job.model.parameters()))])
    assert float(grads.abs().max()) > 0.01
    assert close(job.first_D - run(plan).params_D, grads)


def test_one_party_is_the_unsplit_plan_to_the_bit() -> None:
    """A plan without a cut, whose model has the layers of the only party and of the server, ends with the same bits."""
    from split.test_vertical import as_one

    party = {"name": "all", "columns": ["0-63"], "model": {"name": "mlp", "widths": [12]}, "width": 6}
    parts = run(vertical_plan([party], model={"name": "mlp", "widths": [10]}))
    one = Plan(
        model="split.test_vertical:as_one", partition="split.test_vertical:everything", rounds=2, local=LOCAL,
        engine="inline",
    )  # fmt: skip
    assert torch.equal(parts.params_D, run(one).params_D) and as_one is not None
    assert parts.history[-1]["test"] == run(one).history[-1]["test"]


def as_one(num_classes: int) -> torch.nn.Module:
    """The layers of a bottom and a top model, made in this order."""
    from atoll.models.mlp import mlp

    return torch.nn.Sequential(mlp((64,), 6, (12,)), mlp((6,), num_classes, (10,)))


def everything(dataset: Dataset) -> Any:
    from atoll.data.index import dealt

    return dealt(np.arange(dataset.num_train), np.array([0, dataset.num_train]))


@pytest.mark.parametrize("more", [{}, {"split_in_flight": 1}, {"split_tail": "2"}])
def test_pieces_of_a_batch_add_up_to_it(more: dict[str, Any]) -> None:
    plan = vertical_plan(**more)
    pieces = plan.replace({"split.micro_batches": 3})
    if "split_in_flight" in more:
        pieces = pieces.replace({"split.in_flight": 1})
    assert close(run(plan.replace({"split.in_flight": None})).params_D, run(pieces).params_D)


def test_what_a_round_sends(tmp_path: Path) -> None:
    """Activations up and gradients down of 2 * 4 * q bytes a row; labels of one party; layers once each way."""
    wide = [{**party, "width": 64} for party in THREE]
    plan = vertical_plan(wide, rounds=1, local={"epochs": 1, "batch_size": 64}, split_latency=0.02)
    row = run(plan, out=tmp_path / "run").history[-1]
    expected = 2 * 4 * 3 * 64 * 1437
    assert expected < row["cut_bytes"] < 1.02 * expected
    steps = math.ceil(1437 / 64)
    assert row["messages"] == 3 * (2 * steps + 2) and row["round_trips"] == steps + 1
    assert row["simulated_seconds"] == pytest.approx((steps + 1) * 0.02)
    assert row["clients"] == 3 and row["rejected"] == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The cut" in page and "bank" in page and "labels" in page


def test_binary_labels_take_a_byte_each() -> None:
    fields = {**KINDS["binary"], "local": {"steps": 1, "batch_size": 160}, "rounds": 1}
    up = run(vertical_plan(fields.pop("parties"), **fields)).history[-1]["cut_bytes"]
    assert up < 2 * 4 * 11 * 160 + 160 + 4 * 130


def killed_after(round_number: int, plan: Plan, path: Path) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.row["round"] == round_number:
            os.kill(os.getpid(), signal.SIGKILL)

    run(plan, out=path, watch=[kill], checkpoint_seconds=0.0)


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    plan = vertical_plan(rounds=4, split_codecs=[{"name": "quantise", "bits": 8}], split_tail="3")
    run(plan, out=tmp_path / "whole")
    child = get_context("fork").Process(target=killed_after, args=(2, plan, tmp_path / "killed"))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    resume(tmp_path / "killed")
    ends = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("killed", "whole")]
    assert ends[0] == ends[1] and rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == 4


def test_rows_that_a_party_lacks_are_not_trained_on() -> None:
    pytest.importorskip("private_set_intersection", reason="joining rows needs: pip install 'atoll[psi]'")
    whole_row = run(vertical_plan(rounds=1)).history[-1]
    row = run(vertical_plan(rounds=1, split_missing=0.2)).history[-1]
    held = row["samples"] / whole_row["samples"]
    assert 0.45 < held < 0.58  # 0.8 cubed is 0.512
    assert run(vertical_plan(rounds=1, split_missing=0.2)).history[-1]["samples"] == row["samples"]


def nan_in_one_column() -> Dataset:
    data = risks()
    x = data.train_x.copy()
    x[:, 2:] = 3e38
    return Dataset(
        name="large", train_x=x, train_y=data.train_y.astype(bool), test_x=data.test_x,
        test_y=data.test_y.astype(bool), feature_names=data.feature_names,
    )  # fmt: skip


def test_activations_that_are_not_finite_end_the_run_and_name_the_party() -> None:
    plan = vertical_plan(KINDS["binary"]["parties"], data=nan_in_one_column, rounds=1)
    with pytest.raises(TrainingError, match=r"round 1 ends.*bank: the activations hold NaN"):
        run(plan)


def joint(plan: Plan) -> tuple[Job, JointExchange]:
    job = build_job(plan)
    parties = build_vertical(plan, job)
    tasks = [Task(number, 0, 0) for number in range(3)]
    server = Half(job, parties.server)
    server.restore(parties.server.take(job.first_D))
    return job, JointExchange(parties, tasks, [Half(job, h.cut.client) for h in parties.holders], server)


def activations(holder: int, width: int, batch: int = 16, **more: Any) -> Message:
    return Message(Kind.ACTIVATIONS, holder, 0, 0, 1, batch, {VALUES: torch.zeros(batch, width), **more})


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (activations(0, 6), r"shape \(16, 6\), \(16, 5\) is due"),
        (activations(2, 4, batch=15)._replace(num_samples=16), "shape"),
        (activations(0, 5)._replace(arrays={VALUES: torch.full((16, 5), torch.nan)}), "client 0 that hold NaN"),
        (activations(7, 5), "client 7, but this session is of 0, 1, 2"),
        (activations(0, 5, targets=torch.zeros(16, dtype=torch.uint8)), "should keep them"),
        (activations(1, 6), "without labels"),
        (activations(0, 5)._replace(step=3), "batch 3 while batch 0"),
        (Message(Kind.WEIGHTS, 0, 0, arrays={VALUES: torch.zeros(3)}), "weights while"),
    ],
)
def test_a_message_that_is_not_due_changes_nothing(message: Message, says: str) -> None:
    _, exchange = joint(vertical_plan())
    machine, state = exchange.server.machine, exchange.server.state
    with pytest.raises(SplitError, match=says):
        machine.handle(state, message)
    assert state == exchange.server.state and machine.half.num_steps == 0


def test_rows_in_another_order_are_found_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every party commits to its rows as it has them; the server compares before the first step."""
    plan = vertical_plan()
    job, _ = joint(plan)
    indices = job.federation.train_indices

    def misled(client: int) -> np.ndarray:
        return np.roll(indices(client), 1) if client == 2 else indices(client)

    parties = build_vertical(plan, job)
    server = Half(job, parties.server)
    server.restore(parties.server.take(job.first_D))
    monkeypatch.setattr(job.federation, "train_indices", misled)
    halves = [Half(job, holder.cut.client) for holder in parties.holders]
    exchange = JointExchange(parties, [Task(number, 0, 0) for number in range(3)], halves, server)
    with pytest.raises(SplitError, match="rows of club are not those of bank, which has the labels"):
        exchange.run(job.first_D)
    assert server.num_steps == 0 and all(half.num_steps == 0 for half in halves)


def test_a_party_that_says_nothing_of_its_rows_is_found() -> None:
    _, exchange = joint(vertical_plan())
    state, tag = exchange.server.state, torch.zeros(32, dtype=torch.uint8)
    labels = torch.zeros(16, dtype=torch.uint8)
    for message in (activations(0, 5, rows=tag), activations(2, 4, rows=tag)):
        state, _ = exchange.server.machine.handle(state, message)
    with pytest.raises(SplitError, match="rows of shop and club are not those of bank"):
        exchange.server.machine.handle(state, activations(1, 6, targets=labels))
    assert exchange.server.machine.handle(state, activations(1, 6, targets=labels, rows=tag))[1]


DEFENDED: list[dict[str, Any]] = [
    {"split_defences": [{"name": "nopeek", "weight": 0.5}]},
    {"split_defences": [{"name": "noise", "clip": 1.0, "sigma": 0.5}]},
    {"split_defences": ["max_norm"], "data": "split.test_vertical:risks"},
    {"split_frozen": True, "split_tail": 3},
]


@pytest.mark.parametrize("fields", DEFENDED)
def test_defences_act_on_parties(fields: dict[str, Any]) -> None:
    parties = KINDS["binary"]["parties"] if "data" in fields else None
    common = {key: value for key, value in fields.items() if key in ("data", "split_tail")}
    plain, defended = (run(vertical_plan(parties, **each)).params_D for each in (common, fields))
    assert bool(defended.isfinite().all()) and not torch.equal(plain, defended)
    if "split_frozen" in fields:
        job = build_job(vertical_plan(**fields))
        bottoms = [slot for slot in job.spec.slots if slot.name.startswith("bottoms.")]
        first_D = job.first_D
        for slot in bottoms:
            part = slice(slot.offset, slot.offset + slot.size)
            assert torch.equal(defended[part], first_D[part])


def test_label_defences_spare_the_party_that_has_them() -> None:
    """Only the gradients of the others are perturbed; of the first step, so that all sides begin alike."""
    parties = KINDS["binary"]["parties"]
    fields: dict[str, Any] = {"data": "split.test_vertical:risks", "rounds": 1, "local": {"steps": 1, "batch_size": 16}}
    plans = [vertical_plan(parties, **fields, **more) for more in ({}, {"split_defences": ["max_norm"]})]
    ends, job = [run(plan).params_D for plan in plans], build_job(plans[0])
    moved = {
        slot.name: not torch.equal(*(end[slot.offset : slot.offset + slot.size] for end in ends))
        for slot in job.spec.slots
    }
    assert any(moved[name] for name in moved if name.startswith("bottoms.0"))
    assert not any(moved[name] for name in moved if not name.startswith("bottoms.0"))


def test_what_travels_is_listed(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from atoll.cli.main import app

    (tmp_path / "plan.toml").write_text(vertical_plan().to_toml())
    said = CliRunner().invoke(app, ["plan", "travels", str(tmp_path / "plan.toml")]).output
    assert "bank, labels" in said and "1,437 rows" in said and "the server has" in said


def test_another_batch_size_of_a_second_party_is_refused() -> None:
    _, exchange = joint(vertical_plan())
    state, answers = exchange.server.machine.handle(exchange.server.state, activations(0, 5))
    assert not answers
    with pytest.raises(SplitError, match="its first piece said 16"):
        exchange.server.machine.handle(state, activations(2, 4, batch=12))
    with pytest.raises(SplitError, match="twice"):
        exchange.server.machine.handle(state, activations(0, 5))


def test_weights_of_another_size_are_refused() -> None:
    job, exchange = joint(vertical_plan())
    values = torch.zeros(7)
    with pytest.raises(SplitError, match=r"shape \(7,\)"):
        exchange._machines[0].handle(exchange._states[0], Message(Kind.WEIGHTS, 0, 0, arrays={VALUES: values}))
    with pytest.raises(NotFinite):
        exchange._machines[0].handle(
            exchange._states[0],
            Message(
                Kind.WEIGHTS,
                0,
                0,
                arrays={VALUES: torch.full((exchange._parties.holders[0].cut.client.spec.num_params,), torch.inf)},
            ),
        )
    assert job.first_D.isfinite().all()


def test_a_round_without_a_party_is_an_error() -> None:
    plan = vertical_plan()
    job = build_job(plan)
    engine = VerticalEngine(rehearse_vertical(plan, job))
    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    with pytest.raises(TrainingError, match="needs all 3 parties"):
        engine.train([Task(0, 0, 0), Task(1, 0, 0)], {0: sent}, {})
    engine.close()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"split": {"way": "vertical"}}, "there are no parties"),
    ({"split": {"cut": "2", "parties": THREE}}, "split.way = \"vertical\""),
    ({"split": {"way": "vertical", "parties": THREE}}, "split.labels is missing"),
    ({"split": {"way": "vertical", "parties": THREE, "labels": "bnak"}}, "did you mean 'bank'"),
    ({"split": {"way": "vertical", "parties": [THREE[0]] * 2, "labels": "shop"}}, "two are called"),
    ({"split": {"way": "vertical", "parties": [{"name": "a"}]}}, "has no columns"),
    ({"split": {"way": "vertical", "parties": [{"name": "a b", "columns": [1]}]}}, "a name of letters"),
    ({"split": {"way": "vertical", "parties": THREE, "labels": "bank", "cut": "2"}}, "leave split.cut out"),
    ({"split_handover": "peer"}, "do not hand their layers on"),
    ({"split_tail": "9"}, "no layer '9'"),
    ({"split_tail": 0}, "at least 1"),
    ({"split_missing": 0.99}, "lower it"),
    ({"parties": [{**THREE[0], "columns": ["60-64"]}, THREE[1]]}, "is not a place"),
    ({"parties": [{**THREE[0], "columns": ["age"]}, THREE[1]]}, "have no names"),
    ({"parties": [{**THREE[0], "columns": ["c"]}, THREE[1]], "data": risks}, "no feature 'c'"),
    ({"parties": [{**THREE[0], "model": "cnn_mcmahan"}, THREE[1]]}, "split.parties.model cnn_mcmahan"),
    ({"parties": [{**THREE[0], "model": "split.test_vertical:wide"}, THREE[1]]}, r"outputs of shape \(9,\)"),
    ({"parties": [{**THREE[0], "model": "split.test_vertical:empty"}, THREE[1]]}, "no parameters to train"),
    ({"parties": [{"name": name, "columns": ["0-20"], "model": "split.test_vertical:shared", "width": 5}
                  for name in ("shop", "bank")]}, "share no weights|no parameters"),
    ({"split_tail": "1"}, "the server has no parameters to train"),
    ({"data": "helpers:phrases", "model": "char_lstm"}, "no columns|use a table"),
    ({"model": "split.parties:dropped", "split_micro_batches": 2}, "masks of dropout"),
]  # fmt: skip


def wide(input_shape: tuple[int, ...]) -> torch.nn.Module:
    return torch.nn.Linear(input_shape[0], 9)


def empty() -> torch.nn.Module:
    return torch.nn.Identity()


SHARED = torch.nn.Linear(21, 5)


def shared() -> torch.nn.Module:
    return SHARED


@pytest.mark.parametrize(("fields", "says"), BAD)
def test_what_cannot_be_is_refused_before_training(fields: dict[str, Any], says: str) -> None:
    with pytest.raises((PlanError, DataError), match=says) as refused:
        run(vertical_plan(fields.pop("parties", None), **fields) if "split" not in fields else Plan(**fields))
    assert isinstance(refused.value, AtollError)


def test_the_red_team_refuses_parties() -> None:
    with pytest.raises(PlanError, match="parties that hold columns have rows together"):
        watch_cut(vertical_plan(), 1)
