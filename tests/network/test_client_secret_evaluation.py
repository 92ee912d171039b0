"""A client's side of evaluations that are added in secret: each version in one sum, under the client's own floors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network.federation import RUN
from network.test_site_floors import agreed_run, order_of

from atoll.core.errors import PlanError, RunError
from atoll.core.messages import State
from atoll.network.client.home import RunHome
from atoll.network.client.secret_evaluation import EvaluationAddend, KeptEvaluations, keep_for_sum
from atoll.network.client.secure_session import SecureSession, end_silent_sessions
from atoll.network.client.task import WorkRefused
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Ref, RunInfo, SiteEvaluation
from atoll.network.protocol.secret_sums import FIRST_TASK, from_total, invite_of, session_of, to_vector
from atoll.secagg import wire
from atoll.secagg.aborts import Abort
from atoll.secagg.encoding import finest
from atoll.secagg.server import Close, Out, Phase, Server, ServerState

SECRET = Floors(evaluation="secret")
VERSION = 3


class Sums:
    """Three sites that measured a version, and a server that lets them add, or lies."""

    def __init__(self, path: Path, floors: Floors = SECRET) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.identities = [Ed25519PrivateKey.generate() for _ in range(3)]
        self.keys = {number: public_bytes(key) for number, key in enumerate(self.identities)}
        first = agreed_run(path / "site-0", floors)
        self.sites = [replace(first, number=number, home=RunHome(path / f"site-{number}")) for number in range(3)]
        self.sums = [{"count": torch.tensor(10.0 + n).double(), "loss": torch.rand(4).double()} for n in range(3)]
        self.info = RunInfo(RUN, {}, "", 3, 3, 0, 1, peers={str(number): key for number, key in self.keys.items()})
        self.order = order_of(VERSION)
        self.objects: dict[str, bytes] = {}

    def ready(self) -> Sums:
        for site, sums in zip(self.sites, self.sums, strict=True):
            assert keep_for_sum(site, self.order, partial(dict, sums)) == SiteEvaluation(in_secret=True)
        return self

    def invite(self, clients: tuple[int, ...] = (0, 1, 2), **changes: Any) -> wire.Invite:
        session = session_of(RUN, VERSION, self.order.model.name, self.sums[0], clients)
        return msgspec.structs.replace(invite_of(session), **changes)

    def post(self, invite: wire.Invite) -> bytes:
        return wire.encode(wire.sign(self.key, wire.SERVER, wire.session_id(invite), invite))

    def answer(self, number: int, data: bytes) -> bytes:
        """A site's answer to a message, by a process that was just started."""
        name = f"{len(self.objects)}"
        name = next((known for known, other in self.objects.items() if other == data), name)
        self.objects[name] = data
        agreed = replace(self.sites[number], home=RunHome(self.sites[number].home.path))
        session = SecureSession(
            identity=self.identities[number],
            server_key=public_bytes(self.key),
            info=lambda: self.info,
            peers=lambda announced: self.keys,
        )
        addend = EvaluationAddend(agreed=agreed, order=self.order)
        return session.answer(addend, Ref(name, len(data)), lambda ref: [self.objects[ref.name]])

    def machine(self) -> Server:
        return Server(identity=self.key, registry={**self.keys, wire.SERVER: public_bytes(self.key)})

    def up_to(self, last: Phase, lost: Iterable[int] = ()) -> tuple[ServerState, list[Out]]:
        """A session up to the end of a phase, in which some sites are said to be lost."""
        machine = self.machine()
        state, out = machine.open(self.invite())
        while True:
            phase = state.phase
            for message in out:
                said = self.answer(message.client, message.data)
                if phase is not last or message.client not in lost:
                    state, _ = machine.handle(state, said)
            state, out = machine.handle(state, Close(state.phase))
            if phase is last:
                return state, list(out)


