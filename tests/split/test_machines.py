"""The machines refuse what is not due, say why, and are as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from split.models import plan_of
from torch import Tensor, nn

from atoll import run
from atoll.core.errors import PlanError, TrainingError
from atoll.core.messages import Task
from atoll.split.half import Half
from atoll.split.machines import ClientMachine, ClientState, ServerMachine, ServerState
from atoll.split.messages import TARGETS, VALUES, Kind, Message, NotFinite, SplitError
from atoll.split.parties import Parties, build_parties
from atoll.split.session import Phase, session_of
from atoll.train.batches import client_batches
from atoll.train.build import build_job
from atoll.train.loop import load_batch


class Table(NamedTuple):
    """Both machines of a session of a few batches."""

    parties: Parties
    client: ClientMachine
    server: ServerMachine
    weights: Message

    def begun(self) -> tuple[ClientState, list[Message]]:
        return self.client.handle(ClientState(), self.weights)


def table(**split: Any) -> Table:
    plan = plan_of({"cut": "2", **split}, local={"steps": 2, "batch_size": 10, "lr": 0.05})
    job = build_job(plan)
    parties, task = build_parties(plan, job), Task(0, 0, 0)
    batches = client_batches(job, task)
    session = session_of(job, task, len(batches), parties.split.micro_batches)
    client = ClientMachine(
        cut=parties.cut,
        half=Half(job, parties.cut.client),
        session=session,
        load=lambda step: load_batch(job, torch.from_numpy(batches[step]), task, job.first_D[:0], step),
        in_flight=parties.split.in_flight or parties.split.micro_batches,
    )
    server = ServerMachine(
        cut=parties.cut, half=Half(job, parties.cut.server), session=session, holders={0: parties.cut.shape}, labels=0
    )
    server.half.restore(parties.cut.server.take(job.first_D))
    values = parties.cut.client.take(job.first_D)
    return Table(parties, client, server, Message(Kind.WEIGHTS, 0, 0, arrays={VALUES: values}))


def with_values(change: Callable[[Tensor], Tensor]) -> Callable[[Message], Message]:
    return lambda message: message._replace(arrays={**message.arrays, VALUES: change(message.values)})


def with_targets(change: Callable[[Tensor], Tensor]) -> Callable[[Message], Message]:
    return lambda message: message._replace(arrays={**message.arrays, TARGETS: change(message.arrays[TARGETS])})


def one_is(value: float) -> Callable[[Tensor], Tensor]:
    def change(values: Tensor) -> Tensor:
        values = values.clone()
        values.view(-1)[3] = value
        return values

    return change


HOSTILE: dict[str, tuple[Callable[[Message], Message], str]] = {
    "wrong width": (with_values(lambda v: v[:, :-1]), "cut the model alike"),
    "too few samples": (with_values(lambda v: v[:-1]), "cut the model alike"),
    "another batch": (lambda m: m._replace(step=1), "batch 1 while batch 0 is due"),
    "another kind": (lambda m: m._replace(kind=Kind.WEIGHTS), "got weights while exchanging batches"),
    "gradients that nobody asked for": (lambda m: m._replace(kind=Kind.OUTPUT_GRADIENTS), "activations is due"),
    "another client": (lambda m: m._replace(holder=7), "client 7"),
    "too large a batch": (lambda m: m._replace(num_samples=1000), "1 to 10 are allowed"),
    "no samples": (lambda m: m._replace(num_samples=0), "1 to 10 are allowed"),
    "a piece too many": (lambda m: m._replace(piece=2), "pieces"),
    "other pieces": (lambda m: m._replace(pieces=5), "pieces"),
    "no labels": (lambda m: m._replace(arrays={VALUES: m.values}), "without labels"),
    "too few labels": (with_targets(lambda y: y[:-1]), "one for each sample"),
    "labels of another type": (with_targets(lambda y: y.double()), "one for each sample"),
    "a class too many": (with_targets(lambda y: y + 10), "classes are 0 to 9"),
    "no values": (lambda m: m._replace(arrays={TARGETS: m.arrays[TARGETS]}), "no array 'values'"),
}
BROKEN = {"NaN": float("nan"), "Inf": float("inf")}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_server_refuses_and_goes_on_as_before(name: str) -> None:
    change, text = HOSTILE[name]
    tables, ends = (table(micro_batches=2), table(micro_batches=2)), []
    for number, each in enumerate(tables):
        client, [first, second] = each.begun()
        state, before = ServerState(), each.server.half.vector
        if number:
            with pytest.raises(SplitError, match=text):
                each.server.handle(state, change(first))
            assert torch.equal(each.server.half.vector, before)
        for message in (first, second):
            state, answers = each.server.handle(state, message)
            for answer in answers:
                client, _ = each.client.handle(client, answer)
        assert client.step == state.step == 1
        ends.append(torch.cat([each.client.half.vector, each.server.half.vector]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("value", BROKEN)
def test_values_that_are_not_finite_end_a_session(value: str) -> None:
    each = table()
    state, [message] = each.begun()
    before = each.server.half.vector
    with pytest.raises(NotFinite, match=r"lower local\.lr"):
        each.server.handle(ServerState(), with_values(one_is(BROKEN[value]))(message))
    assert torch.equal(each.server.half.vector, before)
    _, [gradients] = each.server.handle(ServerState(), message)
    before = each.client.half.vector
    with pytest.raises(NotFinite, match="gradients of client 0"):
        each.client.handle(state, with_values(one_is(BROKEN[value]))(gradients))
    assert torch.equal(each.client.half.vector, before)


def test_a_message_comes_once() -> None:
    each = table(micro_batches=2)
    client, [first, _] = each.begun()
    state, [answer] = each.server.handle(ServerState(), first)
    with pytest.raises(SplitError, match="twice"):
        each.server.handle(state, first)
    client, _ = each.client.handle(client, answer)
    with pytest.raises(SplitError, match="not on its way"):
        each.client.handle(client, answer)


def test_a_client_takes_its_layers_first_and_once() -> None:
    each = table()
    state, [message] = each.begun()
    _, [gradients] = each.server.handle(ServerState(), message)
    with pytest.raises(SplitError, match="while waiting for weights"):
        each.client.handle(ClientState(), gradients)
    with pytest.raises(SplitError, match="got weights while exchanging batches"):
        each.client.handle(state, each.weights)
    with pytest.raises(SplitError, match="shape"):
        each.client.handle(ClientState(), with_values(lambda v: v[:-1])(each.weights))


def test_outputs_come_before_gradients_where_the_client_has_the_tail() -> None:
    each = table(tail="4")
    state, [message] = each.begun()
    assert TARGETS not in message.arrays
    with pytest.raises(SplitError, match="should keep them"):
        labels = torch.zeros(10, dtype=torch.uint8)
        each.server.handle(ServerState(), message._replace(arrays={**message.arrays, TARGETS: labels}))
    server, [outputs] = each.server.handle(ServerState(), message)
    with pytest.raises(SplitError, match="before its outputs"):
        each.client.handle(state, outputs._replace(kind=Kind.GRADIENTS))
    state, [back] = each.client.handle(state, outputs)
    with pytest.raises(SplitError, match="not on its way"):
        each.client.handle(state, outputs)
    server, [gradients] = each.server.handle(server, back)
    state, _ = each.client.handle(state, gradients)
    assert state.step == server.step == 1 and len(state.losses) == 1 and not server.losses


def test_a_step_of_another_client_within_a_batch_is_refused() -> None:
    """Where clients share the server's layers, a batch is finished before the next begins."""
    each = table(tail="4")
    state, [message] = each.begun()
    server, [outputs] = each.server.handle(ServerState(), message)
    _, [back] = each.client.handle(state, outputs)
    each.server.half.step([torch.zeros_like(leaf) for leaf in each.server.half.leaves], torch.tensor(0.1))
    with pytest.raises(SplitError, match="another client within this batch"):
        each.server.handle(server, back)


