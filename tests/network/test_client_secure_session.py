"""A client's side of adding in secret: one answer to each message through kills, and nothing for a server that lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from network.scripted_federation import RUN, SMALL, RandomCrashes, ScriptedFederation

from atoll.commit.coordinator import build_coordinator
from atoll.commit.guard import guarded
from atoll.commit.secure_sum import largest_of, session_of, vector_of
from atoll.core.errors import RunError
from atoll.core.messages import Broadcast, Task, stack
from atoll.core.params import params_hash
from atoll.core.plan import Plan
from atoll.core.wire import pack
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Order
from atoll.privacy.ledger import Ledger
from atoll.secagg import wire
from atoll.secagg.server import Close, Out, Phase, Server
from atoll.train.exchange import decoded, encoded, protected, sent_by
from atoll.train.job import Job, build_job
from atoll.train.layout import layout_of
from atoll.train.trainer import Trainer

PLAN = SMALL.replace({"secagg": {"clip": 2.0}, "rounds": 1})
NOISY = {"name": "distributed", "clip": 0.5, "sigma": 0.5, "delta": 1e-3, "test_noise": True}


class Sum:
    """A server that lets three clients add, and a test that looks over its shoulder."""

    def __init__(self, path: Path, plan: Plan = PLAN) -> None:
        self.scripted = ScriptedFederation(path / "world", plan)
        self.server, self.plan = self.scripted.server, plan
        self.job = self._job()
        self.keys = {number: public_bytes(home.key) for number, home in enumerate(self.scripted.homes)}
        self.tell(peers={str(number): key for number, key in self.keys.items()})
        self.tasks = [Task(number, 0, 0) for number in range(3)]
        self.sent = Broadcast(torch.full_like(self.job.first_D, 0.01), {})
        self.model = self.server.put(pack(self.sent.plain()))
        self.server.add_run(self.server.infos[RUN], self.sent.params_D)
        self.server.broadcast(RUN, self.model.name)
        self.changes: dict[int, dict[str, Any]] = {}
        """What is otherwise in the orders of some clients."""

    def _job(self) -> Job:
        federation = self.scripted.federation
        job = build_job(self.plan, federation)
        if self.plan.privacy is None:
            return job
        return guarded(self.plan, job, build_coordinator(self.plan, federation), Ledger(job.secret))[0]

    def tell(self, **changes: Any) -> None:
        """Say other things of the run."""
        self.server.infos[RUN] = msgspec.structs.replace(self.server.infos[RUN], **changes)

    def order(self, client: int, **changes: Any) -> None:
        """Ask a client, in place of what it was asked before."""
        order = msgspec.structs.replace(Order(RUN, 0, 0, self.model), **changes, **self.changes.get(client, {}))
        self.server.orders[client] = [order]

    def train(self) -> None:
        for task in self.tasks:
            self.order(task.client)
        self._until(lambda: len(self.server.ready) == 3)

    def invite(self, **changes: Any) -> wire.Invite:
        largest, group = largest_of(self.job, self.tasks), tuple(task.client for task in self.tasks)
        params = params_hash(self.sent.params_D)
        session = session_of(self.job, RUN, params, self.tasks[0], 0, group, layout_of(self.job), largest)
        assert self.job.secure is not None and self.job.secure.scheme.invite is not None
        return msgspec.structs.replace(self.job.secure.scheme.invite(session), **changes)

    def post(self, invite: wire.Invite) -> Out:
        """An invitation as client 0 gets it."""
        envelope = wire.sign(self.server.key, wire.SERVER, wire.session_id(invite), invite)
        return Out(0, wire.encode(envelope))

    def machine(self) -> Server:
        registry = {**self.keys, wire.SERVER: public_bytes(self.server.key)}
        return Server(identity=self.server.key, registry=registry)

    def exchange(self, messages: Iterator[Out] | list[Out]) -> list[bytes]:
        """Put messages into the post of their clients, and wait for an answer or a refusal of each."""
        told = list(messages)
        before = {out.client: self.said(out.client) for out in told}
        for out in told:
            self.order(out.client, secure=self.server.put(out.data))
        self._until(lambda: not any(self.server.orders[out.client] for out in told))
        return [answer for out in told for answer in self.said(out.client)[len(before[out.client]) :][-1:]]

    def said(self, client: int) -> list[bytes]:
        return list(self.server.answers.get((RUN, 0, client), []))

    def total(self) -> np.ndarray:
        machine = self.machine()
        state, out = machine.open(self.invite())
        while state.phase is not Phase.DONE:
            for answer in self.exchange(list(out)):
                state, _ = machine.handle(state, answer)
            state, out = machine.handle(state, Close(state.phase))
        assert machine.survivors(state) == (0, 1, 2)
        return machine.result(state)

    def expected(self) -> np.ndarray:
        """What the clients' vectors add up to, found without any mask."""
        job, trainer, total = self.job, Trainer(self.job), np.zeros(1)
        assert job.secure is not None
        encoding, largest = job.secure.encoding(3), largest_of(job, self.tasks)
        for task in self.tasks:
            trained = trainer.train_one(task, self.sent, {})
            update = protected(job, [task], stack([trained.update]))
            payload, _ = encoded(job, task, update.rows(0), {})
            update = stack([decoded(job, update.rows(0), payload)])
            if job.mechanism is not None and job.mechanism.on_grid is not None:
                update = job.mechanism.on_grid(update, sent_by(job, [task]))
            samples = job.federation.num_samples(task.client)
            vector = vector_of(job, update.rows(0), samples, trained.loss, largest, encoding, 0, task.client)
            total = vector.copy() if total.size == 1 else total + vector
        return total

    def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(200):
            if done():
                return
            self.scripted.step()
        raise AssertionError(f"clients do not answer: {self.server.refusals}")

    def refusal(self) -> str:
        [(_, _, reason)] = self.server.refusals
        return reason


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"secagg.modulus_bits": 64, "privacy": NOISY}, marks=pytest.mark.slow),
        pytest.param({"secagg.scheme": {"server": "curious"}}, marks=pytest.mark.slow),
    ],
    ids=["active", "noise", "curious"],
)
def test_vectors_add_up_though_clients_are_killed_and_answers_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    found = Sum(tmp_path, PLAN.replace(settings))
    with found.scripted.stack:
        deaths = RandomCrashes(found.scripted, 3, 0.05)
        deaths.watch(monkeypatch)
        found.train()
        total = found.total()
        monkeypatch.undo()
        assert np.array_equal(total, found.expected())
    assert deaths.num > 3 and not found.server.refusals
    for client in range(3):
        said = found.said(client)
        assert len(set(said)) == len(found.job.secure.scheme.steps)  # type: ignore[union-attr]
        assert len({wire.read_envelope(each, 1 << 20).session for each in said}) == 1


