"""Runs that are tracked by a real MLflow server, and read back from it."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from network.federation import free_port
from trackers.test_trackers import PLAN, interrupt_at, run_and_die, same_curves, written

import atoll
from atoll.trackers.mlflow import MARK

pytestmark = pytest.mark.slow
mlflow: Any = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'atoll[mlflow]'")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/store.db", "--artifacts-destination", str(folder)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            _until_healthy(f"http://127.0.0.1:{port}", process, folder / "log.txt")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _until_healthy(uri: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        assert time.monotonic() < until and process.poll() is None, log.read_text()
        time.sleep(0.1)


def tracked(uri: str, experiment: str) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The only run of an experiment, and its curves as the server has them."""
    client = mlflow.MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    history = {
        name: sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
        if name != MARK
    }
    return run, history


def test_the_server_holds_what_metrics_hold(server: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    tracker = atoll.trackers.mlflow(path, experiment="whole", uri=server)
    atoll.run(PLAN, out=path, watch=[tracker], report=False)
    run, history = tracked(server, "whole")
    same_curves(history, written(path))
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["local.lr"] == "0.1" and run.data.params["algorithm.name"] == "fedavg"
    assert run.data.tags["atoll.reason"] == "all rounds done"


def test_a_resumed_run_goes_on_with_the_same_run(server: str, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def tracker() -> Any:
        return atoll.trackers.mlflow(path, experiment="resumed", uri=server)

    atoll.run(PLAN, out=path, watch=[tracker(), interrupt_at(2)], report=False)
    assert tracked(server, "resumed")[0].info.status == "KILLED"
    atoll.resume(path, watch=[tracker()])
    run, history = tracked(server, "resumed")
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history["train_loss"]] == [1, 2, 3, 4]
    assert history["train_loss"] == written(path)["train_loss"]


def test_a_killed_run_leaves_no_gap_and_no_round_twice(server: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_and_die(path, lambda each: atoll.trackers.mlflow(each, experiment="killed", uri=server), 3)
    atoll.resume(path, watch=[atoll.trackers.mlflow(path, experiment="killed", uri=server)])
    _, history = tracked(server, "killed")
    assert history["train_loss"] == written(path)["train_loss"]
