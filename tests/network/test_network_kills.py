"""Servers and clients that are killed again and again: the run ends as if nothing had happened, to the bit."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers import rows
from network.federation import RUN, Federation, federation, simulated, until
from network.fork_server import ForkServer

from atoll import Plan
from atoll.network.protocol.objects import CHUNK

NUM = 3
PLAN = Plan(
    seed=5,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    algorithm="scaffold",
    policy={"size": 2},
    local={"steps": 3, "batch_size": 16},
    uplink=[{"name": "top_k", "fraction": 0.3}],
    downlink=["delta", {"name": "quantise", "bits": 6}],
    evaluation={"every": 5},
)
"""Clients and server both remember: SCAFFOLD's controls, error feedback, and what was sent as differences."""
IN_CHUNKS = PLAN.replace({"model": {"name": "mlp_2nn", "hidden": 600}})
"""With updates that are too large for one request."""
BOTH = pytest.mark.parametrize("plan", [PLAN, IN_CHUNKS], ids=["whole", "chunks"])
ONCE = ("--clients", str(NUM), "--once")


def num_rounds(made: Federation) -> int:
    """How many versions were made, by the file that people see."""
    path = made.directory() / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_round(made: Federation, target: int) -> None:
    end = time.monotonic() + 120
    while num_rounds(made) < target:
        assert time.monotonic() < end, f"round {target} does not come\n{made.said()}"
        time.sleep(0.02)


def begun(made: Federation) -> None:
    made.serve(*ONCE)
    made.enrol(NUM)
    for number in range(NUM):
        made.join(number)


def storm(made: Federation, kills: dict[str, int], rounds: int, seed: int) -> Counter[str]:
    """Kill server and clients at random moments over the whole run; whom it hit how often.

    Every so often what was just started is killed again before it can have done much.
    """
    rng, hit = random.Random(seed), Counter[str]()
    victims = [who for who, num in kills.items() for _ in range(num)]
    rng.shuffle(victims)
    for index, who in enumerate(victims):
        if rng.random() < 0.7:
            target = (rounds - 4) * index // len(victims)
            wait_for_round(made, target)
        moment = time.monotonic() + rng.uniform(0, 0.5)
        while time.monotonic() < moment and num_rounds(made) < rounds - 4:  # a fast machine must not end before
            time.sleep(0.005)
        number = rng.randrange(NUM)
        child = made.server if who == "server" else made.clients[number]
        assert child is not None
        code = child.kill()
        assert code == -9, f"{who} ended by itself with {code} after {sum(hit.values())} kills\n{made.said()}"
        hit[who] += 1
        if who == "server":
            made.serve(*ONCE, ready=False)
        else:
            made.join(number)
    return hit


def acknowledged(made: Federation) -> set[tuple[int, int]]:
    """Client and round of every update that the server said was safe, as clients printed it."""
    found = set()
    for number in range(NUM):
        text = (made.root / f"c{number}.out").read_text()
        found |= {(number, int(each)) for each in re.findall(rf"^{RUN}: round (\d+): .* up in", text, re.MULTILINE)}
    return found


def assert_undisturbed(made: Federation, plan: Plan, path: Path) -> None:
    """The run ended with the bits of one that nothing happened to, and its books are in order."""
    assert made.model() == simulated(plan, path)
    found = made.audited()
    assert (found.rounds, found.abandoned, found.rejected, found.ended) == (plan.rounds, 0, 0, "all rounds done")
    counted = [(each["client"], commit["version"]) for commit in made.commits() for each in commit["cohort"]]
    assert len(counted) == len(set(counted)) == 2 * plan.rounds
    assert acknowledged(made) <= set(counted)
    ours, theirs = made.rows(), rows(path)
    assert [row["round"] for row in ours] == list(range(1, plan.rounds + 1))
    for name in ("test", "bytes_up", "bytes_down"):
        assert [row.get(name) for row in ours] == [row.get(name) for row in theirs]
    assert (made.directory() / "result.json").exists()
    assert not [path for path in (made.directory() / "uploads").rglob("*") if path.is_file()]
    assert len(list(made.directory().glob("*state-*"))) == 1


@pytest.mark.parametrize("plan", [PLAN, pytest.param(IN_CHUNKS, marks=pytest.mark.slow)], ids=["whole", "chunks"])
def test_a_few_kills(processes: ForkServer, certs: Path, tmp_path: Path, plan: Plan) -> None:
    plan = plan.replace({"rounds": 12})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        begun(made)
        assert storm(made, {"server": 3, "client": 3}, plan.rounds, seed=1) == {"server": 3, "client": 3}
        made.wait(180)
        assert_undisturbed(made, plan, tmp_path / "alone")
        update = min(row["bytes_up"] for row in made.rows()) / 2
        assert (update > CHUNK) == (plan.model.name == "mlp_2nn")


