"""Split learning over a network in trouble: kills of any party, lost replies, a party that stops."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import rows
from network.federation import Federation, federation, simulated, until
from network.fork_server import ForkServer
from network.proxy import FaultyProxy
from split.parties import vertical_plan

from atoll import Plan

NUM = 3
ONCE = ("--clients", str(NUM), "--once")
BASE = Plan(
    seed=3,
    rounds=6,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.1, "batch_size": 12, "steps": 6},
    evaluation={"every": 3},
)
TAIL = {"cut": "2", "tail": "5", "micro_batches": 2, "codecs": [{"name": "quantise", "bits": 8}]}
TOGETHER = ("in_turn", "splitfed_v1", "splitfed_v2")
WAYS = (*TOGETHER, "vertical")


def plan_for(way: str, **more: Any) -> Plan:
    if way == "vertical":
        pieces = {"split_micro_batches": 2, "split_codecs": TAIL["codecs"]}
        return vertical_plan(split_tail="2", **pieces, evaluation={"every": 3}).replace(
            {"seed": 3, "rounds": 6, **more}
        )
    return BASE.replace({"split": {**TAIL, "way": way}, **more})


def begun(made: Federation) -> None:
    made.serve(*ONCE)
    made.enrol(NUM)
    for number in range(NUM):
        join(made, number)


def join(made: Federation, number: int) -> None:
    is_vertical = "vertical" in (made.root / "plan.toml").read_text()
    made.join(number, app="network.apps:party" if is_vertical else "network.apps:split")


def num_rounds(made: Federation) -> int:
    path = made.directory() / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def storm(made: Federation, kills: dict[str, int], rounds: int, seed: int) -> Counter[str]:
    """Kill server and clients at random moments, spread over the whole run; whom it hit how often."""
    rng, hit = random.Random(seed), Counter[str]()
    victims = [who for who, num in kills.items() for _ in range(num)]
    rng.shuffle(victims)
    for index, who in enumerate(victims):
        target = (rounds - 1) * index // len(victims)
        until(lambda target=target: num_rounds(made) >= target, 120, made.said)
        time.sleep(rng.uniform(0, 0.4))
        number = rng.randrange(NUM)
        child = made.server if who == "server" else made.clients[number]
        assert child is not None
        if child.code is None and child.kill() == -9:
            hit[who] += 1
        if who == "server":
            made.serve(*ONCE, ready=False)
        else:
            join(made, number)
    return hit


def assert_as_simulated(made: Federation, plan: Plan, path: Path) -> None:
    """The run ended with bits and rows of one that nothing happened to, and its books are in order."""
    assert made.model() == simulated(plan, path)
    found = made.audited()
    assert (found.rounds, found.abandoned, found.rejected, found.ended) == (plan.rounds, 0, 0, "all rounds done")
    for mine, theirs in zip(made.rows(), rows(path), strict=True):
        for name in ("test", "train_loss", "bytes_up", "bytes_down", "messages", "round_trips", "cut_bytes"):
            assert mine.get(name) == theirs.get(name), name
    for commit in made.commits():
        assert all(each["object"] and each["session"]["up"][0] > 0 for each in commit["cohort"])
    assert (made.directory() / "result.json").exists()


FAST = ("vertical",)


@pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_kills_of_any_party(processes: ForkServer, certs: Path, tmp_path: Path, way: str) -> None:
    plan = plan_for(way)
    with federation(tmp_path / "f", processes, certs, plan) as made:
        begun(made)
        hit = storm(made, {"server": 2, "client": 3}, plan.rounds, seed=WAYS.index(way))
        made.wait(180)
        assert hit["server"] and hit["client"], made.said()
        assert_as_simulated(made, plan, tmp_path / "alone")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1, 2])
def test_many_kills_of_any_party(processes: ForkServer, certs: Path, tmp_path: Path, way: str, seed: int) -> None:
    plan = plan_for(way, rounds=30, seed=seed)
    with federation(tmp_path / "f", processes, certs, plan) as made:
        begun(made)
        hit = storm(made, {"server": 12, "client": 20}, plan.rounds, seed)
        made.wait(300)
        assert hit["server"] > 8 and hit["client"] > 12, made.said()
        assert_as_simulated(made, plan, tmp_path / "alone")


LOST = ("splitfed_v1", "splitfed_v2", "vertical")


@pytest.mark.parametrize("way", [LOST[0], *(pytest.param(way, marks=pytest.mark.slow) for way in LOST[1:])])
def test_lost_and_repeated_requests(processes: ForkServer, certs: Path, tmp_path: Path, way: str) -> None:
    plan = plan_for(way, rounds=2)
    with federation(tmp_path / "f", processes, certs, plan) as made, FaultyProxy(made.port, certs, 1).between() as bad:
        made.serve(*ONCE)
        made.enrol(NUM)
        bad.deck = {"passed": 30, "lost": 1, "unanswered": 1, "doubled": 1}
        made.url = f"https://localhost:{bad.port}"
        for number in range(NUM):
            text = (made.root / f"c{number}" / "server.json").read_text()
            (made.root / f"c{number}" / "server.json").write_text(text.replace(f":{made.port}", f":{bad.port}"))
            join(made, number)
        made.wait(180)
        assert min(bad.did[kind] for kind in ("lost", "unanswered", "doubled")) > 1, bad.did
        assert_as_simulated(made, plan, tmp_path / "alone")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) for way in TOGETHER])
def test_a_client_that_stops_is_left_out(processes: ForkServer, certs: Path, tmp_path: Path, way: str) -> None:
    """It counts again once it goes on, and the rounds between are made by the others."""
    plan = plan_for(way, rounds=8, **{"policy": {"name": "cohort", "min_reports": 1, "deadline": 2.0}})
    with federation(tmp_path / "f", processes, certs, plan) as made:
        begun(made)
        until(lambda: num_rounds(made) >= 1, 60, made.said)
        made.clients[1].signal(signal.SIGSTOP)
        until(lambda: any(len(commit["cohort"]) < NUM for commit in made.commits()), 60, made.said)
        made.clients[1].signal(signal.SIGCONT)
        made.wait(180)
        found = made.audited()
        assert (found.rounds, found.ended) == (plan.rounds, "all rounds done")
        left_out = [commit["rejected"] for commit in made.commits() if commit["rejected"]]
        print(left_out)


@pytest.mark.slow
def test_a_party_that_stops_is_waited_for(processes: ForkServer, certs: Path, tmp_path: Path) -> None:
    """Every step needs every party: rounds in which one is silent are abandoned, and made once it goes on."""
    plan = plan_for("vertical", **{"policy.deadline": 2.0})
    with federation(tmp_path / "f", processes, certs, plan) as made:

        def num_abandoned() -> int:
            return (made.root / "server.out").read_text().count('"event": "abandoned"')

        begun(made)
        until(lambda: num_rounds(made) >= 1, 60, made.said)
        before = num_abandoned()
        made.clients[0].signal(signal.SIGSTOP)
        until(lambda: num_abandoned() > before, 60, made.said)
        made.clients[0].signal(signal.SIGCONT)
        made.wait(180)
        found = made.audited()
        assert (found.rounds, found.ended) == (plan.rounds, "all rounds done") and found.abandoned > before
        assert all(len(commit["cohort"]) == NUM for commit in made.commits())
