"""A real server among strangers, liars and vandals: each is turned away alone, and the honest go on.

Shapes: D parameters.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import torch
import zstandard
from network.federation import RUN, Federation, federation, memory_of, until
from network.fork_server import ForkServer
from network.raw_client import NUM_PARAMS, TASK, RawClient, RawConnection, approved_raw_clients, constant_update, packed

from atoll import Plan
from atoll.core.messages import Payload
from atoll.core.wire import HEADER, MAGIC, ZSTD, pack
from atoll.network.protocol.endpoints import ENDPOINTS, MAX_CONTROL
from atoll.network.protocol.messages import Delivery, Enrol, Poll, Refusal
from atoll.network.protocol.objects import manifest_of

ENDLESS = 1_000_000
MANY = Plan(rounds=ENDLESS, policy={"name": "cohort"}, evaluation={"every": 0})
"""Everybody is asked, and a version is made when all have answered or failed."""
MEGABYTE = 1 << 20


@pytest.fixture
def made(processes: ForkServer, certs: Path, tmp_path: Path) -> Iterator[Federation]:
    """A federation with an endless run of everybody."""
    with federation(tmp_path / "f", processes, certs, MANY) as found:
        yield found


def metric(made: Federation, name: str) -> float:
    """A figure as Prometheus reads it."""
    text = httpx2.get(f"http://127.0.0.1:{made.admin_port}/metrics", trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_lies_about_weight_are_cut_and_nonsense_is_refused(made: Federation) -> None:
    honest, liar = approved_raw_clients(made, 2)
    made.serve("--clients", "2", "--max-samples", "100")
    for raw_client in (honest, liar):
        raw_client.begin()
        raw_client.orders(0, num_samples=1 << 53 if raw_client is liar else 50)
    order = honest.order(num_samples=50)
    before_D = honest.model(order)
    assert honest.deliver(order, constant_update(3.0), weight=50.0, num_samples=50).status == 200
    task = liar.order()
    data = constant_update(6.0)
    for text in (b"NaN", b"Infinity", b"-Infinity", b'"50"', b"null", b"1e999"):
        body = msgspec.json.encode(Delivery(b"", 10, 1.0, 12345.0, bytes(64))).replace(b"12345.0", text)
        said = liar.ask("POST", f"{TASK.format(run=RUN, attempt=task.attempt)}/update", body)
        assert 400 <= said.status < 500, (text, said)
    assert liar.deliver(task, data, weight=1e12, num_samples=1 << 53).status == 200
    second = honest.order(num_samples=50)
    assert second.version == 1
    torch.testing.assert_close(honest.model(second), before_D + (50 * 3.0 + 100 * 6.0) / 150)
    said = liar.deliver(liar.order(), data, weight=-5.0)
    assert said.status == 422
    assert "a weight of -5.0 makes no sense" in said.error
    (commit,) = made.commits()
    assert {each["client"]: each["weight"] for each in commit["cohort"]} == {0: 50.0, 1: 1e12}  # as they signed it
    made.audited()


def bad_updates() -> dict[str, tuple[bytes, str]]:
    """Updates that are none, and what is said of them."""
    nan_D, huge_D = torch.zeros(NUM_PARAMS), torch.zeros(NUM_PARAMS)
    nan_D[7], huge_D[3] = torch.nan, torch.inf
    good = pack(Payload(torch.zeros(NUM_PARAMS)))
    frame = zstandard.ZstdCompressor().compress(bytes(4 * NUM_PARAMS))
    table = good[HEADER.size : HEADER.size + 10]

    def bomb(declared: int, frames: bytes) -> bytes:
        return HEADER.pack(MAGIC, 1, ZSTD, 0, declared) + table + frames

    more = zstandard.ZstdCompressor().compress(bytes(64 * MEGABYTE))
    lying = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(4 * NUM_PARAMS + 5000)))
    lying[5:7] = struct.pack("<H", 4 * NUM_PARAMS - 256)  # the frame's own word on how much is in it
    return {
        "another shape": (constant_update(0.0, NUM_PARAMS - 1), "(649,) values"),
        "another type": (packed(torch.zeros(NUM_PARAMS, dtype=torch.float64)), "other names or types"),
        "NaN": (packed(nan_D), "NaN or Inf"),
        "Inf": (packed(huge_D), "NaN or Inf"),
        "rubbish": (b"\0rubbish" * 100, "not a payload"),
        "nothing": (b"", "not a payload"),
        "cut off": (good[:-1], "bytes declared, got"),
        "sides that nobody asked for": (pack(Payload(torch.zeros(NUM_PARAMS), ({"x": torch.zeros(1)},))), "names or"),
        "a bomb that says so": (bomb(10 << 30, struct.pack("<I", len(more)) + more), "are allowed"),
        "a bomb that lies": (bomb(len(good), struct.pack("<I", len(more)) + more), "a chunk of 67108864 bytes"),
        "a frame that lies": (bomb(len(good), struct.pack("<I", len(lying)) + bytes(lying)), "cannot be decompressed"),
        "more frames than are due": (bomb(len(good), 2 * (struct.pack("<I", len(frame)) + frame)), "bytes arrived"),
    }


@pytest.mark.parametrize("whole", [True, False])
def test_bad_updates_are_left_out_one_by_one_and_their_senders_shut_out_after_three(
    made: Federation, whole: bool
) -> None:
    bad = bad_updates()
    honest, *vandals = approved_raw_clients(made, 1 + len(bad))
    server = made.serve("--clients", str(1 + len(bad)))
    everybody = [honest, *vandals]
    for raw_client in everybody:
        raw_client.begin()
        raw_client.orders(0)
    order = honest.order()
    memory = memory_of(server.pid)
    for vandal, (what, (data, why)) in zip(vandals, bad.items(), strict=True):
        said = vandal.deliver(vandal.order(), data, whole=whole)
        assert (said.status, why in said.error) == (422, True), (what, said)
    assert memory_of(server.pid) - memory < 48 * MEGABYTE
    before_D = honest.model(order)
    assert honest.deliver(order, constant_update(1.0), whole=whole).status == 200
    second = honest.order()
    torch.testing.assert_close(honest.model(second), before_D + 1.0, rtol=0, atol=0)
    (commit,) = made.commits()
    assert [each["client"] for each in commit["cohort"]] == [0]
    assert [each["client"] for each in commit["rejected"]] == list(range(1, len(everybody)))
    assert metric(made, 'atoll_updates_total{outcome="rejected"') == len(bad)
    assert {row["offences"] for row in made.operate("GET", "/clients")["clients"]} == {0, 1}
    vandal = vandals[0]
    for _ in range(2):
        assert vandal.deliver(vandal.order(), b"rubbish", whole=whole).status == 422
        for raw_client in vandals[1:]:  # who are asked too, and know better now
            assert raw_client.deliver(raw_client.order(), constant_update(0.0)).status == 200
        assert honest.deliver(honest.order(), constant_update(0.0)).status == 200
        honest.order()
    said = vandal.ask("POST", "/v1/poll", Poll(10, 0.0))
    assert (said.status, said.error) == (403, "this client was shut out: ask the operator why")
    told = {row["name"]: row["status"] for row in made.operate("GET", "/clients")["clients"]}
    assert told["light 1"] == "quarantined"
    assert told["light 2"] == "approved"
    assert made.audited().rounds == 3
    assert not [path for path in (made.directory() / "uploads").rglob("*") if path.is_file()]


def test_an_update_in_one_request_is_what_is_said_of_it(made: Federation) -> None:
    raw_client, other = approved_raw_clients(made, 2)
    made.serve("--clients", "2")
    for each in (raw_client, other):
        each.begin()
        each.orders(0)
    order, data = raw_client.order(), constant_update(1.0)
    path = f"{TASK.format(run=RUN, attempt=order.attempt)}/update"
    told = raw_client.told(order, data, 10.0, 1.0, 10)
    for wrong, status in (
        (b"", 400),
        (b"{}", 400),
        (b"rubbish", 400),
        (msgspec.json.encode(raw_client.told(order, constant_update(2.0), 10.0, 1.0, 10)), 422),
        (msgspec.json.encode(raw_client.told(order, data * 2, 10.0, 1.0, 10)), 422),
        (msgspec.json.encode(msgspec.structs.replace(told, weight=11.0)), 403),
        (msgspec.json.encode(other.told(order, data, 10.0, 1.0, 10)), 403),
    ):
        assert raw_client.put(path, data, wrong).status == status, wrong
    assert raw_client.ask("PUT", path, data).status == 400
    assert raw_client.put(path, bytes(2 * MEGABYTE), msgspec.json.encode(told)).status in (0, 413)
    raw_client.begin()
    for _ in range(2):  # its answer was lost
        said = raw_client.put(path, data, msgspec.json.encode(told))
        assert (said.status, json.loads(said.body)["object"]) == (200, manifest_of(data).name())
    assert raw_client.deliver(order, constant_update(2.0)).status == 410
    assert other.deliver(other.order(), constant_update(3.0), whole=False).status == 200
    assert raw_client.order().version == 1
    (commit,) = made.commits()
    assert [each["client"] for each in commit["cohort"]] == [0, 1] and not commit["rejected"]
    assert {row["offences"] for row in made.operate("GET", "/clients")["clients"]} == {0}
    made.audited()


def test_strangers_and_those_who_were_shut_out(made: Federation) -> None:
    raw_client, other = approved_raw_clients(made, 2)
    made.serve("--clients", "2")
    stranger = RawClient(made.port, made.certs)
    assert stranger.begin().status == 401
    said = stranger.ask("POST", "/v1/poll", Poll(1, 0.0), epoch=1)
    assert (said.status, said.error) == (401, "this server does not know this client: enrol it")
    raw_client.begin()
    other.begin()
    for endpoint in ENDPOINTS:
        if not endpoint.public:
            path = endpoint.path.format(run=RUN, attempt=0, name="0" * 64, index=0, start=0, digest="0" * 64, version=0)
            assert raw_client.plain(endpoint.method, path).status == 401, endpoint
            said = stranger.ask(
                endpoint.method, path, client=raw_client.id, epoch=raw_client.epoch
            )  # in another's name
            assert (said.status, "not signed with this client's key" in said.error) == (401, True), endpoint
    assert "time differs" in raw_client.ask("POST", "/v1/poll", Poll(1, 0.0), time=int(time.time()) - 400).error
    assert raw_client.ask("POST", "/v1/poll", Poll(1, 0.0), epoch=raw_client.epoch + 1).status == 401
    asked = Enrol("no such token", "stranger", bytes(32), bytes(64))
    assert stranger.plain("POST", "/v1/enrol", asked).status == 403
    raw_client.orders(0)
    other.orders(0)
    order = raw_client.order()
    other.order()
    made.operate("POST", "/clients/revoke", {"names": ["light 1"]})
    for said in (
        other.ask("POST", "/v1/poll", Poll(1, 0.0)),
        other.begin(),
        other.deliver(order, constant_update(1.0)),
    ):
        assert (said.status, said.error) == (403, "this client was shut out: ask the operator why")
    assert raw_client.deliver(order, constant_update(1.0)).status == 200  # the round is over without the other
    assert raw_client.order().version == 1
    (commit,) = made.commits()
    assert [each["client"] for each in commit["cohort"]] == [0]
    assert commit["rejected"] == [{"client": 1, "attempt": 0, "why": "client revoked"}]


def test_who_waits_for_work_is_told_at_once_that_it_was_shut_out(made: Federation) -> None:
    raw_client, other = approved_raw_clients(made, 2)
    made.serve("--clients", "2")
    for each in (raw_client, other):
        each.begin()
        each.orders(0)
    assert raw_client.deliver(raw_client.order(), constant_update(1.0)).status == 200  # and there is nothing more to do
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(raw_client.ask, "POST", "/v1/poll", Poll(10, 25.0))
        until(lambda: metric(made, "atoll_polls_waiting") == 1, 20, "a poll that waits")
        start = time.monotonic()
        made.operate("POST", "/clients/revoke", {"names": ["light 0"]})
        said = waiting.result(60)
    assert (said.status, said.error) == (403, "this client was shut out: ask the operator why")
    assert time.monotonic() - start < 20  # a poll has 25 s


def test_a_request_is_heard_once(made: Federation) -> None:
    (raw_client,) = approved_raw_clients(made, 1)
    made.serve("--clients", "1")
    raw_client.begin()
    raw_client.orders(0)
    order = raw_client.order()
    data = constant_update(1.0)
    raw_client.upload(order, data)
    kept: list[bytes] = []
    send = raw_client.send

    def keep(request: bytes) -> Any:
        kept.append(request)
        return send(request)

    raw_client.send = keep  # type: ignore[method-assign]
    assert raw_client.deliver(order, data).status == 200
    raw_client.begin()
    raw_client.order()
    raw_client.send = send  # type: ignore[method-assign]
    lines = made.lines()
    for again in range(2):
        for captured in kept:
            with RawConnection(made.port, made.certs) as line:
                line.say(captured)
                said = line.hear()
            opens = captured.startswith(b"POST /v1/challenge")  # which promises nothing
            assert said.status == (200 if opens else said.status)
            assert opens or said.status in (401, 409), (captured[:60], said)
        if not again:  # a server that was started again has forgotten all sessions
            assert made.server is not None
            made.server.kill()
            made.serve("--clients", "1")
    assert made.lines() == lines
    changed = kept[0].replace(b"/v1/runs/law", b"/v1/runs/saw", 1)
    with RawConnection(made.port, made.certs) as line:
        line.say(changed)
        assert line.hear().status == 401


def test_what_clients_say_is_only_ever_text(made: Federation) -> None:
    """Reasons, names and attributes go into logs, ledgers and the store: none of them may break any."""
    raw_clients = approved_raw_clients(made, 3)
    made.serve("--clients", "3")
    for raw_client in raw_clients:
        raw_client.begin()
        raw_client.orders(0)
    texts = ['\0\x1b[31m"\\\n{"event": "stopping"}', "\U0001f40b" * 900, "</script><script>alert(1)</script>"]
    for raw_client, text in zip(raw_clients, texts, strict=True):
        path = TASK.format(run=RUN, attempt=raw_client.order().attempt)
        assert raw_client.ask("POST", f"{path}/refuse", Refusal(text)).status == 200
    until(lambda: len(made.lines()) == 3, 20)
    assert [each["client"] for each in json.loads(made.lines()[2])["body"]["rejected"]] == [0, 1, 2]
    made.audited()
    for line in (made.root / "server.out").read_text().splitlines()[1:]:
        assert line.startswith("serving") or json.loads(line)["event"] != "stopping"
    long = msgspec.json.encode({"num_samples": 1, "wait": 0, "attributes": {"\0" * 1000: 1.0, "idle": True}})
    assert raw_clients[0].ask("POST", "/v1/poll", long).status == 200
    assert raw_clients[0].ask("POST", "/v1/poll", b"[" * MAX_CONTROL).status == 400