def test_polite_stops(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    """Whoever is asked to end does so at once, with nothing lost, and goes on when it is started again."""
    plan = PLAN.replace({"rounds": 10})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        begun(made)
        for done in (2, 5):
            until(lambda done=done: num_rounds(made) >= done, 60)
            server, client = made.server, made.clients[1]
            assert server is not None
            server.signal(signal.SIGTERM)
            assert server.wait(15) == 0, server.said
            client.signal(signal.SIGTERM if done == 2 else signal.SIGINT)
            assert client.wait(15) == 130, client.said
            assert "stopped; everything is kept: the same command goes on" in client.said
            made.serve(*ONCE)
            made.join(1)
        made.wait(180)
        assert_undisturbed(made, plan, tmp_path / "alone")


def test_in_the_background_only_a_polite_kill_stops(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    """As under nohup: what is ignored when a command starts stays ignored, and SIGTERM ends it as always."""
    plan = PLAN.replace({"rounds": 100_000})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        server = made.serve(*ONCE, in_background=True)
        made.enrol(NUM)
        clients = [made.join(number, in_background=True) for number in range(NUM)]
        wait_for_round(made, 1)
        for child in (server, *clients):
            child.signal(signal.SIGINT)
        wait_for_round(made, num_rounds(made) + 3)
        assert [child.code for child in (server, *clients)] == [None] * (1 + NUM), made.said()
        for child in (*clients, server):
            child.signal(signal.SIGTERM)
        assert [child.wait(60) for child in (*clients, server)] == [130] * NUM + [0], made.said()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_two_hundred_kills_of_each(
    processes: ForkServer, certs: Path, tmp_path: Path, store_url: str, seed: int
) -> None:
    """Fifty of the server and fifty of clients in each of four runs, with SQLite and with PostgreSQL."""
    plan = PLAN.replace({"rounds": 160, "seed": seed})
    with federation(tmp_path / "f", processes, certs, plan, store_url) as made:
        begun(made)
        assert storm(made, {"server": 50, "client": 50}, plan.rounds, seed) == {"server": 50, "client": 50}
        made.wait(180)
        assert_undisturbed(made, plan, tmp_path / "alone")


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("who", ["server", "client"])
def test_a_death_at_each_change_of_a_file(
    processes: ForkServer, certs: Path, tmp_path: Path, who: str, plan: Plan
) -> None:
    """Wherever a process is about to change a file it dies there once; it is started again, and all ends well.

    With chunks there are many such places, most of them alike: every fifth is tried.
    """
    step, plan = (5 if plan is IN_CHUNKS else 1), plan.replace({"rounds": 2})
    whole, kept = simulated(plan, tmp_path / "whole"), tmp_path / "kept"
    with federation(tmp_path / "f", processes, certs, plan) as made:
        made.serve(*ONCE)
        made.enrol(NUM)
        made.stop()
        shutil.copytree(made.root, kept)
        number = 1 - step
        while True:
            number += step
            server = made.serve(*ONCE, ready=False, die_at=number if who == "server" else 0)
            clients = [made.join(each, die_at=number if who == "client" and not each else 0) for each in range(NUM)]
            mortal = server if who == "server" else clients[0]
            if mortal.wait(60) != 0:
                assert mortal.code == -9, mortal.said
                made.serve(*ONCE, ready=False) if who == "server" else made.join(0)
            made.wait(180)
            assert made.model() == whole, f"after change {number}\n{made.said()}"
            found = made.audited()
            assert (found.rounds, found.abandoned, found.ended) == (2, 0, "all rounds done"), f"after change {number}"
            assert (made.directory() / "result.json").exists(), f"after change {number}"
            assert [row["round"] for row in made.rows()] == [1, 2], f"after change {number}"
            if mortal.code == 0:
                break
            made.stop()
            shutil.rmtree(made.root)
            shutil.copytree(kept, made.root)
    print(f"{number - 1} deaths of the {who}")
    assert number > 40


@pytest.mark.slow
def test_a_death_at_each_change_of_a_file_before_it_serves(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    number = 1
    while True:
        with federation(tmp_path / str(number), processes, certs, PLAN) as made:
            server = made.serve(*ONCE, ready=False, die_at=number)
            until(lambda server=server: server.code is not None or "serving" in server.said, 60)
            if server.code is None:
                break
            made.serve(*ONCE)
            assert made.status()["status"] == "running", made.said()
        number += 1
    print(f"{number - 1} deaths")
    assert number > 10
