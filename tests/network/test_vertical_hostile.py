"""Parties and servers of vertical learning that send what is not due, have not what is needed, or go: a clear end."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from network.apps import party_of
from network.federation import until
from network.in_process_server import at_work, client_of, operated, serving
from network.test_split_hostile import Send, changed, ends_early, kind_of, nan, rubbish, says_nothing, short, twice
from split.parties import THREE, vertical_plan

from atoll import Plan, run
from atoll.core.errors import RunError
from atoll.core.messages import Payload
from atoll.core.wire import unpack
from atoll.network.client.app import ClientApp
from atoll.network.client.home import Home
from atoll.network.client.lanes import Lanes
from atoll.network.protocol.layers import index_of, name_in
from atoll.network.protocol.messages import Ref
from atoll.network.server import refusals, runs
from atoll.network.server.joint_round import JointRound
from atoll.network.server.operations import Operations
from atoll.network.server.parts import ServerParts
from atoll.network.server.sent import FinalModel
from atoll.split.joint import Sent
from atoll.split.messages import TARGETS, Kind

NUM, LABELS, BAD, RUN = len(THREE), 1, 2, "columns"
NAMES = [party["name"] for party in THREE]
PLAN = vertical_plan(split_micro_batches=2, rounds=2, policy={"name": "cohort", "deadline": 2.0})
SECONDS = 30


class Hall:
    """A server in this process with parties of it, each in a thread."""

    def __init__(self, operations: Operations, url: str, path: Path) -> None:
        self.operations, self.url, self.path = operations, url, path
        self.threads, self.warnings = list[threading.Thread](), list[str]()

    def join(self, name: str, app: ClientApp) -> None:
        """Let a party enrol, be approved and work; its number is that of those before it."""
        self.threads.append(client_of(self.operations, self.url, self.path / name, app, self.warnings.append))
        self.threads[-1].start()

    def join_again(self, name: str, app: ClientApp) -> None:
        """Let a party that was approved work once more."""
        self.threads.append(at_work(Home.open(self.path / name), self.url, app, self.warnings.append))
        self.threads[-1].start()

    def ended(self) -> str:
        """Wait until all parties have ended; how the run did."""
        for thread in self.threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        return self.status()

    def status(self) -> str:
        [state] = [each for each in self.operations.run_states() if each["run"] == RUN]
        return state["status"]

    def ledger(self, kind: str) -> list[dict[str, Any]]:
        """What the ledger says in records of a kind."""
        lines = map(msgspec.json.decode, self.operations.ledger_lines(RUN))
        return [line["body"] for line in lines if line["kind"] == kind]

    def offences(self) -> dict[int | None, int]:
        with self.operations.driver.store.read() as tables:
            return {row.number: row.offences for row in tables.clients()}

    def model(self) -> bytes:
        return (self.path / "home" / "runs" / RUN / "model.safetensors").read_bytes()


@contextmanager
def hall(path: Path, num: int = NUM) -> Iterator[Hall]:
    with operated(path / "home", num) as operations, serving(operations) as url:
        made = Hall(operations, url, path)
        try:
            yield made
        finally:
            operations.stop_run(RUN)  # so that all threads end, however the test does
            for thread in made.threads:
                thread.join(SECONDS)


def begun(made: Hall, plan: Plan = PLAN, apps: dict[int, ClientApp] | None = None) -> None:
    """Add a run, and let all its parties join in order, with other apps than the plan's if those are given."""
    made.operations.add_run(RUN, plan)
    for number, name in enumerate(NAMES):
        made.join(name, (apps or {}).get(number) or party_of(plan, number))


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("alone")
    run(PLAN, out=path / "run", report=False)
    return (path / "run" / "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def _asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "FIRST_REFUSAL", 0.0)


@pytest.fixture
def meddle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Send], None]:
    """Let what one party sends go through a function, in the first session alone."""

    def begin(bad: Send) -> None:
        send, sessions = Lanes.send, list[str]()

        def meddled(self: Lanes, data: bytes, cause: int, *, last: bool = False) -> None:
            mine = about(data)[1] == BAD
            if mine and self._session not in sessions and not sessions:
                sessions.append(self._session)
            if mine and sessions == [self._session]:
                bad(self, lambda *args, **named: send(self, *args, **named), data, cause, last)
            else:
                send(self, data, cause, last=last)

        monkeypatch.setattr(Lanes, "send", meddled)

    return begin


def about(data: bytes) -> list[int]:
    """Kind, sender, batch, piece, pieces and samples of a message."""
    found: list[int] = unpack(data, max_bytes=1 << 20).sides[-1]["about"].tolist()
    return found


def says(data: bytes, place: int, value: int) -> bytes:
    """A message that says something else of itself."""

    def change(values: torch.Tensor, exact: dict[str, torch.Tensor]) -> torch.Tensor:
        exact["about"] = exact["about"].clone()
        exact["about"][place] = value
        return values

    return changed(data, change)


