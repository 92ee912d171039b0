"""What a server writes at the end of a run is what a simulation of the same plan writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import rows
from network.apps import dealt
from network.federation import federation, simulated, until
from network.fork_server import ForkServer
from network.in_process_server import built_run, client_of, operated, serving

from atoll import Plan
from atoll.core.coordinator import Phase, Reason
from atoll.network.server.runs import RUNNING
from atoll.report.html import write_report

NUM = 4
BASE = Plan(
    seed=11,
    rounds=20,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.3, "batch_size": 16},
    detection="cosine",
    contribution={"name": "leave_one_out"},
    server={"samples": 60},
)


def read(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{path.name} holds {word}, which is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def spent(row: dict[str, Any]) -> int:
    return int(row["bytes_up"] + row["bytes_down"])


def test_a_budget_of_bytes_ends_both_alike_and_is_never_overspent(
    processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    one_round = tmp_path / "one round"
    simulated(BASE.replace({"rounds": 1}), one_round)
    budget = int(3.2 * spent(rows(one_round)[-1]))
    plan = BASE.replace({"stop.bytes": budget, "evaluation.every": 10})
    model = simulated(plan, tmp_path / "alone")
    with federation(tmp_path / "together", processes, certs, plan) as made:
        made.run_to_end(NUM, 180.0)
        ours, alone = made.directory(), tmp_path / "alone"
        assert [row["round"] for row in rows(ours)] == [1, 2, 3]
        assert 0.75 * budget < spent(rows(ours)[-1]) <= budget
        assert rows(ours) == rows(alone)
        assert "test" in rows(ours)[-1]  # nobody knew that it was the last
        assert read(ours / "confusion.json") == read(alone / "confusion.json")
        result, same = read(ours / "result.json"), read(alone / "result.json")
        assert result["reason"] == "byte budget spent"
        assert list(result) == list(same) == ["reason", "rounds", "seconds", "test", "detection", "contribution"]
        assert {**result, "seconds": 0} == {**same, "seconds": 0}
        assert made.model() == model
        assert made.audited().rounds == 3
        for name in ("result.json", "confusion.json"):  # as after a kill before the end was written
            (ours / name).unlink()
        made.serve("--clients", str(NUM))
        assert read(ours / "result.json") == result
        assert read(ours / "confusion.json") == read(alone / "confusion.json")
        page = write_report([ours]).read_text()
        assert "data of the clients&#x27; own" in page
        assert "dirichlet, " not in page.partition("<pre>")[0]


@pytest.mark.parametrize(("lr", "num_rounds"), [(1e39, 0), (1e20, 1)], ids=["overflows", "cannot be measured"])
def test_a_model_that_is_not_finite_ends_a_run_as_diverged(
    processes: ForkServer, certs: Path, tmp_path: Path, lr: float, num_rounds: int
) -> None:
    plan = BASE.replace({"detection": None, "contribution": None, "server": {"lr": lr}, "rounds": 1})
    with federation(tmp_path, processes, certs, plan) as made:
        made.run_to_end(NUM, 180.0)
        result = read(made.directory() / "result.json")
        assert result["reason"] == Reason.DIVERGED
        assert result["rounds"] == made.audited().rounds == num_rounds
        assert (result["test"] or {}).get("loss") is None
        assert made.audited().ended == Reason.DIVERGED


def test_a_run_waits_for_clients_without_turning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a buffer is here, and nobody else is eligible: no attempt is begun in vain until somebody is."""
    plan = Plan(
        partition={"name": "iid", "num_clients": 3},
        local={"lr": 0.1, "batch_size": 32},
        policy={"name": "buffered", "concurrency": 2, "size": 2},
        eligibility={"charging": True},
        rounds=3,
    )
    charging = {0}
    with operated(tmp_path / "server", num_clients=3) as operations, serving(operations) as url:
        apps = [replace(dealt(plan, number), attributes=charger(number, charging)) for number in range(3)]
        threads = [client_of(operations, url, tmp_path / f"client-{number}", app) for number, app in enumerate(apps)]
        operations.add_run("waits", plan)
        for thread in threads:
            thread.start()
        run = built_run(operations, "waits")
        until(lambda: run.machine.phase is Phase.READY and len(run.machine.arrived) == 1, 180, "half a buffer")
        attempt = run.machine.attempt
        with monkeypatch.context() as later:
            later.setattr(operations.driver, "now", lambda: time.time() + 3600)  # any pause is over
            for _ in range(5):
                operations.driver._tick()
                assert not run.busy
        assert (run.machine.attempt, run.status) == (attempt, RUNNING)
        charging.add(1)
        operations.driver.presence.note_poll(1, apps[1].attributes())  # what its next poll says
        operations.driver.writer.wake()
        for thread in threads:
            thread.join(180)
        assert operations.status()["runs"][0]["status"] == "all rounds done"


def test_nobody_is_asked_as_fast_as_they_can_refuse(tmp_path: Path) -> None:
    """Each client refuses once, and is left alone for a while; the run waits, and does not end."""
    plan = Plan(
        partition={"name": "iid", "num_clients": 2},
        model={"name": "mlp_2nn", "hidden": 8},
        local={"lr": 1e30},
        policy={"name": "asynchronous", "concurrency": 2},
        rounds=3,
    )
    with operated(tmp_path / "server", num_clients=2) as operations, serving(operations) as url:
        threads = [
            client_of(operations, url, tmp_path / f"client-{number}", dealt(plan, number)) for number in range(2)
        ]
        operations.add_run("refused", plan)
        for thread in threads:
            thread.start()
        run = built_run(operations, "refused")
        until(lambda: len(run.refusals) == 2 and not run.machine.in_flight, 180, "both refusals")
        assert run.status == RUNNING
        assert run.machine.lost_in_a_row <= 4
        assert not any(run.may_ask(client) for client in run.refusals)
        operations.stop_run("refused")
        for thread in threads:
            thread.join(180)


def charger(number: int, charging: set[int]) -> Callable[[], dict[str, bool | float]]:
    """State whether a device is charging now."""
    return lambda: {"charging": number in charging}
