"""What the files of a run say, for every driver: run.json, result.json and confusion.json."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from atoll.commit.guard import Guard
from atoll.commit.run_state import Round
from atoll.core.plan import Plan
from atoll.engine.base import Engine
from atoll.report.reading import model_text
from atoll.train.job import Job


def run_info(
    plan: Plan, job: Job, engine: Engine, guard: Guard | None, *, name: str, setup_seconds: float, num_train: int
) -> dict[str, Any]:
    """Describe a run before its first round, for `run.json`: the choice of engine above all."""
    dataset = job.federation.dataset
    info: dict[str, Any] = {
        "atoll": version("atoll"),
        "name": name,
        "identity": plan.identity(),
        "engine": engine.describe(),
        "setup_seconds": round(setup_seconds, 3),
        "model": {"name": model_text(plan), "num_params": max(k.spec.num_params for k in job.kinds or (job,))},
        "data": {
            "name": dataset.name,
            "num_train": num_train,
            "num_test": dataset.num_test,
            "num_classes": dataset.num_classes,
            "class_names": list(dataset.class_names),
        },
        "num_clients": job.federation.num_clients,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if guard is not None:
        info["privacy"] = guard.statement()
    if engine.trainer.alone_because is not None:
        info["one_by_one"] = engine.trainer.alone_because
    return info


def run_result(reason: str, rows: Sequence[Mapping[str, Any]], contribution: Mapping[int, float]) -> dict[str, Any]:
    """Summarise how a run ended, for `result.json`."""
    last = rows[-1] if rows else {}
    summary: dict[str, Any] = {
        "reason": reason,
        "rounds": last.get("round", 0),
        "seconds": last.get("seconds", 0.0),
        "test": next((row["test"] for row in reversed(rows) if "test" in row), None),
    }
    detection = next((row["detection"] for row in reversed(rows) if "detection" in row), None)
    if detection is not None:
        summary["detection"] = {key: value for key, value in detection.items() if key != "clients"}
    if contribution:
        summary["contribution"] = {str(client): contribution[client] for client in sorted(contribution)}
    return summary


def confusion_info(done: Round) -> dict[str, Any] | None:
    """Return the confusion matrix of a round for `confusion.json`; None if it was not measured."""
    if done.confusion_KK is None:
        return None
    return {"round": done.row["round"], "matrix": done.confusion_KK.tolist()}
