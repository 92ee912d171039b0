"""What all trackers share, and TensorBoard's files, read back by TensorBoard's own reader."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.errors import PlanError, RunError
from atoll.core.plan import Plan
from atoll.events import Event, NewClientsEvaluated, RoundCommitted, RunEnded, RunStarted
from atoll.trackers.tracked import SECONDS, Figures, Tracker, flat

PLAN = Plan(rounds=4, partition={"name": "iid", "num_clients": 3}, local={"steps": 2}, engine="inline")


@pytest.fixture
def accumulator() -> Callable[[Path], Any]:
    reason = "TensorBoard is not installed: pip install 'atoll[tensorboard]'"
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)

    def read(path: Path) -> Any:
        return reading.EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()

    return read


def written(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of metrics.jsonl."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in flat(row):
            curves.setdefault(name, []).append((row["round"], value))
    return curves


def shown(events: Any) -> dict[str, list[tuple[int, float]]]:
    """The curves that TensorBoard shows."""
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def same_curves(
    one: dict[str, list[tuple[int, float]]], other: dict[str, list[tuple[int, float]]], *, tolerance: float = 1e-6
) -> None:
    assert one.keys() == other.keys()
    for name, curve in one.items():
        assert [step for step, _ in curve] == [step for step, _ in other[name]], name
        assert [v for _, v in curve] == pytest.approx([v for _, v in other[name]], rel=tolerance), name


def interrupt_at(number: int) -> Callable[[Event], None]:
    """Press Ctrl-C after a round."""

    def read(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.row["round"] == number:
            raise KeyboardInterrupt

    return read


def test_tensorboard_shows_what_metrics_hold(accumulator: Callable[[Path], Any], tmp_path: Path) -> None:
    atoll.run(PLAN, out=tmp_path / "run", watch=[atoll.trackers.tensorboard(tmp_path / "run")], report=False)
    events = accumulator(tmp_path / "run/tensorboard")
    curves = written(tmp_path / "run")
    assert {"test/accuracy", "test/loss", "train_loss", "bytes_up", "seconds"} <= curves.keys()
    assert [step for step, _ in curves["test/accuracy"]] == [1, 2, 3, 4]
    same_curves(shown(events), curves)
    [plan] = events.Tensors("plan/text_summary")
    assert 'name = "fedavg"' in plan.tensor_proto.string_val[0].decode()


def test_a_resumed_run_goes_on_in_tensorboard(accumulator: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "run"
    stopped = atoll.run(PLAN, out=path, watch=[atoll.trackers.tensorboard(path), interrupt_at(2)], report=False)
    assert stopped.reason == "interrupted" and len(written(path)["train_loss"]) < 4
    atoll.resume(path, watch=[atoll.trackers.tensorboard(path)])
    assert len(list((path / "tensorboard").iterdir())) == 1
    same_curves(shown(accumulator(path / "tensorboard")), written(path))


def run_and_die(path: Path, make: Callable[[Path], Tracker], number: int) -> None:
    """Run in a process that is gone after a round, without a word to anybody."""

    def die(event: Event) -> None:
        if isinstance(event, RoundCommitted) and event.row["round"] == number:
            os._exit(9)

    process = multiprocessing.get_context("fork").Process(
        target=lambda: atoll.run(PLAN, out=path, watch=[make(path), die], checkpoint_seconds=0.0, report=False)
    )
    process.start()
    process.join()
    assert process.exitcode == 9


def test_a_killed_run_leaves_no_gap_and_no_round_twice(accumulator: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_and_die(path, atoll.trackers.tensorboard, 3)
    before = shown(accumulator(path / "tensorboard"))
    assert len(before.get("train_loss", [])) < 3  # figures are sent in groups
    atoll.resume(path, watch=[atoll.trackers.tensorboard(path)])
    same_curves(shown(accumulator(path / "tensorboard")), written(path))


def test_a_run_may_be_tracked_from_a_resume_on(accumulator: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "run"
    atoll.run(PLAN.replace({"rounds": 2}), out=path, report=False)
    atoll.resume(path, PLAN, watch=[atoll.trackers.tensorboard(path, log_dir=tmp_path / "logs")])
    same_curves(shown(accumulator(tmp_path / "logs")), written(path))
    other = tmp_path / "other"
    atoll.run(PLAN, out=other, watch=[atoll.trackers.tensorboard(other, log_dir=tmp_path / "logs")], report=False)
    assert len(list((tmp_path / "logs").iterdir())) == 2  # files of another run are left alone


def test_the_command_tracks_and_goes_on(
    accumulator: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from atoll.cli.main import main

    def cli(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["atoll", *words])
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(PLAN.to_toml())
    assert cli("run", "plan.toml", "--rounds", "2", "--track", "tensorboard", "--out", "r", "-q") == 0
    assert cli("run", "--resume", "r", "--rounds", "4", "--track", "tensorboard", "-q") == 0
    same_curves(shown(accumulator(tmp_path / "r/tensorboard")), written(tmp_path / "r"))
    assert cli("run", "plan.toml", "--track", "tensorbord", "--out", "no") == 2
    assert "did you mean 'tensorboard'" in capsys.readouterr().err and not Path("no").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_tool_that_is_missing_is_named_before_anything_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(RunError, match=rf"pip install 'atoll\[{name}\]'"):
        getattr(atoll.trackers, name)(tmp_path)


class Recorded:
    """A tracked run in memory that holds some rounds already."""

    def __init__(self, held: int = -1) -> None:
        self.held, self.sent, self.ended = held, list[list[Figures]](), ""

    def start(self, title: str, plan: Plan | None, version: int) -> int:
        return self.held

    def log(self, rows: Sequence[Figures]) -> None:
        self.sent.append(list(rows))

    def end(self, reason: str) -> None:
        self.ended = reason

    @property
    def steps(self) -> list[int]:
        return [figures.round for rows in self.sent for figures in rows]


def row(number: int, **more: Any) -> RoundCommitted:
    return RoundCommitted(row={"round": number, "train_loss": 1.0 / number, **more})


def test_figures_are_sent_in_groups_and_the_rest_at_the_end() -> None:
    now, recorded = [0.0], Recorded()
    tracker = Tracker(recorded, None, lambda: now[0])
    tracker(RunStarted(title="", version=0, rounds=9))
    for number in range(1, 6):
        tracker(row(number))
        now[0] += 0.6 * SECONDS
    assert [[each.round for each in rows] for rows in recorded.sent] == [[1], [2, 3], [4, 5]]
    tracker(row(6))
    tracker(RunEnded(reason="all rounds done", version=6))
    assert recorded.steps == [1, 2, 3, 4, 5, 6] and recorded.ended == "all rounds done"


def test_rounds_that_the_tool_holds_are_not_sent_again() -> None:
    recorded = Recorded(held=3)
    tracker = Tracker(recorded, None)
    tracker(RunStarted(title="", version=1, rounds=9))
    for number in (2, 3, 4):
        tracker(row(number))
    tracker(RunEnded(reason="all rounds done", version=4))
    assert recorded.steps == [4]


def test_what_is_told_later_of_a_round_is_added() -> None:
    recorded = Recorded()
    tracker = Tracker(recorded, None)
    tracker(RunStarted(title="", version=0, rounds=1))
    tracker(row(1))
    tracker(row(1, test={"accuracy": 0.5}))
    tracker(NewClientsEvaluated(version=1, figures={5: {"mean": 0.7}}, main="accuracy"))
    tracker(RunEnded(reason="all rounds done", version=1))
    assert [dict(each.values) for rows in recorded.sent for each in rows] == [
        {"train_loss": 1.0}, {"test/accuracy": 0.5}, {"new_clients/after_5_steps/mean": 0.7},
    ]  # fmt: skip


def test_a_tool_that_raises_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Recorded):
        def log(self, rows: Sequence[Figures]) -> None:
            raise ConnectionError("no server")

    with caplog.at_level(logging.WARNING):
        result = atoll.run(PLAN, watch=[Tracker(Broken(), None)])
    assert result.reason == "all rounds done" and "ConnectionError: no server" in caplog.text


def test_unknown_tools_are_refused() -> None:
    from atoll.core.parts import find, members

    assert members("trackers") == ["mlflow", "tensorboard", "wandb"]
    with pytest.raises(PlanError, match="did you mean 'mlflow'"):
        find("trackers", "mlflw")
