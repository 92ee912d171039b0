"""`atoll compare`: one plan as federated and as split learning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from split.models import plan_of
from split.parties import vertical_plan
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.compare import compare_ways
from atoll.core.errors import PlanError
from atoll.report.ways import WAYS, table_text

LOCAL = {"epochs": 1, "batch_size": 40, "lr": 0.1}


@pytest.mark.slow
def test_one_plan_as_four(tmp_path: Path) -> None:
    plan = plan_of({"cut": "2"}, num_clients=3, rounds=2, local=LOCAL)
    table = compare_ways(plan, out=tmp_path, seeds=2, latency=0.02, bandwidth=1e6, workers=2)
    assert not table.problems and [len(table.of(way)) for way in WAYS] == [2] * 4
    federated, turn, v1, v2 = (table.of(way)[0] for way in WAYS)
    assert federated.figure == v1.figure and federated.rounds == v2.rounds == 2
    assert federated.messages == 2 * 3 * 2 and federated.round_trips == 2
    assert federated.bytes_up == 2 * 3 * (4 * 55_210 + 26)
    each = 2 * (4 * 55_210 + 26) / 1e6 + 0.02
    assert federated.simulated_seconds == pytest.approx(2 * each)
    steps = 12
    assert v1.messages == v2.messages == turn.messages == 2 * 3 * (2 * steps + 2)
    assert v1.round_trips == 2 * (steps + 1) and turn.round_trips == 3 * v1.round_trips
    assert turn.simulated_seconds == pytest.approx(3 * v1.simulated_seconds, rel=1e-3)
    assert v1.multiply_adds == 2 * 64 * 200 and v1.parameter_bytes == 4 * 13_000
    assert federated.multiply_adds == 2 * 64 * 200 + 3 * (200 * 200 + 200 * 10)
    assert v1.activation_bytes < federated.activation_bytes
    text = table_text(table)
    assert "20.0 ms" in text and "after layer 2" in text and all(way in text for way in WAYS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")}
    again = compare_ways(plan, out=tmp_path, seeds=2, latency=0.02, bandwidth=1e6, workers=2)
    assert again == table and {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((tmp_path / "compare.json").read_text())["cut"]["width"] == 200
    page = (tmp_path / "compare.html").read_text()
    assert "splitfed_v2" in page and "<img" in page


def test_a_way_that_is_refused_keeps_its_reason(tmp_path: Path) -> None:
    plan = plan_of({"cut": "2"}, num_clients=2, local=LOCAL, algorithm="fedavgm")
    table = compare_ways(plan, out=tmp_path, workers=2)
    [refused] = table.problems
    assert refused.way == "in_turn" and refused.status == "refused" and "hand on" in refused.why


def test_the_command(tmp_path: Path) -> None:
    settings = ["model=mlp_2nn", "rounds=1", "partition.num_clients=2", "local.steps=2", "split.cut='2'"]
    words = ["compare", "--out", str(tmp_path / "out"), "-q", *(word for each in settings for word in ("--set", each))]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "splitfed_v1" in done.output and (tmp_path / "out" / "compare.html").exists()


def test_a_plan_without_a_cut_is_told_where_it_could_be(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"set it to one of 0, 1, 2, 3, 4"):
        compare_ways(plan_of(), out=tmp_path)


def test_columns_apart_and_in_one_place(tmp_path: Path) -> None:
    local = {"epochs": 1, "batch_size": 64, "lr": 0.1}
    plan = vertical_plan(
        rounds=2, local=local, policy={"size": 3}, split_latency=0.02, split_codecs=["half"], split_tail=3
    )
    table = compare_ways(plan, out=tmp_path, workers=2)
    assert not table.problems and table.ways == ("central", "vertical", "alone")
    central, vertical, alone = (table.of(way)[0] for way in table.ways)
    assert central.bytes_up == alone.bytes_up == central.messages == 0
    assert vertical.bytes_up > 0 and vertical.messages > 0 and vertical.simulated_seconds > 0
    assert vertical.multiply_adds < central.multiply_adds and vertical.parameter_bytes < central.parameter_bytes
    assert central.figure is not None and alone.figure is not None and central.figure >= alone.figure
    text = table_text(table)
    assert "shop 21, bank 20, club 24" in text and "bank holds the labels" in text
    page = (tmp_path / "compare.html").read_text()
    assert "with its columns apart and in one place" in page and "<img" in page