def labels(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    """Bring labels, which are with another party."""

    def change(values: torch.Tensor, exact: dict[str, torch.Tensor]) -> torch.Tensor:
        exact[TARGETS] = torch.zeros(8, dtype=torch.uint8)
        return values

    send(data if last else changed(data, change), cause, last=last)


def another(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    """Send in the name of another party."""
    send(says(data, 1, LABELS), cause, last=last)


def batch(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    """Send a batch of one sample less than the others, as from other rows: its pieces have 8 and 7."""
    rows = 8 - about(data)[3]
    send(changed(says(data, 5, 15), lambda values, exact: values.reshape(8, -1)[:rows].reshape(-1)), cause, last=last)


UNDONE: dict[str, tuple[Send, str, bool]] = {
    "rubbish": (rubbish, "cannot be read", True),
    "wrong shape": (short, "cannot be read|shape", True),
    "labels": (labels, "got labels of client 2, which should keep them", True),
    "another's name": (another, "got a message of client 1 from client 2: send your own", True),
    "twice": (twice, "twice", True),
    "leaves": (ends_early, "client 2 left: out of power", False),
    "silent": (says_nothing, "client 2 did no batch in 2 s", False),
}
"""What a party does in the first session, what the log says of it, and whether it is an offence."""
FAST = ("wrong shape", "activations that are not finite", "other layers", "gradients that are not finite", "other rows")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in UNDONE]
)
def test_a_round_in_which_a_party_sends_what_is_not_due_is_made_again(
    tmp_path: Path, name: str, simulated: bytes, meddle: Callable[[Send], None], capfd: pytest.CaptureFixture[str]
) -> None:
    bad, why, offends = UNDONE[name]
    meddle(bad)
    with hall(tmp_path) as made:
        begun(made)
        assert "failed" not in made.ended()
        assert made.offences() == {0: 0, 1: 0, 2: int(offends)}
        assert made.ledger("end")[0]["reason"] == "all rounds done"
        made_again = made.model()
    said = capfd.readouterr().err
    assert re.search(why, said) and "the round ended, since every step needs all parties; the session of club" in said
    assert said.count('"event": "abandoned"') == 1
    assert made_again != simulated  # another attempt draws other batches


def other_rows(app: ClientApp) -> ClientApp:
    return replace(app, rows=bytes(32))


def huge(app: ClientApp) -> ClientApp:
    """Columns that are finite, and whose activations are not."""
    return replace(app, train_x=np.full(app.train_x.shape, 3e38, dtype=np.float32))


ENDS: dict[str, tuple[int, Callable[[ClientApp], ClientApp], str]] = {
    "other rows": (BAD, other_rows, "the rows of club are not those of bank, which has the labels"),
    "other rows at the labels' party": (LABELS, other_rows, "the rows of shop and club are not those of bank"),
    "activations that are not finite": (0, huge, "session of shop: client 0 left: .*the activations hold NaN or Inf"),
}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ENDS])
def test_what_asking_again_would_not_mend_ends_the_run_by_name(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    number, changes, why = ENDS[name]
    with hall(tmp_path) as made:
        begun(made, PLAN, {number: changes(party_of(PLAN, number))})
        status = made.ended()
        assert re.search(f"^failed: round 1 ends, since every step needs all parties; .*{why}", status), status
        assert not made.ledger("commit") and not made.ledger("end") and set(made.offences().values()) == {0}
        assert sum("the server has given it up" in text for text in made.warnings) == NUM
    assert '"event": "ended"' in capfd.readouterr().err


@pytest.mark.parametrize(
    ("bad", "why"), [(nan, "got activations of client 2 that hold NaN"), (batch, "got a batch of 1")]
)
def test_the_server_ends_a_run_whose_values_or_batches_do_not_fit(
    tmp_path: Path, bad: Send, why: str, meddle: Callable[[Send], None]
) -> None:
    meddle(bad)
    with hall(tmp_path) as made:
        begun(made)
        status = made.ended()
        assert "failed: round 1 ends, since every step needs all parties" in status and why in status


def test_parties_with_different_numbers_of_rows_do_not_begin(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    app, said = party_of(PLAN, BAD), ""

    def heard() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "the parties have different numbers of rows" in said

    with hall(tmp_path) as made:
        begun(made, PLAN, {BAD: replace(app, train_x=app.train_x[1:])})
        until(heard, 30)
        assert not made.operations.driver.built_runs() and not made.ledger("broadcast")
        made.operations.stop_run(RUN)
        made.ended()
    num = len(app.train_x)
    assert f"(shop {num}, bank {num}, club {num - 1}): let them join by atoll align" in said


LIES: dict[str, tuple[Kind, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "other layers": (Kind.WEIGHTS, lambda values: values + 1, "sends other layers than its ledger names"),
    "fewer layers": (Kind.WEIGHTS, lambda values: values[1:], "sends other layers than its ledger names"),
    "gradients of another shape": (Kind.GRADIENTS, lambda values: values[:-8], "got gradients of shape"),
    "gradients that are not finite": (Kind.GRADIENTS, lambda values: values * torch.nan, "that hold NaN or Inf"),
}


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LIES])
def test_a_party_leaves_a_server_that_lies(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kind, lie, why = LIES[name]
    deliver, lied = JointRound._deliver, list[Sent]()

    def lying(self: JointRound, sent: Sequence[Sent]) -> None:
        for each in sent:
            if (each.number, kind_of(each.data)) == (BAD, kind) and not lied:
                lied.append(each)
                each = each._replace(data=changed(each.data, lambda values, exact: lie(values)))
            deliver(self, [each])

    monkeypatch.setattr(JointRound, "_deliver", lying)
    with hall(tmp_path) as made:
        begun(made)
        status = made.ended()
        assert any(why in text and "this client left its session" in text for text in made.warnings), made.warnings
        if "not finite" in name:
            assert status.startswith("failed: round 1 ends") and "club: client 2 left: " in status
        else:
            assert made.ledger("end")[0]["reason"] == "all rounds done"
    assert why in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends, and says why
def test_a_party_takes_no_layers_home_that_the_ledger_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final_model_of = runs.final_model_of

    def lying(parts: ServerParts, model_M: torch.Tensor, store: Callable[[Payload], Ref]) -> FinalModel:
        model, parties = final_model_of(parts, model_M, store), parts.parties
        assert parties is not None
        other = store(Payload(parties.of(BAD).cut.client.take(model_M) + 1))
        return model._replace(own=(*model.own[:BAD], other, *model.own[BAD + 1 :]))

    monkeypatch.setattr(runs, "final_model_of", lying)
    with hall(tmp_path) as made:
        begun(made)
        made.ended()
    took = [(tmp_path / name / "runs" / RUN / "model.safetensors").exists() for name in NAMES]
    assert took == [True, True, False]


def test_a_list_of_layers_that_names_none_of_a_party_is_a_lie() -> None:
    index = index_of([Payload(torch.zeros(2))] * 2)
    for wrong in (index.carrier[:1], index.carrier[:, :31], index.carrier.float(), index.carrier.flatten()):
        with pytest.raises(RunError, match="none of party 1: do not trust this server"):
            name_in(Payload(wrong), 1)


def test_a_party_that_is_late_and_a_client_that_is_no_party(tmp_path: Path, simulated: bytes) -> None:
    """The run begins with the last of its parties; further clients take no part, whatever they bring."""
    with hall(tmp_path, 1) as made:
        made.operations.add_run(RUN, PLAN)
        polls = made.operations.driver.presence.last_polls
        for number, name in enumerate(NAMES[:-1]):
            made.join(name, party_of(PLAN, number))
        until(lambda: len(polls) == 2, 30)
        assert not made.operations.driver.built_runs()
        made.join("club", party_of(PLAN, 2))
        until(made.operations.driver.built_runs, 30)
        made.join("museum", party_of(PLAN, 0))
        assert "failed" not in made.ended() and made.model() == simulated
        assert [[each["client"] for each in commit["cohort"]] for commit in made.ledger("commit")] == [[0, 1, 2]] * 2
        assert not (tmp_path / "museum" / "runs" / RUN / "model.safetensors").exists()


def test_clients_that_were_approved_in_another_order_refuse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = ""

    def heard() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "shop refuses this run: approve it once more; bank refuses this run" in said

    with hall(tmp_path) as made:
        made.operations.add_run(RUN, PLAN)
        for number, name in enumerate(["bank", "shop", "club"]):
            made.join(name, party_of(PLAN, number))
        until(heard, 30, lambda: said)
        assert not made.ledger("commit")
        made.operations.stop_run(RUN)
        made.ended()
    assert any("this client is called bank, and the plan takes client 0 for shop" in text for text in made.warnings)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it ends, and says why
def test_a_revoked_party_is_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, said = PLAN.replace({"rounds": 6, "policy": None}), ""

    def heard() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "every step needs all parties, and club (client 2) is not approved: approve it once more" in said

    with hall(tmp_path) as made:
        begun(made, plan)
        until(lambda: made.ledger("commit"), 30)
        made.operations.revoke("club")
        until(heard, 30, lambda: said)
        made.threads.pop().join(30)
        assert made.status() == "running" and len(made.ledger("commit")) < 6
        made.operations.approve(["club"])
        made.join_again("club", party_of(plan, BAD))
        made.ended()
        assert made.ledger("end")[0]["reason"] == "all rounds done"
        assert {len(commit["cohort"]) for commit in made.ledger("commit")} == {NUM}
