"""Clients and servers of split learning that send what is not due: a clear end for them, and none for the others."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from network.apps import dealt
from network.in_process_server import client_of, operated, serving

from atoll import Plan
from atoll.core.messages import Payload
from atoll.core.wire import pack, unpack
from atoll.network.client import split_session
from atoll.network.client.connection import Connection, Declined
from atoll.network.client.lanes import Lanes
from atoll.network.protocol import endpoints
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.exchange import Parcel, SessionEnd, SessionPart, read_parcel
from atoll.network.protocol.objects import CHUNK
from atoll.network.server.operations import Operations
from atoll.network.server.split_round import RemoteExchange
from atoll.split.messages import TARGETS, Kind

NUM, RUN, BAD = 3, "cut", 1
PLAN = Plan(
    seed=1,
    rounds=2,
    partition={"name": "iid", "num_clients": NUM},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 16, "steps": 3},
    policy={"name": "cohort", "min_reports": 1, "deadline": 2.0},
    split={"cut": "2", "way": "splitfed_v2", "micro_batches": 2},
)
Send = Callable[[Lanes, Callable[..., None], bytes, int, bool], None]
LABELS = Floors(split="labels")


def federation_of(operations: Operations, url: str, path: Path, plan: Plan, bad: Send | None) -> list[dict[str, Any]]:
    """Run a plan with a client that sends what `bad` says; what the ledger says of each version."""
    send, ids = Lanes.send, set[str]()

    def meddled(self: Lanes, data: bytes, cause: int, *, last: bool = False) -> None:
        if bad is not None and self._connection.client in ids:
            bad(self, lambda *args, **named: send(self, *args, **named), data, cause, last)
        else:
            send(self, data, cause, last=last)

    patch = pytest.MonkeyPatch()
    patch.setattr(Lanes, "send", meddled)
    try:
        threads = []
        for number in range(NUM):
            app = replace(dealt(plan, number), floors=LABELS)
            threads.append(client_of(operations, url, path / f"c{number}", app))
            if number == BAD:
                known = operations.driver.presence.clients
                ids.add(known[number].id)
        operations.add_run(RUN, plan)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
    finally:
        patch.undo()
    with operations.driver.store.read() as tables:
        lines = tables.ledger_lines(RUN)
    bodies = [msgspec.json.decode(line) for line in lines]
    assert bodies[-1]["kind"] == "end" and bodies[-1]["body"]["reason"] == "all rounds done", lines[-1]
    return [body["body"] for body in bodies if body["kind"] == "commit"]


@contextmanager
def served(path: Path) -> Iterator[tuple[Operations, str]]:
    with operated(path / "home", NUM) as operations, serving(operations) as url:
        yield operations, url


def changed(data: bytes, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> bytes:
    """A message with other values or labels."""
    payload = unpack(data, max_bytes=1 << 20)
    *sides, exact = payload.sides
    exact = dict(exact)
    values = change(payload.carrier.clone(), exact)
    return pack(Payload(values, (*sides, exact)))


def kind_of(data: bytes) -> int:
    return int(unpack(data, max_bytes=1 << 20).sides[-1]["about"][0])


def rubbish(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    send(b"rubbish", cause, last=last)


def short(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    send(changed(data, lambda values, exact: values[:-8]), cause, last=last)


def nan(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    send(changed(data, lambda values, exact: values.fill_(torch.nan)), cause, last=last)


def nan_layers(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    send(changed(data, lambda values, exact: values.fill_(torch.inf)) if last else data, cause, last=last)


def labels(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    def change(values: torch.Tensor, exact: dict[str, torch.Tensor]) -> torch.Tensor:
        if TARGETS in exact:
            exact[TARGETS] = exact[TARGETS] + 100
        return values

    send(changed(data, change), cause, last=last)


def twice(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    send(data, cause, last=last)
    send(data, cause, last=last)


def ends_early(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    end = SessionEnd(session=lanes._session, reason="out of power")
    lanes._connection.ask(endpoints.END_SESSION, end, run=lanes._run, attempt=lanes._attempt)


def says_nothing(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
    return


CASES: dict[str, tuple[Send, str, bool]] = {
    "rubbish": (rubbish, "cannot be read", True),
    "short": (short, "shape", True),
    "nan": (nan, "NaN or Inf", False),
    "nan layers": (nan_layers, "NaN or Inf", False),
    "labels": (labels, "label", True),
    "twice": (twice, "due|twice|batch", True),
    "leaves": (ends_early, "out of power", False),
    "silent": (says_nothing, "did no batch in 2 s", False),
}
"""What a client does, what the ledger says of it, and whether it is an offence."""


@pytest.mark.parametrize(
    "name",
    [name if name in ("nan", "short", "silent") else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_what_a_client_sends_that_is_not_due_leaves_it_out(tmp_path: Path, name: str) -> None:
    bad, why, offends = CASES[name]
    plan = PLAN if name != "silent" else PLAN.replace({"rounds": 1})
    with served(tmp_path) as (operations, url):
        commits = federation_of(operations, url, tmp_path, plan, bad)
        with operations.driver.store.read() as tables:
            offences = {row.number: row.offences for row in tables.clients()}
    assert len(commits) == plan.rounds
    for commit in commits:
        assert [each["client"] for each in commit["cohort"]] == [0, 2]
    [rejected] = commits[0]["rejected"]
    assert rejected["client"] == BAD and re.search(why, rejected["why"]), rejected
    assert bool(offences[BAD]) == offends and not offences[0] and not offences[2]


def test_what_a_server_sends_that_is_not_due_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that the ledger does not name, and gradients that are not finite, are left with a reason."""
    down, lies = RemoteExchange._down, {"kind": Kind.WEIGHTS}

    def lying(self: RemoteExchange, message: Any, ready: Any) -> None:
        if self.task.client == BAD and message.kind == lies["kind"]:
            values = message.values + 1 if message.kind == Kind.WEIGHTS else message.values * torch.nan
            message = message._replace(arrays={"values": values})
        down(self, message, ready)

    monkeypatch.setattr(RemoteExchange, "_down", lying)
    for kind, why in ((Kind.WEIGHTS, "other layers than its ledger names"), (Kind.GRADIENTS, "NaN or Inf")):
        lies["kind"] = kind
        path = tmp_path / kind.name
        path.mkdir()
        with served(path) as (operations, url):
            commits = federation_of(operations, url, path, PLAN.replace({"rounds": 1}), None)
        [rejected] = commits[0]["rejected"]
        assert rejected["client"] == BAD and why in rejected["why"], rejected


