"""Reading run directories, whole, half-written and damaged, and the numbers that are quoted from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import RunError
from atoll.core.plan import Plan
from atoll.report.reading import (
    RunRecord,
    diverged,
    end_reason,
    human_bytes,
    human_seconds,
    labels,
    lost_tasks,
    read_run,
    rounds_to,
    series,
    targets_of,
)


def measured(accuracies: dict[int, float], **more: Any) -> RunRecord:
    """A record that was evaluated at these rounds."""
    rounds = range(1, max(accuracies, default=0) + 1)
    rows = [{"round": n} | ({"test": {"accuracy": accuracies[n]}} if n in accuracies else {}) for n in rounds]
    return RunRecord(**{"path": Path("runs/a"), "plan": Plan(), "info": {}, "rows": tuple(rows)} | more)


def test_a_run_is_read_as_it_was_written(mnist: Path) -> None:
    record = read_run(mnist)
    assert record.plan.data.name == "mnist" and record.info["num_clients"] == 100
    assert [row["round"] for row in record.rows] == list(range(1, 21))
    assert record.partition is not None and len(record.partition["counts"]) == 100
    assert record.clients is not None and record.confusion is not None
    assert end_reason(record) == "all rounds done" and lost_tasks(record) == {"failed": 2}


def test_a_killed_run_loses_only_the_cut_line(unfinished: Path) -> None:
    record = read_run(unfinished)
    assert [row["round"] for row in record.rows] == list(range(1, 12))
    assert record.result is None and record.clients is None and end_reason(record) == ""


def test_a_line_cut_inside_a_letter_or_followed_by_zeros_is_ignored(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", rounds=3, pictures=False)
    whole = (run / "metrics.jsonl").read_bytes()
    for tail in (b'{"round": 4, "note": "\xc3', b"\0" * 64, b"{", b""):
        (run / "metrics.jsonl").write_bytes(whole + tail)
        assert len(read_run(run).rows) == 3


def test_a_broken_line_before_the_last_is_an_error(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=3, pictures=False)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:30], lines[2]]))
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_run(run)
    (run / "metrics.jsonl").write_text('{"loss": 1}\n')
    with pytest.raises(RunError, match=r"line 1 is not a round"):
        read_run(run)


def test_rounds_done_again_after_a_resume_replace_the_first(make_run: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"round": n, "seconds": float(n)} for n in (1, 2, 3)] + [
        {"round": n, "seconds": 10.0 * n} for n in (2, 3, 4)
    ]
    record = read_run(make_run(tmp_path / "run", rows=rows))
    assert series(record, "round", "seconds") == ([1.0, 20.0, 30.0, 40.0], [1.0, 2.0, 3.0, 4.0])


def test_an_end_from_before_a_resume_does_not_count() -> None:
    assert end_reason(measured({3: 0.5}, result={"reason": "interrupted", "rounds": 3})) == "interrupted"
    assert end_reason(measured({4: 0.5}, result={"reason": "interrupted", "rounds": 3})) == ""


def test_what_is_not_a_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    way_out = r"holds plan\.toml, run\.json and metrics\.jsonl; make one with: atoll run plan\.toml --out DIR"
    with pytest.raises(RunError, match=rf"nowhere does not exist; a run directory {way_out}"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=rf"there is no plan\.toml and no run\.json in it; a run directory {way_out}"):
        read_run(tmp_path)
    (tmp_path / "plan.toml").write_text("rounds = 3")
    with pytest.raises(RunError, match=r"there is no run\.json in it"):
        read_run(tmp_path)
    with pytest.raises(RunError, match=r"plan\.toml is a file: name the directory that holds it"):
        read_run(tmp_path / "plan.toml")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("plan.toml", "rouds = 3", r"plan\.toml cannot be read by this version of Atoll: unknown key 'rouds'"),
        ("plan.toml", b"name = '\xff'", "not UTF-8"),
        ("run.json", "{", r"run\.json is damaged"),
        ("run.json", "[1]", "must hold a JSON object, got list"),
        ("partition.json", '{"counts": [[1, 2], [3]]}', r"equally long: got lengths \[1, 2\]"),
        ("partition.json", '{"counts": []}', "list of lists"),
        ("partition.json", '{"counts": [[1, -2]]}', "counts of 0 or more"),
        ("confusion.json", '{"matrix": [[1, 2]]}', "must be square: got 1 rows of 2"),
        ("clients.json", '{"accuracy": [0.5, 1.5]}', r"shares in \[0, 1\]"),
        ("result.json", "", r"result\.json is damaged"),
    ],
)
def test_damage_is_named(
    make_run: Callable[..., Path], tmp_path: Path, name: str, content: str | bytes, problem: str
) -> None:
    run = make_run(tmp_path / "run", rounds=2, pictures=False)
    (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RunError, match=problem):
        read_run(run)


def test_a_run_that_has_not_begun_has_no_rows(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    record = read_run(run)
    assert record.rows == () and series(record, "test.accuracy") == ([], []) and rounds_to(record, 0.5) is None


def test_series_skip_rounds_without_the_number() -> None:
    rows = (
        {"round": 1, "seconds": 0.5, "bytes_up": 10, "test": {"accuracy": 0.1}},
        {"round": 2, "seconds": 1.0, "bytes_up": 20, "train_loss": float("nan")},
        {"round": 3, "seconds": 1.5, "bytes_up": 30, "test": None},
        {"round": 4, "seconds": 2.0, "test": {"accuracy": 0.4}},
        {"round": 5, "seconds": 2.5, "bytes_up": 50, "test": {"accuracy": True}},
    )
    record = measured({}, rows=rows)
    assert series(record, "test.accuracy") == ([1.0, 4.0], [0.1, 0.4])
    assert series(record, "test.accuracy", "seconds") == ([0.5, 2.0], [0.1, 0.4])
    assert series(record, "test.accuracy", "bytes") == ([10.0], [0.1])
    assert series(record, "train_loss") == ([], [])
    with pytest.raises(RunError, match="did you mean 'bytes'"):
        series(record, "test.accuracy", "byte")  # type: ignore[arg-type]


def test_divergence_is_seen_also_where_nan_became_null() -> None:
    losses = [1.0, float("nan"), None, float("inf")]
    rows = [{"round": n, "clients": 3, "train_loss": loss} for n, loss in enumerate(losses, 1)]
    assert diverged(measured({}, rows=(*rows, {"round": 5, "clients": 0, "train_loss": None}))) == [2, 3, 4]


@pytest.mark.parametrize(
    ("accuracies", "target", "rounds"),
    [
        ({10: 0.80, 20: 0.90}, 0.85, 15.0),
        ({10: 0.80, 20: 0.90}, 0.90, 20.0),
        ({10: 0.80, 20: 0.90}, 0.80, 10.0),
        ({10: 0.80, 20: 0.90}, 0.75, 10.0),  # there is no point before the first
        ({10: 0.80, 20: 0.90}, 0.91, None),
        # the dip at 3 is lifted to 0.6: from (3, 0.6) to (4, 0.9) a third of the way, not from (3, 0.3)
        ({1: 0.2, 2: 0.6, 3: 0.3, 4: 0.9}, 0.7, 3 + 1 / 3),
        # the plateau: 0.6 is held from 2 to 5, then 0.65 is half way to 0.7 at 6
        ({1: 0.2, 2: 0.6, 3: 0.5, 5: 0.4, 6: 0.7}, 0.65, 5.5),
        # it stays reached although the curve falls again
        ({1: 0.2, 2: 0.95, 3: 0.3}, 0.95, 2.0),
        ({}, 0.5, None),
    ],
)
def test_rounds_to_follows_mcmahan(accuracies: dict[int, float], target: float, rounds: float | None) -> None:
    found = rounds_to(measured(accuracies), target)
    assert found == (rounds if rounds is None else pytest.approx(rounds, abs=1e-12))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_higher_target_never_takes_fewer_rounds(values: list[float], one: float, other: float) -> None:
    record = measured({3 * n: value for n, value in enumerate(values, 1)})
    easy, hard = rounds_to(record, min(one, other)), rounds_to(record, max(one, other))
    assert (easy is not None) == (max(values) >= min(one, other))
    assert hard is None or (easy is not None and 3 <= easy <= hard <= 3 * len(values))


def test_targets_are_those_that_were_reached() -> None:
    assert targets_of([measured({1: 0.96})]) == [0.90, 0.95]
    assert targets_of([measured({1: 0.5}), measured({1: 0.991})]) == [0.90, 0.95, 0.97, 0.99]
    assert targets_of([measured({1: 0.62}), measured({1: 0.58})]) == [0.55]
    assert targets_of([measured({1: 0.62}, plan=Plan(stop={"accuracy": 0.6}))]) == [0.6]
    assert targets_of([measured({})]) == []


def test_labels_tell_runs_apart() -> None:
    def named(name: str, path: str) -> RunRecord:
        return measured({}, plan=Plan(name=name), path=Path(path))

    assert labels([named("a", "x"), named("", "runs/b")]) == ["a", "b"]
    assert labels([named("a", "runs/x"), named("a", "runs/y"), named("c", "z")]) == ["a (x)", "a (y)", "c"]
    assert labels([named("a", "1/x"), named("a", "2/x")]) == ["a (x)", "a (x) #2"]
    assert labels([measured({}, info={"name": "from run.json"})]) == ["from run.json"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (7_968_400, "7.97 MB"), (999_499, "999 kB"), (999_600, "1.00 MB"),
     (159_368_000, "159 MB"), (2.5e12, "2.50 TB"), (3e18, "3000 PB")],
)  # fmt: skip
def test_bytes_are_readable(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0123, "12.3 ms"), (0.9996, "1.00 s"), (3.4, "3.40 s"), (59.96, "1 min 00 s"), (75, "1 min 15 s"),
     (3599.6, "1 h 00 min"), (4020, "1 h 07 min"), (86399, "1 d 00 h"), (200_000, "2 d 08 h")],
)  # fmt: skip
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


def test_numbers_that_json_cannot_hold_do_not_stop_the_reader(make_run: Callable[..., Path], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=2, pictures=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 3, "clients": 5, "train_loss": float("nan")}) + "\n")
    assert diverged(read_run(run)) == [3]
