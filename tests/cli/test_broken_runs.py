"""Run directories that were cut short, damaged, taken or filled up: nothing is lost, and resumed runs end the same."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_end, rows
from network.fork_server import ForkServer

from atoll import Plan, run
from atoll.core.errors import RunError
from atoll.core.events import ClientReported, Event, RoundCommitted

Cli = Callable[..., Any]

SETTINGS: dict[str, Any] = {"policy.size": 4, "engine": "vectorised", "evaluation.clients_every": 2}
ARGV = [text for key, value in SETTINGS.items() for text in ("--set", f"{key}={value}")]
ROUNDS = 12


def plan(rounds: int = ROUNDS) -> Plan:
    return Plan(rounds=rounds).replace(SETTINGS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run(plan(), out=out, report=False)
    return out


def one_line(said: Any, code: int, *says: str) -> None:
    assert said.code == code
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    for text in says:
        assert text in said.err


# --- stopped at an awkward moment -------------------------------------------------------------------------------------


def test_a_line_cut_in_the_middle_is_run_again(whole: Path, tmp_path: Path) -> None:
    """As after a kill while the line of round 6 was written."""
    run(plan(5), out=tmp_path / "run", report=False)
    line = (whole / "metrics.jsonl").read_text().splitlines()[5]
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(line[: len(line) // 2])
    run(plan(), out=tmp_path / "run", report=False, resume=True)
    # the fifth round was the last of its run, so that it was measured as the twelfth is
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert [row["round"] for row in rows(tmp_path / "run")] == list(range(1, ROUNDS + 1))
    assert rows(tmp_path / "run")[5:] == rows(whole)[5:]


def test_rounds_after_the_checkpoint_are_run_again_and_not_written_twice(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    run(plan(6), out=tmp_path / "short", report=False)
    for name in ("checkpoint.safetensors", "clients.json", "confusion.json"):
        shutil.copy(tmp_path / "short" / name, path / name)
    for name in ("model.safetensors", "result.json"):
        (path / name).unlink()
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


def test_a_run_killed_before_its_first_checkpoint_starts_again(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name in ("checkpoint.safetensors", "model.safetensors", "result.json", "confusion.json", "clients.json"):
        (path / name).unlink()
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_end(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole, path)
    for name in ("model.safetensors", "result.json"):
        (path / name).unlink()
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


def test_a_run_that_has_reached_its_target_does_not_go_on(tmp_path: Path) -> None:
    target = Plan(rounds=50, stop={"accuracy": 0.7}, engine="vectorised")
    done = run(target, out=tmp_path / "run", report=False)
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    again = run(target, out=tmp_path / "run", report=False, resume=True)
    assert again.reason == done.reason == "target reached"
    assert [row["round"] for row in again.history] == [row["round"] for row in done.history]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model
    further = run(target.replace({"stop.accuracy": 0.8}), out=tmp_path / "run", report=False, resume=True)
    assert len(further.history) > len(done.history)


class Interrupted:
    """Presses Ctrl-C at a chosen moment of a chosen round."""

    def __init__(self, moment: str, number: int) -> None:
        self.moment, self.number, self.rounds = moment, number, 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, ClientReported) and self.moment == "clients" and self.rounds == self.number:
            raise KeyboardInterrupt
        if isinstance(event, RoundCommitted):
            self.rounds = event.row["round"]
            if self.moment == "round" and self.rounds == self.number:
                raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["clients", "round"])
def test_an_interrupted_run_keeps_all_its_rounds(whole: Path, tmp_path: Path, moment: str) -> None:
    stopped = run(plan(), out=tmp_path / "run", report=False, watch=[Interrupted(moment, 7)])
    assert stopped.reason == "interrupted"
    assert [row["round"] for row in stopped.history] == list(range(1, 8))
    assert rows(tmp_path / "run") == rows(whole)[:7]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["reason"] == "interrupted"
    assert not (tmp_path / "run" / "model.safetensors").exists()
    resumed = run(plan(), out=tmp_path / "run", report=False, resume=True)
    assert resumed.reason == "all rounds done"
    assert_same_end(tmp_path / "run", whole)


def test_a_longer_run_that_is_stopped_remembers_how_long(tmp_path: Path) -> None:
    """`--resume DIR --rounds 9`, stopped, then `--resume DIR`: it goes on to 9."""
    path = tmp_path / "run"
    run(plan(3), out=path, report=False)
    run(plan(9), out=path, report=False, resume=True, watch=[Interrupted("round", 5)])
    kept = Plan.from_toml((path / "plan.toml").read_text())
    assert kept.rounds == 9
    assert len(run(kept, out=path, report=False, resume=True).history) == 9


# --- taken, damaged, another's ----------------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused(cli: Cli, tmp_path: Path) -> None:
    run(plan(2), out=tmp_path / "run", report=False)
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2); print('held', flush=True); input()"
    command = [sys.executable, "-c", holder, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        one_line(cli("run", "-q", "--resume", "run"), 5, "run is in use by another process: wait for it, or choose")
        other.communicate("\n")
    assert len(run(plan(3), out=tmp_path / "run", report=False, resume=True).history) == 3


def test_a_directory_that_holds_a_run_is_not_written_over(cli: Cli, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    one_line(cli("run", "-q", "--out", "run"), 5, "run holds a run already: continue it with --resume run")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_the_directory_of_another_plan_is_refused(cli: Cli, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    says = "run belongs to another plan: resume it with its own plan, or choose another directory"
    one_line(cli("run", "-q", "--resume", "run", "--set", "local.lr=0.3"), 5, says)
    one_line(cli("run", "-q", "--resume", "run", "--seed", "1"), 5, says)
    (tmp_path / "other.toml").write_text("algorithm = 'fedsgd'\n")
    one_line(cli("run", "-q", "other.toml", "--resume", "run"), 5, says)
    with pytest.raises(RunError, match="belongs to another plan"):
        run(Plan(seed=3), out=tmp_path / "run", report=False, resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("damage", ["empty", "cut", "garbage", "header"])
def test_a_damaged_checkpoint_is_named(cli: Cli, whole: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(whole, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.safetensors"
    good = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "cut": good[: len(good) // 2], "garbage": b"\xff" * 500, "header": b"{" * 8 + good[8:]}[damage]
    )
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    one_line(
        cli("run", "-q", "--resume", "run"),
        5,
        "the checkpoint run/checkpoint.safetensors cannot be read",
        "another --out",
    )
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics
    path.write_bytes(good)
    assert run(plan(), out=tmp_path / "run", report=False, resume=True).reason == "all rounds done"


def test_a_damaged_plan_is_named(cli: Cli, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "plan.toml").write_text("rounds = ")
    one_line(cli("run", "-q", "--resume", "run"), 2, "the plan is not valid TOML")


# --- no room ----------------------------------------------------------------------------------------------------------


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Let the system refuse to make any file larger than this."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_next_line_of_metrics(cli: Cli, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(plan(), out=path, report=False, watch=[Interrupted("round", 4)])
    checkpoint = (path / "checkpoint.safetensors").read_bytes()
    size = (path / "metrics.jsonl").stat().st_size
    line = size // 4
    room = next(room for room in range(size + line // 2, 10 * size, line) if room >= len(checkpoint))
    with no_file_above(room):
        said = cli("run", "-q", "--resume", "run")
    one_line(said, 5, "cannot write to run: File too large; make room or fix it, then continue with --resume run")
    assert (path / "checkpoint.safetensors").read_bytes() == checkpoint
    assert not (path / "metrics.jsonl").read_text().endswith("\n")  # the line was cut
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


def test_no_room_for_the_next_checkpoint(cli: Cli, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(plan(), out=path, report=False, watch=[Interrupted("round", 4)])
    checkpoint = (path / "checkpoint.safetensors").read_bytes()
    (path / "metrics.jsonl").write_text("")  # so that the limit strikes the checkpoint first
    with no_file_above(len(checkpoint) - 100), pytest.raises(RunError, match="File too large"):
        run(plan(), out=path, report=False, resume=True, checkpoint_seconds=0)
    assert (path / "checkpoint.safetensors").read_bytes() == checkpoint
    shutil.copy(whole / "metrics.jsonl", path / "metrics.jsonl")
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


def test_no_room_for_the_model_at_the_end(cli: Cli, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(plan(), out=path, report=False, watch=[Interrupted("round", ROUNDS)])
    with no_file_above(2000):  # the model has 2,744 bytes
        said = cli("run", "-q", "--resume", "run")
    one_line(said, 5, "File too large")
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root and the right to mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(cli: Cli, whole: Path, small_disk: Path) -> None:
    path = small_disk / "run"
    run(plan(), out=path, report=False, watch=[Interrupted("round", 4)])
    checkpoint = (path / "checkpoint.safetensors").read_bytes()
    hog = small_disk / "hog"
    with pytest.raises(OSError, match="No space left"), hog.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    said = cli("run", "-q", "--resume", path)
    one_line(said, 5, f"cannot write to {path}: the disk is full; make room")
    assert (path / "checkpoint.safetensors").read_bytes() == checkpoint
    one_line(cli("run", "-q", "--out", small_disk / "second"), 5, "the disk is full")
    hog.unlink()
    run(plan(), out=path, report=False, resume=True)
    assert_same_end(path, whole)


def test_in_the_background_only_a_polite_kill_stops(processes: ForkServer, tmp_path: Path) -> None:
    """As under nohup: Ctrl-C at the terminal is not for it, and SIGTERM stops it as Ctrl-C does elsewhere."""
    command = ["run", "--rounds", "1000000", "--engine", "inline", "--set", "policy.size=1", "--set", "local.steps=1"]
    command += ["--out", "run", "--set", "evaluation.every=0"]
    child = processes.start(command, tmp_path / "out.txt", tmp_path, in_background=True)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def wait_for_rounds(more: int) -> None:
        size = metrics.stat().st_size if metrics.exists() else 0
        end = time.monotonic() + 120
        while not metrics.exists() or metrics.stat().st_size < size + more:
            assert time.monotonic() < end and child.code is None, child.said
            time.sleep(0.01)

    wait_for_rounds(1)
    child.signal(signal.SIGINT)
    wait_for_rounds(2000)
    child.signal(signal.SIGTERM)
    assert child.wait(120) == 130 and "atoll run --resume run" in child.said