def test_sites_that_are_started_again_at_every_step_add_what_they_measured(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    state, _ = found.up_to(Phase.UNMASK)
    with pytest.raises(WorkRefused, match="is done here"):
        found.answer(0, found.post(found.invite()))
    encoding = found.invite().config.encoding
    total = from_total(found.machine().result(state), 3, found.sums[0], encoding)
    assert total is not None and float(total["count"]) == 33.0
    expected = torch.stack([sums["loss"] for sums in found.sums]).sum(0)
    assert torch.allclose(total["loss"], expected, rtol=0, atol=1e-13)
    assert from_total(found.machine().result(state), 2, found.sums[0], encoding) is None


def test_a_repeated_message_gets_the_same_answer_and_another_session_none(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    first = found.post(found.invite())
    assert found.answer(0, first) == found.answer(0, first)
    fewer = found.post(found.invite((0, 1, 2, 3)))
    with pytest.raises(Abort, match="another session"):
        found.answer(0, fewer)
    with pytest.raises(WorkRefused, match="is aborted here"):
        found.answer(0, first)


def test_a_kill_before_the_session_is_noted_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Sums(tmp_path).ready()
    first = found.post(found.invite())
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(EvaluationAddend, "stepped", kill)
        found.answer(0, first)
    saved = found.sites[0].home.session(FIRST_TASK + VERSION)
    assert saved is not None and found.answer(0, first) == saved.answer
    found.sites[0].home.end_sessions()
    with pytest.raises(WorkRefused, match="it is added once"):
        found.answer(0, first)


def kill(*args: object) -> None:
    raise KeyboardInterrupt


def test_one_version_is_in_one_sum_whatever_was_removed_since(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    found.up_to(Phase.INPUT)
    site = found.sites[0]
    site.home.save_info(msgspec.structs.replace(found.info, plan=site.plan.to_dict()))
    seen = end_silent_sessions([(RUN, site.home)], {}, 0.0)
    assert [attempt for _, attempt, _ in seen] == [FIRST_TASK + VERSION]
    end_silent_sessions([(RUN, site.home)], seen, 1e6)
    assert site.home.session(FIRST_TASK + VERSION) is None  # its secrets are gone
    for invite in (found.invite(), found.invite((0, 1, 2, 3))):
        with pytest.raises(WorkRefused, match="was in a session before: it is added once"):
            found.answer(0, found.post(invite))
    with pytest.raises(WorkRefused, match="was in a session before: it is added once"):
        keep_for_sum(site, found.order, lambda: found.sums[0])


def test_a_version_is_measured_once_and_not_after_a_later_one(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    site = found.sites[0]

    def again() -> State:
        raise AssertionError("it was measured a second time")

    assert keep_for_sum(site, found.order, again).in_secret
    keep_for_sum(site, order_of(VERSION + 1), lambda: found.sums[0])
    assert keep_for_sum(site, found.order, again).in_secret  # both are open
    with pytest.raises(WorkRefused, match="version 4 was evaluated after 2"):
        keep_for_sum(site, order_of(2), again)
    with pytest.raises(WorkRefused, match="as another model"):
        keep_for_sum(site, msgspec.structs.replace(found.order, model=Ref("1" * 64, 0)), again)
    for path in (site.home.path / "secret-sums").iterdir():
        assert not path.stat().st_mode & 0o077


def test_a_run_that_is_over_adds_nothing_any_more(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    site = found.sites[0]
    KeptEvaluations(site.home).forget_sums()
    with pytest.raises(WorkRefused, match="it is added once"):
        found.answer(0, found.post(found.invite()))
    with pytest.raises(WorkRefused, match="it is added once"):
        keep_for_sum(site, found.order, lambda: found.sums[0])


def test_floors_that_were_changed_since_hold(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    found.sites[0] = replace(found.sites[0], floors=Floors(evaluation="none"))
    with pytest.raises(WorkRefused, match='"none": nothing is added in secret'):
        found.answer(0, found.post(found.invite()))


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model": bytes(32)}, "something else than count, loss of version 3"),
    "another run": ({"run": "other"}, "something else than"),
    "another version": ({"round": VERSION + 1}, "something else than"),
    "an attempt to train": ({"attempt": VERSION}, "something else than"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_an_invitation_to_something_else_is_refused_and_another_taken(tmp_path: Path, kind: str) -> None:
    found, (changes, says) = Sums(tmp_path).ready(), CHANGES[kind]
    with pytest.raises(WorkRefused, match=says):
        found.answer(0, found.post(found.invite(**changes)))
    assert found.answer(0, found.post(found.invite()))


@pytest.mark.parametrize("change", [{"mode": "curious"}, {"colluding": 0.0}, {"encoding": finest(1.0, 3)}])
def test_an_invitation_by_other_rules_ends_the_client(tmp_path: Path, change: dict[str, Any]) -> None:
    found = Sums(tmp_path).ready()
    config = msgspec.structs.replace(found.invite().config, **change)
    with pytest.raises(RunError, match="do not trust this server"):
        found.answer(0, found.post(found.invite(config=config)))


def test_a_site_that_was_not_asked_to_measure_adds_nothing(tmp_path: Path) -> None:
    found = Sums(tmp_path)
    with pytest.raises(WorkRefused, match="was not measured here"):
        found.answer(0, found.post(found.invite()))


@pytest.mark.parametrize(
    ("floors", "clients", "says"),
    [
        (Floors(evaluation="secret", min_survivors=2), (0, 1), "has 2 clients, this client requires 3"),
        (Floors(evaluation="secret", min_cohort=4), (0, 1, 2), "has 3 clients, this client requires 4"),
        (Floors(evaluation="secret", min_survivors=5), (0, 1, 2), "has 3 clients, this client requires 5"),
    ],
)
def test_a_sum_of_fewer_sites_than_the_floors_is_refused(
    tmp_path: Path, floors: Floors, clients: tuple[int, ...], says: str
) -> None:
    found = Sums(tmp_path, floors).ready()
    with pytest.raises(Abort, match=says):
        found.answer(0, found.post(found.invite(clients)))


@pytest.mark.parametrize("least", [2, 3])
def test_no_sum_of_fewer_survivors_than_the_floors_is_opened(tmp_path: Path, least: int) -> None:
    found = Sums(tmp_path, Floors(evaluation="secret", min_survivors=least)).ready()
    _, out = found.up_to(Phase.INPUT, lost=[2])
    if least == 2:
        assert all(found.answer(message.client, message.data) for message in out)
    else:
        with pytest.raises(Abort, match="2 clients survived, 3 are needed"):
            found.answer(0, out[0].data)


def test_one_key_does_not_stand_for_two_sites(tmp_path: Path) -> None:
    found = Sums(tmp_path).ready()
    found.keys[3] = found.keys[1]
    with pytest.raises(WorkRefused, match="two of the keys that take part are one"):
        found.answer(0, found.post(found.invite((0, 1, 2, 3))))
    found.keys = {0: os.urandom(32), 1: found.keys[1], 2: found.keys[2]}
    with pytest.raises(WorkRefused, match="another key of this client"):
        found.answer(0, found.post(found.invite()))


def test_sums_beyond_the_bound_are_refused_and_not_cut(tmp_path: Path) -> None:
    found = Sums(tmp_path)
    for value, says in ((2.0**48 + 1, r"loss of this evaluation is 2.81475e\+14"), (torch.inf, "is inf")):
        sums = {"loss": torch.tensor([0.0, -value], dtype=torch.float64)}
        with pytest.raises(PlanError, match=f"{says}: sums up to 2\\^48 can be added"):
            keep_for_sum(found.sites[0], found.order, partial(dict, sums))
    assert not (found.sites[0].home.path / "secret-sums").exists()


def test_sums_arrive_as_exactly_as_the_docs_say() -> None:
    rng, num = np.random.default_rng(0), 100
    encoding = finest(1.0, num, 64)
    counts = rng.integers(0, 2**40, (num, 50)).astype(np.float64)
    losses = rng.normal(size=(num, 50)) * 10.0 ** rng.integers(-12, 8, 50)
    edge = np.full((num, 1), 2.0**48)
    total_L = sum(
        to_vector({"a": torch.tensor(a), "b": torch.tensor(b), "c": torch.tensor(-c)}, encoding).astype(object)
        for a, b, c in zip(counts, losses, edge, strict=True)
    )
    layout = {"a": torch.zeros(50), "b": torch.zeros(50), "c": torch.zeros(1)}
    found = from_total((total_L % 2**64).astype(np.uint64), num, layout, encoding)
    assert found is not None
    assert np.array_equal(found["a"].numpy(), counts.sum(0)) and float(found["c"]) == -num * 2.0**48
    for value, column in zip(found["b"].tolist(), losses.T, strict=True):
        exact = math.fsum(column)
        assert abs(value - exact) <= num * 2.0**-49 + 2 * math.ulp(exact)
