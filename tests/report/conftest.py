"""Small but realistic run directories, written as the engines write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.plan import Plan

NUM_PARAMS = 199_210


def metrics(
    rounds: int, every: int, accuracy: float, clients_test: bool, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Rows of a run that learns towards an accuracy, with some noise."""
    rows: list[dict[str, Any]] = []
    for n in range(1, rounds + 1):
        reached = accuracy * (1 - 0.75 * np.exp(-5 * n / rounds)) + rng.normal(0, 0.004)
        reached = float(np.clip(reached, 0, 1))
        row: dict[str, Any] = {
            "round": n, "seconds": 0.12 * n, "round_seconds": 0.12, "clients": 10, "failed": n // 10, "rejected": 0,
            "abandoned": 0, "train_loss": 2.3 * float(np.exp(-3 * n / rounds)) + 0.05,
            "bytes_up": 40 * NUM_PARAMS * n, "bytes_down": 40 * NUM_PARAMS * n,
        }  # fmt: skip
        if every and (n % every == 0 or n == rounds):
            row["test"] = {
                "accuracy": reached, "loss": 2.3 * (1 - reached) + 0.08, "precision": reached, "recall": reached,
                "f1": reached - 0.002,
            }  # fmt: skip
            if clients_test:
                row["clients_test"] = {
                    "num_clients": 100.0, "mean": reached - 0.01, "std": 0.05, "worst_decile": reached - 0.15,
                    "loss": 0.3,
                }  # fmt: skip
        rows.append(row)
    return rows


def write_run(
    path: Path,
    plan: Plan | None = None,
    *,
    rounds: int = 20,
    every: int = 1,
    accuracy: float = 0.97,
    num_classes: int = 10,
    class_names: list[str] | None = None,
    num_clients: int = 100,
    shown: int = 100,
    finished: bool = True,
    cut: bool = False,
    clients: bool = True,
    pictures: bool = True,
    rows: list[dict[str, Any]] | None = None,
) -> Path:
    """Write a run directory; without `pictures` only what is never missing, which is quicker to report on."""
    rng = np.random.default_rng(3)
    plan = plan or Plan(name="mnist-shards", rounds=rounds, data="mnist", model="mlp_2nn", partition="shards")
    names = class_names if class_names is not None else [str(k) for k in range(num_classes)]
    path.mkdir(parents=True)
    (path / "plan.toml").write_text(plan.to_toml())
    rows = metrics(rounds, every, accuracy, clients, rng) if rows is None else rows
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (path / "metrics.jsonl").write_text(lines[:-25] if cut else lines)

    def put(name: str, table: dict[str, Any]) -> None:
        (path / name).write_text(json.dumps(table))

    put("run.json", {
        "atoll": "0.1.0", "name": plan.name, "identity": plan.identity(), "engine": {"name": "processes", "stack": 5},
        "model": {"name": plan.model.name, "num_params": NUM_PARAMS},
        "data": {"name": plan.data.name, "num_train": 60000, "num_test": 10000, "num_classes": num_classes,
                 "class_names": names},
        "num_clients": num_clients, "started": "2026-11-15T20:00:00+00:00",
    })  # fmt: skip
    if finished:
        put("result.json", {"reason": "all rounds done", "rounds": rounds, "seconds": 0.12 * rounds,
                            "test": rows[-1].get("test") if rows else None})  # fmt: skip
    if not pictures:
        return path
    shown = min(shown, num_clients)
    shares_CK = rng.dirichlet(np.full(num_classes, 0.3), shown)
    counts_CK = np.array([rng.multinomial(rng.integers(200, 900), shares_K) for shares_K in shares_CK])
    put("partition.json", {"clients": list(range(shown)), "counts": counts_CK.tolist(), "class_names": names,
                           "num_clients": num_clients})  # fmt: skip
    if clients:
        some = rng.beta(14, 1.6, min(num_clients, 100)).tolist()
        put("clients.json", {"round": rounds, "clients": list(range(len(some))), "accuracy": some, "loss": some})
    if every:
        wrong_KK = rng.multinomial(60, np.full(num_classes, 1 / num_classes), num_classes)
        put("confusion.json", {"round": rounds, "matrix": (wrong_KK + 940 * np.eye(num_classes, dtype=int)).tolist()})
    return path


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return write_run


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with everything in it."""
    return write_run(tmp_path_factory.mktemp("runs") / "mnist")


@pytest.fixture(scope="session")
def shakespeare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 classes that are letters: among them a space, a new line, a dollar and markup."""
    letters = ["\n", " ", "$", "<", ">", "&", '"', *(chr(code) for code in range(48, 121))]
    plan = Plan(name="shakespeare", data="shakespeare", partition="natural", model="char_lstm", rounds=50)
    where = tmp_path_factory.mktemp("runs") / "shakespeare"
    return write_run(
        where,
        plan,
        rounds=50,
        every=5,
        accuracy=0.5,
        num_classes=80,
        class_names=letters,
        num_clients=660,
        clients=False,
    )


@pytest.fixture(scope="session")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A million clients, of which 100 are shown, none of them evaluated."""
    plan = Plan(
        name="a million", algorithm={"name": "fedprox", "mu": 0.1}, partition={"name": "iid", "num_clients": 10**6}
    )
    where = write_run(tmp_path_factory.mktemp("runs") / "million", plan, num_clients=10**6, clients=False)
    (where / "confusion.json").unlink()
    return where


@pytest.fixture(scope="session")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed while it wrote round 12 of 20."""
    plan = Plan(name="killed", rounds=20, local={"lr": 0.05})
    where = tmp_path_factory.mktemp("runs") / "unfinished"
    return write_run(where, plan, rounds=12, finished=False, cut=True, pictures=False)


@pytest.fixture(scope="session")
def untested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never evaluated."""
    plan = Plan(name="untested", evaluation={"every": 0})
    return write_run(tmp_path_factory.mktemp("runs") / "untested", plan, every=0, pictures=False)
