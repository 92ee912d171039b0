"""A federation in trouble: lost answers, partitions, sleepers, doubles, floors and other versions of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from network.federation import RUN, Federation, federation, memory_of, simulated, until
from network.fork_server import ForkServer
from network.proxy import CuttableProxy, FaultyProxy
from network.raw_client import RawClient, RawConnection, approved_raw_clients, constant_update, request

from atoll import Plan
from atoll.core.errors import AtollError
from atoll.network.client.connection import Connection, tls_context
from atoll.network.protocol import endpoints
from atoll.network.protocol.messages import (
    About,
    Answer,
    Delivery,
    Order,
    Poll,
    update_text,
)
from atoll.network.protocol.objects import manifest_of
from atoll.network.server.web import tls_context as server_tls
from atoll.network.server.web import web_server

NUM = 3
PLAN = Plan(
    seed=5,
    rounds=8,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    algorithm="scaffold",
    policy={"size": 2},
    local={"steps": 3, "batch_size": 16},
    uplink=[{"name": "top_k", "fraction": 0.3}],
    evaluation={"every": 0},
)
PLAIN = PLAN.replace({"algorithm": "fedavg", "uplink": []})


def begun(made: Federation, num: int, *options: str, once: bool = True) -> None:
    made.serve("--clients", str(num), *(["--once"] if once else []), *options)
    made.enrol(num)
    for number in range(num):
        made.join(number, once=once)


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_lost_requests_lost_answers_and_doubled_requests(
    processes: ForkServer, certs: Path, tmp_path: Path, rounds: int
) -> None:
    plan = PLAN.replace({"rounds": rounds})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        faulty_proxy = FaultyProxy(made.port, certs, seed=3)
        with faulty_proxy.between():
            made.serve("--clients", str(NUM))
            made.url = f"https://localhost:{faulty_proxy.port}"
            made.enrol(NUM)
            faulty_proxy.deck = {"lost": 1, "unanswered": 1, "doubled": 3, "passed": 7}
            for number in range(NUM):
                made.join(number)
            assert [child.wait(60 + 10 * rounds) for child in made.clients.values()] == [0] * NUM, made.said()
            assert min(faulty_proxy.did[kind] for kind in faulty_proxy.deck) >= rounds - 1
        assert made.model() == simulated(plan, tmp_path / "alone")
        found = made.audited()
        assert (found.rounds, found.abandoned, found.rejected) == (rounds, 0, 0)


def test_captured_requests_are_refused_when_they_are_played_again(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    with federation(tmp_path / "f", processes, certs, PLAIN.replace({"rounds": 3})) as made:
        faulty_proxy = FaultyProxy(made.port, certs, seed=1)
        with faulty_proxy.between():
            made.serve("--clients", str(NUM))
            made.url = f"https://localhost:{faulty_proxy.port}"
            made.enrol(NUM)
            for number in range(NUM):
                made.join(number)
            assert made.wait_for(RUN, 60) == "all rounds done"
        lines, counts = made.lines(), dict[int, int]()
        with RawConnection(made.port, certs) as line:
            for captured in faulty_proxy.captured:
                line.say(captured)
                said = line.hear()
                harmless = captured.startswith((b"GET /v1/about", b"POST /v1/challenge", b"POST /v1/enrol"))
                assert harmless or said.status in (401, 409), (captured[:80], said)
                counts[said.status] = counts.get(said.status, 0) + 1
        assert counts[409] > 20
        assert made.lines() == lines
        clients = made.operate("GET", "/clients")["clients"]
        assert [(row["name"], row["status"], row["offences"]) for row in clients] == [
            (f"c{number}", "approved", 0) for number in range(NUM)
        ]


class Worker:
    """A light client with the line of a real one: it works until it is told to stop, whatever happens in between."""

    def __init__(self, raw_client: RawClient, url: str, certs: Path) -> None:
        self.raw_client, self.heard, self.errors = raw_client, list[float](), list[Exception]()
        self._going = True
        self._connection = Connection(
            url, raw_client.key, tls_context(certs / "ca.pem"), say=lambda text: None, sleep=self._sleep
        )
        self.thread = threading.Thread(target=self._work)

    def stop(self) -> None:
        self._going = False

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if not self._going:
                raise SystemExit
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))

    def _work(self) -> None:
        with self._connection, contextlib.suppress(SystemExit):
            while self._going:
                try:
                    told = self._connection.ask(endpoints.POLL, Poll(10, 1.0), wait=1.0)
                    self.heard.append(time.monotonic())
                    for order in told.orders:
                        self._deliver(order)
                except AtollError as error:
                    self.errors.append(error)
                    return

    def _deliver(self, order: Order) -> None:
        task: dict[str, Any] = {"run": order.run, "attempt": order.attempt}
        number = self._connection.welcome().number
        data = constant_update(float(number))
        manifest = manifest_of(data)
        packed = msgspec.msgpack.encode(manifest)
        for digest in self._connection.ask(endpoints.MISSING, Answer(packed), **task).chunks:
            self._connection.ask(endpoints.PUT_CHUNK, data, digest=digest, **task)
        told = Delivery(packed, 10, 1.0, 10.0, bytes(64))
        text = update_text(order.run, order.attempt, order.version, manifest.name(), told)
        signed = msgspec.structs.replace(told, signature=self.raw_client.key.sign(text))
        self._connection.ask(endpoints.UPDATE, signed, **task)


@pytest.mark.slow
@pytest.mark.parametrize(("num", "seconds"), [(40, 2.0), (200, 60.0)])
def test_a_partition_after_which_all_come_back_at_once(
    processes: ForkServer, certs: Path, tmp_path: Path, num: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.network.client.connection.FIRST_PAUSE", min(1.0, seconds / 20))
    plan = Plan(rounds=100_000, evaluation={"every": 0})  # more than there is time for: it is stopped
    with federation(tmp_path / "f", processes, certs, plan) as made:
        cuttable_proxy = CuttableProxy(made.port)
        raw_clients = approved_raw_clients(made, num)
        server = made.serve("--clients", str(num))
        with cuttable_proxy.laid():
            workers = [
                Worker(raw_client, f"https://localhost:{cuttable_proxy.port}", certs) for raw_client in raw_clients
            ]
            for worker in workers:
                worker.thread.start()
            try:
                until(lambda: made.status()["round"] >= 1, 120, "a round")
                until(lambda: made.status()["arrived"] > num // 4, 60, "part of another")
                cuttable_proxy.cut()
                time.sleep(1.0)  # what the server has read already, it may still do
                stands = made.status()["round"]
                time.sleep(seconds)
                assert made.status()["round"] == stands
                memory, mended = memory_of(server.pid), time.monotonic()
                cuttable_proxy.mend()
                until(lambda: made.status()["round"] > stands, 60 + 2 * seconds, "all of them")
                took = time.monotonic() - mended
                until(lambda: all(worker.heard[-1] > mended for worker in workers), 60, "everybody's next poll")
                made.operate("POST", "/runs/stop", {"run": RUN})
            finally:
                for worker in workers:
                    worker.stop()
                cuttable_proxy.cut()
                for worker in workers:
                    worker.thread.join()
        assert not [error for worker in workers for error in worker.errors]
        print(f"{num} clients: a round with all of them {took:.1f} s after {seconds} s of partition")
        assert memory_of(server.pid) - memory < 60 << 20
        cohorts = [sorted(each["client"] for each in commit["cohort"]) for commit in made.commits()]
        assert len(cohorts) > stands and all(cohort == list(range(num)) for cohort in cohorts)
        found = made.audited()
        assert (found.rounds, found.abandoned, found.rejected) == (len(cohorts), 0, 0)


@pytest.mark.slow
def test_sleepers_are_not_waited_for_and_do_not_count_when_they_wake(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    num = 6
    plan = PLAIN.replace(
        {"partition.num_clients": num, "rounds": 1000, "policy": {"name": "cohort", "deadline": 1.5, "min_reports": 2}}
    )
    with federation(tmp_path / "f", processes, certs, plan) as made:
        begun(made, num, once=False)
        until(lambda: made.status()["round"] >= 3, 60)
        sleepers, nights = [1, 4], list[tuple[int, int]]()
        while not any("any more" in made.clients[number].said for number in sleepers):
            assert len(nights) < 20, made.said()  # who falls asleep at work is told later that it came too late
            for number in sleepers:
                made.clients[number].signal(signal.SIGSTOP)
            asleep = made.status()["round"]
            until(lambda asleep=asleep: made.status()["round"] >= asleep + 3, 60, made.said)
            nights.append((asleep, made.status()["round"]))
            for number in sleepers:
                made.clients[number].signal(signal.SIGCONT)
            until(lambda: {each["client"] for each in made.commits()[-1]["cohort"]} == set(range(num)), 60, made.said)
        late = made.operate("GET", "/status")["runs"][0]
        made.operate("POST", "/runs/stop", {"run": RUN})
        found = made.audited()
        assert late["status"] == "running"
        assert (found.abandoned, found.ended) == (0, "interrupted")
        for commit in made.commits():
            who = {each["client"] for each in commit["cohort"]}
            if any(asleep + 1 < commit["version"] <= awake for asleep, awake in nights):
                assert who == set(range(num)) - set(sleepers)


@pytest.mark.parametrize("worked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_processes_with_one_key(processes: ForkServer, certs: Path, tmp_path: Path, worked: bool) -> None:
    """The one that came later has the session; if the first had sent something, the later one learns of it."""
    plan = PLAIN.replace({"rounds": 12})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        shutil.copytree(made.root / "c0", made.root / "double")
        first = made.join(0)
        if worked:
            for number in range(1, NUM):
                made.join(number)
            until(lambda: "counts this client's update" in first.said, 60)
        else:
            until(lambda: "joined as c0" in first.said, 60)
        second = made.join(0, home="double")
        assert first.wait(60) == 5, first.said
        assert "another process has begun a session with this key: stop one of them" in first.said
        if worked:
            assert second.wait(60) == 5
            assert "counts an update of this client that it never sent" in second.said
            made.join(0)
        else:
            made.clients[0] = second
            for number in range(1, NUM):
                made.join(number)
        made.wait(90)
        assert made.model() == simulated(plan, tmp_path / "alone")
        assert made.audited().rounds == plan.rounds


FLOORS = {
    "min_cohort = 9": "a version is made of 2 clients, this client asks for at least 9",
    "secagg = true": "this client asks for secure aggregation",
    "max_epsilon = 1.0": "the run is not private, this client asks for an epsilon of at most 1",
    'algorithms = ["scaffold", "fedprox"]': "the algorithm is fedavg, this client runs scaffold, fedprox only",
    "max_model_bytes = 1000": "bytes, this client allows 1,000",
    "max_local_steps = 2": "a task takes 3 steps, this client allows 2",
}


def test_a_plan_that_is_weaker_than_floors_is_refused_with_the_reason(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    num = len(FLOORS) + 3
    policy = {"name": "cohort", "min_reports": 2}
    plan = PLAIN.replace({"partition.num_clients": num, "rounds": 1, "policy": policy})
    privacy = {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-4}
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.serve("--clients", str(num))
        made.enrol(num)
        choosy = [*FLOORS, "max_epsilon = 0.5"]
        for number, text in enumerate(choosy):
            (made.root / f"floors{number}.toml").write_text(f"{text}\n")
            made.join(number, "--floors", f"floors{number}.toml", once=False)
        for number in range(len(choosy), num):
            made.join(number, once=False)
        assert made.wait_for(RUN, 60) == "all rounds done"
        (commit,) = made.commits()
        assert [each["client"] for each in commit["cohort"]] == list(range(len(choosy), num))
        told = {each["client"]: each["why"] for each in commit["rejected"]}
        for number, text in enumerate(choosy[:-1]):
            assert told[number].startswith("refused: "), told
            assert FLOORS[text] in told[number]
            assert FLOORS[text] in made.clients[number].said  # its owner is told too
        made.add("private", plan.replace({"privacy": privacy}))
        assert made.wait_for("private", 60) == "all rounds done"
        (commit,) = made.commits("private")
        told = {each["client"]: each["why"] for each in commit["rejected"]}
        assert re.search(r"the run may spend epsilon .*, this client allows 0.5", told[len(choosy) - 1]), told
        assert made.audited("private").rounds == 1


def test_a_client_of_another_version(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "f", processes, certs, PLAIN) as made:
        begun(made, 1, "--set", "policy.size=1")
        made.clients[0].kill()
        (made.root / "tomorrow.py").write_text(
            "import atoll.network.protocol.messages, atoll.network.client.connection\n"
            "atoll.network.protocol.messages.VERSION = atoll.network.client.connection.VERSION = 2\n"
            "from network.apps import client\n"
        )
        child = made.join(0, app="tomorrow:client")
        assert child.wait(60) == 5
        assert (
            "this server speaks version 1 of the protocol, the client 2: let both run the same version of Atoll"
            in child.said
        )
        with RawConnection(made.port, certs) as line:
            line.say(request("GET", "/v1/about", headers={"atoll-protocol": "2"}))
            assert line.hear().status == 426
            line.say(request("GET", "/v1/about", headers={"atoll-protocol": "1"}))
            assert line.hear().read(About).protocols == (1,)


def test_a_server_of_another_version(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    with federation(tmp_path / "f", processes, certs, PLAIN) as made:
        begun(made, 1, "--set", "policy.size=1")
        made.clients[0].kill()
        assert made.server is not None
        made.server.kill()
        with tomorrow(made.port, certs):
            child = made.join(0)
            assert child.wait(60) == 5
            assert "the server speaks version 2, 3 of the protocol, this Atoll 1: update one" in child.said


@contextlib.contextmanager
def tomorrow(port: int, certs: Path) -> Iterator[None]:
    """A server that does not speak version 1 any more."""
    body = msgspec.json.encode(About((2, 3), bytes(32), int(time.time())))

    async def app(scope: dict[str, object], receive: object, send: object) -> None:
        headers = [(b"content-length", str(len(body)).encode()), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": body})  # type: ignore[operator]

    server = web_server(app, "localhost", port, server_tls(certs / "server.pem", certs / "server.key"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    until(lambda: server.started, 10)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