def test_a_party_that_stops_leaves_the_session_where_it_was() -> None:
    """The server waits, and a client that comes back begins anew from its layers, to the same bits."""
    each = table()
    begun = each.server.half.vector
    state, [message] = each.begun()
    server, [gradients] = each.server.handle(ServerState(), message)
    state, _ = each.client.handle(state, gradients)
    after_one = torch.cat([each.client.half.vector, each.server.half.vector])
    assert server.phase == Phase.TRAINING and server.step == 1 and not server.begun
    each.server.half.restore(begun)
    again, [message] = each.begun()
    _, [gradients] = each.server.handle(ServerState(), message)
    each.client.handle(again, gradients)
    assert torch.equal(torch.cat([each.client.half.vector, each.server.half.vector]), after_one)


@pytest.mark.parametrize("damage", ["cut off", "not a message", "another type", "an unknown kind", "encoded"])
def test_bytes_that_are_no_message_are_refused(damage: str) -> None:
    each = table()
    _, [message] = each.begun()
    codec = each.parties.codec
    data = codec.encode(message, 0)
    sent = codec.decode(data)
    assert sent._replace(arrays={}) == message._replace(arrays={}) and torch.equal(sent.values, message.values)
    coded = table(codecs=[{"name": "quantise", "bits": 8}]).parties.codec
    wrong = {
        "cut off": lambda: data[:-5],
        "not a message": lambda: b"hello",
        "another type": lambda: codec.encode(with_values(lambda v: v.double())(message), 0),
        "an unknown kind": lambda: codec.encode(message._replace(kind=77), 0),  # type: ignore[arg-type]
        "encoded": lambda: coded.encode(message, 0),
    }[damage]()
    with pytest.raises(SplitError, match="cannot be read"):
        codec.decode(wrong)