def test_requests_of_a_session_are_checked(tmp_path: Path) -> None:
    """Another's session, parts that no message has, messages too far ahead, answers to nothing, and false words."""
    found: dict[str, str] = {}

    def probe(lanes: Lanes, send: Callable[..., None], data: bytes, cause: int, last: bool) -> None:
        if not found:
            for name, (told, body) in cases_of(lanes).items():
                ask(lanes, found, name, told, body)
            end = SessionEnd(session=lanes._session, transcript="0" * 64, signature=bytes(64), broadcast="0" * 64)
            try:
                lanes._connection.ask(endpoints.END_SESSION, end, run=RUN, attempt=lanes._attempt)
            except Declined as declined:
                found["end"] = f"{declined.status} {declined}"
        send(data, cause, last=last)

    def cases_of(lanes: Lanes) -> dict[str, tuple[SessionPart, bytes]]:
        mine = SessionPart(session=lanes._session, number=5)
        change = msgspec.structs.replace
        return {
            "other": (change(mine, session="0" * 32), b"x"),
            "parts": (change(mine, parts=1000), bytes(CHUNK)),
            "part": (change(mine, part=1), b"x"),
            "short": (change(mine, parts=2), b"x"),
            "long": (change(mine), bytes(CHUNK)),
            "ahead": (change(mine, number=100), b"x"),
            "cause": (change(mine, cause=50), b"x"),
        }

    def ask(lanes: Lanes, found: dict[str, str], name: str, told: SessionPart, body: bytes) -> None:
        connection: Connection = lanes._connection
        try:
            data = connection.ask(endpoints.EXCHANGE, body, metadata=told, run=RUN, attempt=lanes._attempt)
            found[name] = str(read_parcel(data))
        except Declined as declined:
            found[name] = f"{declined.status} {declined}"

    with served(tmp_path) as (operations, url):
        commits = federation_of(operations, url, tmp_path, PLAN.replace({"rounds": 1}), probe)
    assert found.pop("other").startswith("410")
    assert all(text.startswith("422") for text in found.values()), found
    assert "at most 1 parts" in found["parts"] and "wait for answers" in found["ahead"], found
    assert [each["client"] for each in commits[0]["cohort"]] == [0, 2]  # its word was false


def test_a_parcel_is_read_strictly() -> None:
    with pytest.raises(msgspec.ValidationError):
        read_parcel(msgspec.msgpack.encode([0, -1, b""]))
    assert read_parcel(msgspec.msgpack.encode(Parcel(1, 1, b"x"))) == Parcel(1, 1, b"x")


@pytest.mark.slow
def test_a_client_that_waits_for_others_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn the last client waits longer than a batch may take, as each before it takes most of that for a batch."""
    plan = PLAN.replace({"split.way": "in_turn", "rounds": 1, "policy.deadline": 1.5})
    side = split_session.client_side

    def slow(*args: Any) -> Any:
        machine = side(*args)

        def loaded(step: int) -> Any:
            threading.Event().wait(0.9)
            return machine.load(step)

        return replace(machine, load=loaded)

    monkeypatch.setattr(split_session, "client_side", slow)
    with served(tmp_path) as (operations, url):
        commits = federation_of(operations, url, tmp_path, plan, None)
    assert len(commits[0]["cohort"]) == NUM
