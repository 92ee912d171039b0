"""Codecs side by side: names, sizes, what a target costs, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll import Plan, run
from atoll.report.codecs import bytes_an_update, bytes_to, codec_table, codecs_of
from atoll.report.html import export_png, write_report
from atoll.report.reading import RunRecord, read_run

QUANTISED = [{"name": "quantise", "bits": 4}]


@pytest.fixture(scope="module")
def run_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("codecs")
    base = Plan(partition={"num_clients": 10}, policy={"size": 4}, rounds=4, engine="inline")
    for number, (seed, uplink) in enumerate([(0, []), (1, []), (0, QUANTISED), (1, QUANTISED)]):
        plan = base.replace({"seed": seed, "uplink": uplink, "downlink": uplink and ["half"]})
        run(plan, out=folder / str(number), report=False)
    return [folder / str(number) for number in range(4)]


def test_runs_of_one_codec_are_taken_together(run_dirs: list[Path]) -> None:
    records = [read_run(path) for path in run_dirs]
    codecs = codecs_of(records)
    assert [len(codec.records) for codec in codecs] == [2, 2]
    assert codecs[0].name == "none"
    assert "quantise" in codecs[1].name and "down: half" in codecs[1].name
    assert codecs_of(records[:2]) == []
    assert codec_table(records[:2]) == ""


def test_sizes_and_targets(run_dirs: list[Path]) -> None:
    plain, packed = read_run(run_dirs[0]), read_run(run_dirs[2])
    sizes = [bytes_an_update(record) for record in (plain, packed)]
    assert sizes[0] == 4 * 650 + 26
    assert sizes[1] is not None and 325 < sizes[1] < 450
    rows = ({"round": 1, "bytes_up": 100, "test": {"accuracy": 0.5}},)
    rows += ({"round": 2, "bytes_up": 300, "test": {"accuracy": 0.7}},)
    record = RunRecord(path=Path("x"), plan=Plan(), info={}, rows=rows)
    assert bytes_to(record, 0.6) == pytest.approx(200)
    assert bytes_to(record, 0.9) is None


def test_the_page_shows_the_table_and_the_picture(run_dirs: list[Path], tmp_path: Path) -> None:
    both = run_dirs[1:3]
    text = write_report(both, tmp_path / "report.html").read_text()
    assert "<h2>Codecs</h2>" in text and "Accuracy against bytes" in text
    assert "codecs.png" in {path.name for path in export_png(both, tmp_path)}
    alone = write_report(run_dirs[:2], tmp_path / "alone.html").read_text()
    assert "<h2>Codecs</h2>" not in alone