def test_the_same_message_gets_the_same_answer(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        messages = list(found.machine().open(found.invite())[1])
        assert found.exchange(messages) == found.exchange(messages)


def test_an_attempt_has_one_session(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        found.exchange(list(found.machine().open(found.invite())[1]))
        other = found.machine().open(found.invite(round=1))[1]
        assert found.exchange([next(iter(other))]) == []
    assert "another session" in found.refusal()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": bytes(32)}, "something else than the plan says"),
    "another run": ({"run": "other"}, "something else than the plan says"),
    "another attempt": ({"attempt": 1}, "something else than the plan says"),
    "without the client": ({"cohort": wire.cohort([1, 2, 3])}, "not in the cohort"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_invitation_to_something_else_is_refused(tmp_path: Path, kind: str) -> None:
    found, (changes, says) = Sum(tmp_path), CHANGES[kind]
    with found.scripted.stack:
        found.train()
        assert found.exchange([found.post(found.invite(**changes))]) == []
    assert says in found.refusal() and not found.said(0)


@pytest.mark.parametrize(
    "change",
    [{"encoding": {"value_bits": 4}}, {"encoding": {"modulus_bits": 64}}, {"mode": "curious"}, {"colluding": 0.0}],
    ids=["a coarser encoding", "another modulus", "a weaker mode", "fewer colluders"],
)
def test_an_invitation_by_other_rules_than_the_plans_ends_the_client(tmp_path: Path, change: dict[str, Any]) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        config = found.invite().config
        if "encoding" in change:
            change = {"encoding": msgspec.structs.replace(config.encoding, **change["encoding"])}
        invite = found.invite(config=msgspec.structs.replace(config, **change))
        with pytest.raises(RunError, match="do not trust this server"):
            found.exchange([found.post(invite)])
    assert not found.said(0)


def test_a_sum_of_two_is_not_opened(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        machine = found.machine()
        state, out = machine.open(found.invite())
        for phase in (Phase.ADVERTISE, Phase.SHARE, Phase.INPUT):
            answers = found.exchange(list(out))
            for answer in answers[:2] if phase is Phase.INPUT else answers:  # one vector is said to be lost
                state, _ = machine.handle(state, answer)
            state, out = machine.handle(state, Close(state.phase))
        assert found.exchange(list(out)) == []
    assert {reason for _, _, reason in found.server.refusals} == {
        "secure aggregation: 2 clients survived, 3 are needed; start a new attempt"
    }


@pytest.mark.parametrize(("least", "invited"), [(4, 3), (1, 2)], ids=["the plan's", "two"])
def test_a_cohort_is_not_smaller_than_the_plan_says(tmp_path: Path, least: int, invited: int) -> None:
    found = Sum(tmp_path, PLAN.replace({"partition.num_clients": 4, "policy.min_reports": least}))
    with found.scripted.stack:
        found.order(0)
        found._until(lambda: bool(found.server.ready))
        found.tasks = [Task(number, 0, 0) for number in range(invited)]
        assert found.exchange([found.post(found.invite())]) == []
    assert f"the cohort has {invited} clients, this client requires {max(3, least)}" in found.refusal()


def test_one_key_does_not_stand_for_two_clients(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        found.tell(peers={**found.server.infos[RUN].peers, "3": found.keys[1]})
        assert found.exchange([found.post(found.invite())]) == []
    assert "two of the keys that take part are one" in found.refusal()


def test_nobody_can_be_made_to_outweigh_all_others(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        messages = {out.client: out for out in found.machine().open(found.invite())[1]}
        found.tell(max_samples=10**9)  # told to one client only, whose weight would count as nothing
        assert found.exchange([messages[0]]) == []
        assert "something else than the plan says" in found.refusal()
        found.server.refusals.clear()
        found.tell(max_samples=found.scripted.federation.max_samples)
        found.changes[1] = {"share": 1e-9}
        assert found.exchange([messages[1]]) == []
        assert "by shares one client could outweigh" in found.refusal()
        assert len(found.exchange([messages[2]])) == 1


def test_keys_that_were_seen_once_do_not_change(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        messages = {out.client: out for out in found.machine().open(found.invite())[1]}
        assert found.scripted.homes[0].peers({"1": bytes(32)}) == {1: bytes(32)}  # what client 0 knows of client 1
        assert found.exchange([messages[0]]) == []
        assert "another key of client 1 than before" in found.refusal()
        found.server.refusals.clear()
        found.tell(peers={**found.server.infos[RUN].peers, "2": bytes(32)})
        assert found.exchange([messages[2]]) == []
        assert "another key of this client" in found.refusal()


def test_keys_from_elsewhere_are_all_that_is_trusted(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        for client in found.scripted.clients:
            client._given_peers = {number: found.keys[number] for number in (0, 1)}
        found.train()
        assert found.exchange([next(iter(found.machine().open(found.invite())[1]))]) == []
    assert "not in the registry" in found.refusal()


def test_floors_hold_in_a_session_too(tmp_path: Path) -> None:
    found = Sum(tmp_path)
    with found.scripted.stack:
        found.train()
        client = found.scripted.clients[0]
        work = client._agreed_runs[RUN]
        object.__setattr__(work, "floors", Floors(min_cohort=4))  # as if the server had named more clients before
        assert found.exchange([next(iter(found.machine().open(found.invite())[1]))]) == []
    assert "this client requires 4" in found.refusal()