def test_activations_of_several_holders_lie_side_by_side() -> None:
    """A step of the server on the columns of two holders is that on all columns of one."""
    each = table()
    _, [message] = each.begun()
    one, [gradients] = each.server.handle(ServerState(), message)
    alone = each.server.half.vector
    other = table()
    server = replace(other.server, holders={0: (80,), 1: (120,)}, labels=1)
    left = message._replace(arrays={VALUES: message.values[:, :80]})
    right = message._replace(holder=1, arrays={**message.arrays, VALUES: message.values[:, 80:]})
    state, answers = server.handle(ServerState(), left)
    assert not answers
    state, answers = server.handle(state, right)
    assert [answer.holder for answer in answers] == [0, 1] and state.step == one.step == 1
    assert torch.equal(torch.cat([answer.values for answer in answers], dim=1), gradients.values)
    assert torch.equal(other.server.half.vector, alone)


def test_a_run_that_diverges_says_so() -> None:
    local = {"steps": 3, "batch_size": 10, "lr": 1e30}
    for way in ("in_turn", "splitfed_v1", "splitfed_v2"):
        with pytest.raises(TrainingError, match=r"lower local\.lr"):
            run(plan_of({"cut": "2", "way": way}, num_clients=2, local=local))


class Random(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(nn.functional.dropout(self.first(x.flatten(1)), 0.5, training=self.training))
        return found


class Deciding(Random):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        found: Tensor = self.last(x if x.sum() > 0 else -x)
        return found


class Tied(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x.flatten(1)))
        return found


def random(num_classes: int) -> nn.Module:
    return Random(num_classes)


def deciding(num_classes: int) -> nn.Module:
    return Deciding(num_classes)


def tied(num_classes: int) -> nn.Module:
    return Tied(num_classes)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such layer": ({"cut": "nine"}, {}, "no layer 'nine'"),
    "the last layer": ({"cut": "5"}, {}, "cut after one of 0, 1, 2, 3, 4"),
    "nothing to train before": ({"cut": "0"}, {}, "clients' side"),
    "no place": ({"cut": 9}, {}, "no sequential model of so many layers"),
    "a place in another model": ({"cut": 1}, {"model": "split.models:named"}, "no sequential model"),
    "within a block": ({"cut": "block.conv"}, {"model": "split.models:named"}, "cut after one of conv1, pool1, block"),
    "a tail before the cut": ({"cut": "3", "tail": "2"}, {}, "does not lie behind"),
    "a tail of all": ({"cut": "2", "tail": "3"}, {}, "does not lie behind"),
    "draws": ({"cut": "first"}, {"model": "split.test_machines:random"}, "draws random numbers"),
    "decisions": ({"cut": "first"}, {"model": "split.test_machines:deciding"}, "cannot be followed"),
    "tied weights": ({"cut": "first"}, {"model": "split.test_machines:tied"}, "is used by layers of the clients and"),
    "codecs that remember": ({"cut": "2", "codecs": ["momentum"]}, {}, "remembers"),
    "pieces and dropout": (
        {"cut": "2", "micro_batches": 2},
        {"model": "split.models:dropped_sequence"},
        "masks of dropout",
    ),
    "a peer of nobody": ({"cut": "2", "handover": "peer"}, {}, "do not hand their layers on"),
    "too wide a window": ({"cut": "2", "in_flight": 2}, {}, "a batch has 1 pieces"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cut_that_cannot_be_is_refused(name: str) -> None:
    split, fields, text = REFUSED[name]
    with pytest.raises(PlanError, match=text):
        run(plan_of(split, **fields))


def test_a_loss_that_mixes_samples_is_not_computed_in_pieces() -> None:
    with pytest.raises(PlanError, match=r"set split\.micro_batches = 1"):
        run(plan_of({"cut": "2", "micro_batches": 2}, loss=squared_mean))


def squared_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return losses * losses.mean()
