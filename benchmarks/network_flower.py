"""Rounds a minute of a real federation, side by side with Flower's deployment engine: 16 client processes each.

    python benchmarks/network_flower.py [--clients 16] [--rounds 10]

The model has 1,663,370 parameters (the CNN of McMahan et al.); next to nothing is trained: Flower's clients send back
what they are sent, Atoll's take one step on one sample. Atoll speaks TLS 1.3, signs every request, and writes every
update and a ledger to disk; Flower runs with --insecure and its defaults. Flower is installed into a venv of its own.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from run import HERE, python_of

PARAMS = 1_663_370
PLAN = """
name = "echo"
rounds = {rounds}
data = "mnist"
model = "cnn_mcmahan"
[local]
steps = 1
batch_size = 1
[evaluation]
every = 0
"""
APP = """
import numpy as np
from atoll import ClientApp

def client():
    return ClientApp(train_x=np.zeros((4, 1, 28, 28), dtype=np.uint8), train_y=np.arange(4), num_classes=10)
"""


class Processes(ExitStack):
    """Processes that end with the block."""

    def start(self, command: list[str], log: Path, **options: object) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            child = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, **options)  # type: ignore[call-overload]
        self.callback(_end, child)
        return child


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                continue


def wait_for(what: str, path: Path, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not (path.exists() and what in path.read_text(errors="replace")):
        if time.monotonic() > until:
            raise TimeoutError(f"no {what!r} in {path}: {path.read_text()[-2000:] if path.exists() else ''}")
        time.sleep(0.2)


def atoll(home: Path, clients: int, rounds: int) -> list[float]:
    """Seconds of each round after the first."""
    (home / "plan.toml").write_text(PLAN.format(rounds=rounds))
    (home / "echo_app.py").write_text(APP)
    run = [sys.executable, "-m", "atoll.cli.main"]
    calls = {"cwd": home, "check": True, "capture_output": True, "text": True}
    subprocess.run([*run, "certs", "certs", "--host", "localhost"], **calls)
    with Processes() as processes:
        serve = ["serve", "plan.toml", "--home", "server", "--port", "18444", "--clients", str(clients)]
        serve += ["--cert", "certs/server.pem", "--key", "certs/server.key", "--once"]
        processes.start([*run, *serve], home / "server.log", cwd=home)
        wait_for("serving", home / "server.log")
        for number in range(clients):
            token = subprocess.run([*run, "clients", "token", "--home", "server"], **calls).stdout.strip()
            enrol = ["enrol", "https://localhost:18444", "--token", token, "--name", f"c{number}"]
            subprocess.run([*run, *enrol, "--home", f"c{number}", "--ca", "certs/ca.pem"], **calls)
        names = [f"c{number}" for number in range(clients)]
        subprocess.run([*run, "clients", "approve", *names, "--home", "server"], **calls)
        for name in names:
            join = ["join", "--home", name, "--app", "echo_app:client", "--once", "--quiet"]
            processes.start([*run, *join], home / f"{name}.log", cwd=home)
        wait_for('"event": "ended"', home / "server.log", 600)
    told = [json.loads(line) for line in (home / "server.log").read_text().splitlines() if '"committed"' in line]
    ends = [datetime.datetime.fromisoformat(each["time"]).timestamp() for each in told]
    return [after - before for before, after in itertools.pairwise(ends)]


def flower(home: Path, clients: int, rounds: int) -> list[float]:
    """Seconds of each round after the first."""
    bin_ = Path(python_of("flower")).parent
    env = os.environ | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_HOME": str(home / "flwr"),
        "PATH": f"{bin_}:{os.environ['PATH']}",
    }
    (home / "flwr").mkdir()
    (home / "flwr/config.toml").write_text(
        '[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:8000"\ninsecure = true\n'
    )
    shutil.copytree(HERE / "peers/flower_app", home / "app")
    with Processes() as processes:
        processes.start([str(bin_ / "flower-superlink"), "--insecure"], home / "link.log", env=env)
        wait_for("Uvicorn running", home / "link.log")
        for number in range(clients):
            node = ["--insecure", "--superlink", "127.0.0.1:8000", "--port", str(9200 + number)]
            processes.start([str(bin_ / "flower-supernode"), *node], home / f"node{number}.log", env=env)
        for number in range(clients):
            wait_for("Uvicorn running", home / f"node{number}.log")
        command = [str(bin_ / "flwr"), "run", ".", "bench", "--stream"]
        command += ["-c", f"rounds={rounds} clients={clients} params={PARAMS}"]
        processes.start(command, home / "run.log", env=env, cwd=home / "app")
        wait_for("ROUND end", home / "run.log", 1800)
    starts = [float(found) for found in re.findall(r"^ROUND \w+ ([\d.]+)", (home / "run.log").read_text(), re.M)]
    return [after - before for before, after in itertools.pairwise(starts[1:])]


def main() -> None:
    """Measure both, one after the other, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    told = parser.parse_args()
    medians = {}
    for name, measure in (("Atoll", atoll), ("Flower", flower)):
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as home:
            seconds = measure(Path(home), told.clients, told.rounds)
        medians[name] = statistics.median(seconds)
        print(f"{name:8} {60 / medians[name]:8.1f} rounds a minute, {medians[name]:.3f} s a round", flush=True)
    print(f"ratio    {medians['Flower'] / medians['Atoll']:8.1f}")


if __name__ == "__main__":
    main()
