"""The server's side of evaluations that sites add in secret: who is lost, who lies, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from network.test_sites import ONLY

from atoll.core.messages import State
from atoll.core.wire import unpack
from atoll.network.protocol.blobs import Disk
from atoll.network.protocol.identity import public_bytes
from atoll.network.protocol.messages import Ref, SiteEvaluation
from atoll.network.protocol.secret_sums import pack_sums, session_of, to_vector
from atoll.network.server.runs import Model, Run, WaitingRun
from atoll.network.server.secret_evaluation import add_in_secret, why_too_few
from atoll.network.server.secure_session import SecureContext
from atoll.network.server.sites import SecretSum, SiteAnswer, summary
from atoll.report.reading import secret_note, site_rows
from atoll.secagg import wire
from atoll.secagg.aborts import Abort
from atoll.secagg.client import Client, in_memory
from atoll.secagg.client_state import ClientState, Floors, Phase, Vector, config_of

NAMES = {number: f"site {number}" for number in range(5)}
Lie = Callable[["Adding", int, Phase, bytes], bytes | None]
"""Sum, site, the phase after its answer, and the honest answer -> what it answers; None if it is silent."""


def sums_of(number: int) -> State:
    """What a site measured of a classifier of ten digits: as many right answers of each digit as its number and 1."""
    right = number + 1.0
    return {
        "count": torch.tensor(10 * right).double(),
        "loss": torch.tensor(0.1 * right).double(),
        "confusion/confusion": right * torch.eye(10).double(),
    }


class Adding:
    """A real run and its mailbox; sites answer as soon as they are woken, so that nothing depends on speed."""

    def __init__(self, path: Path, num: int, lies: dict[int, Lie], least: int = 3) -> None:
        waiting = WaitingRun("law", ONLY, path, lambda run, kind: Disk(path / run / kind), self.wake)
        self.run: Run = waiting.build([1000] * num)
        self.run.prepare_sites()
        self.run.models[0] = Model(Ref("a" * 64, 1))
        self.key, self.lies, self.num = Ed25519PrivateKey.generate(), lies, num
        self.identities = [Ed25519PrivateKey.generate() for _ in range(num)]
        self.keys = {number: public_bytes(key) for number, key in enumerate(self.identities)}
        self.floors = Floors(min_survivors=least)
        self.sums = {number: sums_of(number) for number in range(num)}
        self.states: dict[int, ClientState] = {}
        self.said: dict[int, list[bytes]] = {number: [] for number in range(num)}
        self.machines = {number: self._machine(number) for number in range(num)}

    def _machine(self, number: int) -> Client:
        return Client(
            client=number,
            identity=self.identities[number],
            server_key=public_bytes(self.key),
            once=in_memory(),
            registry=self.keys,
            floors=self.floors,
        )

    def wake(self, clients: set[int]) -> None:
        """Let sites answer; those that leave say so, as a client of Atoll does."""
        for number in sorted(clients):
            ref = self.run.sites.mailbox.waiting(number)
            assert ref is not None
            try:
                answer = self._answer(number, bytes(self.run.objects.get(ref.name)))
            except Abort as abort:
                self.run.sites.leave(0, number, str(abort))
                continue
            if answer is not None:
                assert self.run.sites.mailbox.answer(number, answer)

    def _answer(self, number: int, data: bytes) -> bytes | None:
        machine = self.machines[number]
        if number not in self.states:
            session = session_of("law", 0, "a" * 64, self.sums[number], tuple(range(self.num)))
            self.states[number] = machine.begin(session.model)
        state, answers = machine.handle(self.states[number], data)
        if state.phase is Phase.READY:
            vector = to_vector(self.sums[number], config_of(state).encoding)
            state, answers = machine.handle(state, Vector(vector))
        self.states[number] = state
        [answer] = answers
        self.said[number].append(answer)
        lie = self.lies.get(number)
        return answer if lie is None else lie(self, number, state.phase, answer)

    def total(self) -> SecretSum:
        clients = tuple(range(self.num))
        context = SecureContext(self.key, self.keys, self.run.sites.mailbox, 0.01)
        return add_in_secret(self.run, 0, clients, context, dict.fromkeys(clients, 1000))

    def result(self, added: SecretSum) -> dict[str, Any]:
        answers = {number: SiteAnswer(SiteEvaluation(in_secret=True)) for number in range(self.num)}
        return summary(0, answers, NAMES, self.run.sites.layout, self.run.parts.job.measures, added)


def silent(after: Phase) -> Lie:
    """A site that says nothing in the step that leads to a phase, nor later."""
    phases = list(Phase)
    return lambda adding, number, phase, answer: None if phases.index(phase) >= phases.index(after) else answer


def rubbish(after: Phase) -> Lie:
    return lambda adding, number, phase, answer: b"rubbish" if phase is after else answer


def replay(adding: Adding, number: int, phase: Phase, answer: bytes) -> bytes:
    return adding.said[number][0]


def others_name(adding: Adding, number: int, phase: Phase, answer: bytes) -> bytes:
    """A message in the name of site 2, signed by somebody else."""
    envelope = wire.read_envelope(answer, len(answer))
    body = wire.read_body(envelope, wire.Advert)
    return wire.encode(wire.sign(adding.identities[number], 2, envelope.session, body))


def expected(sites: list[int]) -> State:
    return {name: torch.stack([sums_of(site)[name] for site in sites]).sum(0) for name in sums_of(0)}


def check_total(added: SecretSum, sites: list[int]) -> None:
    assert added.survivors == tuple(sites) and not added.reason
    total, due = unpack(added.sums, max_bytes=1 << 20).sides[0], expected(sites)
    assert total.keys() == due.keys()
    for name in ("count", "confusion/confusion"):
        assert torch.equal(total[name], due[name])
    assert float(total["loss"]) == pytest.approx(float(due["loss"]), abs=1e-13)


@pytest.mark.parametrize("phase", [Phase.ADVERTISED, Phase.SHARED, Phase.MASKED])
def test_a_sum_goes_on_without_a_site_that_falls_silent(tmp_path: Path, phase: Phase) -> None:
    adding = Adding(tmp_path, 4, {1: silent(phase)})
    added = adding.total()
    check_total(added, [0, 2, 3])
    assert added.rejected == added.refused == {}
    result = adding.result(added)
    assert result["sites"] == [
        {"client": 1, "name": "site 1", "reason": "it fell silent while the secret sum was being added"}
    ]
    assert result["secret"]["names"] == ["site 0", "site 2", "site 3"]
    assert result["pooled"] == result["secret"]["figures"] and "worst" not in result
    assert "spread" not in result


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (rubbish(Phase.ADVERTISED), "not an envelope"),
        (rubbish(Phase.SHARED), "not an envelope"),
        (rubbish(Phase.MASKED), "not an envelope"),
        (others_name, "client 2 did not sign"),
    ],
)
def test_a_site_that_sends_rubbish_is_rejected_alone(tmp_path: Path, lie: Lie, why: str) -> None:
    adding = Adding(tmp_path, 4, {1: lie})
    added = adding.total()
    check_total(added, [0, 2, 3])
    assert list(added.rejected) == [1] and why in added.rejected[1]
    [row] = adding.result(added)["sites"]
    assert (row["client"], row["rejected"]) == (1, added.rejected[1])


def test_a_replayed_message_is_rejected_alone(tmp_path: Path) -> None:
    added = Adding(tmp_path, 4, {1: replay}).total()
    check_total(added, [0, 2, 3])
    assert "Advert where Shares is expected" in added.rejected[1]


def test_a_sum_of_fewer_sites_than_they_ask_for_is_not_opened(tmp_path: Path) -> None:
    adding = Adding(tmp_path, 3, {1: silent(Phase.MASKED)})
    added = adding.total()
    assert not added.sums and not added.survivors and "0 clients are left, 2 are needed" in added.reason
    assert set(added.refused) == {0, 2} and "2 clients survived, 3 are needed" in added.refused[0]
    result = adding.result(added)
    assert [row["name"] for row in site_rows(result)] == ["site 0", "site 2", "no secret sum of 3 sites"]
    assert "pooled" not in result and secret_note(result).endswith("no secret sum: site 0, site 1, site 2.")
    check_total(Adding(tmp_path / "two", 3, {1: silent(Phase.MASKED)}, least=2).total(), [0, 2])


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"count": torch.tensor(1e6).double()}, "a secret sum of 1.00004e+06 samples: its 3 sites stated 3,000"),
        ({"count": torch.tensor(0.5).double()}, "a secret sum of 40.5 samples"),
        ({"confusion/confusion": -torch.eye(10).double()}, "no 60 samples have such sums of confusion"),
    ],
)
def test_a_total_that_cannot_be_is_dropped_and_nobody_is_named(tmp_path: Path, lie: State, why: str) -> None:
    adding = Adding(tmp_path, 3, {})
    adding.sums[1] = {**adding.sums[1], **lie}
    added = adding.total()
    assert why in added.reason and "is not known" in added.reason
    assert added.rejected == {} and not added.sums and not added.survivors


def test_a_random_vector_spoils_the_sum_and_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adding = Adding(tmp_path, 3, {})
    honest = Client.handle
    rng = np.random.default_rng(0)

    def handle(self: Client, state: ClientState, event: bytes | Vector) -> tuple[ClientState, list[bytes]]:
        if isinstance(event, Vector) and self.client == 1:
            event = Vector(rng.integers(0, 2**63, event.values.size, dtype=np.uint64))
        return honest(self, state, event)

    monkeypatch.setattr(Client, "handle", handle)
    added = adding.total()
    assert added.reason == "the secret sum does not count its 3 sites: which site added something else is not known"
    assert added.rejected == {} and not added.sums


def test_a_sum_begins_when_all_are_ready_or_the_version_is_too_old(tmp_path: Path) -> None:
    sites = Adding(tmp_path, 3, {}).run.sites
    sites.open(0, 100.0, {})

    def due(expected: set[int], now: float = 101.0, next_open: int = 0) -> int | None:
        return sites.next_to_add(expected, now, 60.0, next_open)

    assert due(set()) is None and sites.next_to_close(set(), 101.0, 60.0) == 0  # nobody adds in secret
    for client in (0, 1):
        sites.add(0, client, SiteAnswer(SiteEvaluation(in_secret=True)))
    sites.add(0, 5, SiteAnswer(SiteEvaluation(reason="moving")))
    assert sites.ready(0) == (0, 1)
    assert due({0, 1, 2}) is None and due({0, 1, 5}) == 0
    assert due({0, 1, 2}, now=161.0) == 0 and due({0, 1, 2}, next_open=2) == 0
    assert sites.next_to_close({0, 1, 5}, 500.0, 60.0) is None  # the sum comes first
    sites.secret_sums[0] = SecretSum((0, 1))
    assert due({0, 1}) is None and sites.next_to_close({0, 1, 5}, 101.0, 60.0) == 0


def test_too_few_sites_are_no_sum() -> None:
    assert "a sum of one is no sum" in why_too_few(1) and "2 sites were ready" in why_too_few(2)
    assert why_too_few(3) == ""


def test_pooled_figures_have_the_secret_sum_and_the_spread_does_not(tmp_path: Path) -> None:
    adding = Adding(tmp_path, 3, {})
    added = adding.total()
    measures = adding.run.parts.job.measures
    answers = {number: SiteAnswer(SiteEvaluation(in_secret=True)) for number in range(3)}
    wrong = {**sums_of(3), "confusion/confusion": 4 * torch.eye(10).roll(1, 0).double()}
    answers[3] = SiteAnswer(SiteEvaluation(40, pack_sums(wrong)))
    answers[4] = SiteAnswer(SiteEvaluation(in_secret=True))
    result = summary(0, answers, NAMES, adding.run.sites.layout, measures, added)
    assert result["secret"]["figures"]["accuracy"] == 1.0 and result["secret"]["samples"] == 60
    assert result["pooled"]["accuracy"] == 0.6 and result["worst"]["client"] == 3
    assert result["spread"]["num_clients"] == 1 and result["spread"]["mean"] == 0.0
    late = next(row for row in result["sites"] if row["client"] == 4)
    assert late["reason"] == "it was ready after the secret sum was begun"
    assert [row["name"] for row in site_rows(result)] == ["site 3", "site 4", "3 sites in a secret sum"]
