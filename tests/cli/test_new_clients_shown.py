"""New clients and other figures than accuracy, as the command line and the report show them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll import Plan, run
from atoll.report.new_clients import has_new_clients, new_clients_note, new_clients_picture, new_clients_table
from atoll.report.reading import read_run

Cli = Callable[..., Any]

SMALL = ["--set", "rounds=2", "--set", "engine=inline"]
NEW = [
    "--set",
    "evaluation.new_clients=3",
    "--set",
    "evaluation.holdout=0.3",
    "--set",
    "evaluation.adapt_steps=[0,1,4]",
]


def test_new_clients_are_shown_at_the_end_and_in_the_report(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", *SMALL, *NEW, "--out", "run", "-q")
    assert (said.code, said.err) == (0, "")
    after = json.loads((tmp_path / "run" / "result.json").read_text())["new_clients"]["after_steps"]
    first, second, third = (f"{100 * after[steps]['mean']:.2f} %" for steps in ("0", "1", "4"))
    line = f"new clients: accuracy {first} on arrival, {second} after 1 step, {third} after 4 steps\n"
    assert line in said.out
    page = (tmp_path / "run" / "report.html").read_text()
    section = page[page.index("<h2>New clients</h2>") :]
    cells = re.findall(r"<td>(.*?)</td>", section[: section.index("</table>")])
    shown = [f"{100 * after[steps][name]:.2f} %" for steps in ("0", "1", "4") for name in ("mean", "worst_decile")]
    assert [cell for cell in cells if "%" in cell] == shown and cells[0::4] == ["0", "1", "4"]
    assert "3 clients, picked by seed, took no part in training" in section
    said = cli("report", "run", "--png", "pictures")
    assert (tmp_path / "pictures" / "new-clients.png").read_bytes()[:4] == b"\x89PNG"


def test_a_damaged_result_is_still_reported(tmp_path: Path) -> None:
    run(Plan(rounds=1, engine="inline"), out=tmp_path / "run", report=False)
    path = tmp_path / "run" / "result.json"
    result = json.loads(path.read_text())
    for damage in (None, [], {"after_steps": None}, {"after_steps": {"x": {}}}):
        path.write_text(json.dumps(result | {"new_clients": damage}))
        assert not has_new_clients(read_run(tmp_path / "run"))
    path.write_text(json.dumps(result | {"new_clients": {"after_steps": {"0": None}, "metric": 3}}))
    record = read_run(tmp_path / "run")
    assert has_new_clients(record) and new_clients_picture(record) and new_clients_note(record)
    assert new_clients_table(record).count("<td>–</td>") == 3


def test_other_problems_have_other_figures(cli: Cli) -> None:
    """The end of a run names the main figure of its problem, whatever that is."""
    said = cli("run", *SMALL, *NEW, "--set", "data=problem_data:diabetes", "--out", "run", "-q")
    assert (said.code, said.err) == (0, "")
    assert re.search(r"^test root mean squared error 0\.\d+   loss 0\.\d+$", said.out, re.MULTILINE)
    assert re.search(r"^new clients: root mean squared error 0\.\d+ on arrival, ", said.out, re.MULTILINE)
    said = cli("run", *SMALL, "--set", 'evaluation.metrics=["auroc"]', "--set", "stop.bytes=100000000", "-q")
    assert said.code == 0 and re.search(r"bought 0\.\d+$", said.out, re.MULTILINE)


def test_the_data_of_a_plan_are_shown_without_new_clients(cli: Cli) -> None:
    said = cli("data", "show", *NEW)
    assert (said.code, said.err) == (0, "")
    assert "7 clients by iid: samples" in said.out and "3 more are held out of training" in said.out
