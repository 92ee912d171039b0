"""What docs/stability.md promises of files and plans: those of earlier releases can still be read.

The files lie in tests/fixtures, and were written by the code of their time.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.cli.ledger import verify
from atoll.commit import run_state
from atoll.commit.run_state import RunState
from atoll.core.errors import RunError
from atoll.core.plan import Plan
from atoll.core.wire import pack, unpack
from atoll.ledger.audit import Findings, audit
from atoll.network.protocol.messages import VERSION
from atoll.network.server.store import Store
from atoll.network.server.tables import SCHEMA
from atoll.privacy.ledger import Ledger
from atoll.report.html import write_report
from atoll.report.reading import read_run
from atoll.report.record import RunDirectory
from atoll.train.federation import build_federation
from atoll.train.model import build_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
RELEASES = sorted(path for path in FIXTURES.iterdir() if path.name.startswith("release-"))
PAGE = FIXTURES.parents[1] / "docs" / "stability.md"

release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def known(release: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((release / "known.json").read_text())
    return found


@release
def test_plans_keep_their_meaning(release: Path) -> None:
    """A plan's identity decides which checkpoints and privacy ledgers are its own, so it must not move either."""
    identities = {path.stem: Plan.from_toml(path.read_text()).identity() for path in (release / "plans").iterdir()}
    assert identities == known(release)["identities"]


@release
def test_no_setting_of_a_plan_is_gone(release: Path) -> None:
    assert set(known(release)["keys"]) <= set(Plan.dotted_keys())


@release
def test_a_finished_run_is_read_and_drawn(release: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(release / "run", tmp_path / "run"))
    record = read_run(path)
    assert record.result is not None and record.result["reason"] == "all rounds done"
    assert [row["round"] for row in record.rows] == [1, 2] and record.rows[-1]["test"] == record.result["test"]
    assert record.confusion is not None and record.clients is not None and record.partition is not None
    assert f"{record.result['test']['accuracy']:.2%}".replace("%", "") in write_report([path]).read_text()


@release
def test_the_model_of_a_finished_run_is_as_good_as_it_was(release: Path) -> None:
    record = read_run(release / "run")
    federation = build_federation(record.plan)
    model = build_model(record.plan, federation).eval()
    model.load_state_dict(load_file(release / "run" / "model.safetensors"))
    with torch.no_grad():
        right = model(federation.features(federation.test_x)).argmax(1) == federation.test_y
    assert record.result is not None
    assert right.double().mean().item() == pytest.approx(record.result["test"]["accuracy"])


@release
def test_a_checkpoint_is_read_or_refused_in_words(release: Path, tmp_path: Path) -> None:
    """Never misread: the state that comes back is that of the model beside it."""
    directory = RunDirectory.reopen(Path(shutil.copytree(release / "run", tmp_path / "run")))
    try:
        state = directory.load(directory.plan().identity())
    except RunError as error:
        assert "checkpoint" in str(error) and ":" in str(error)
    else:
        assert isinstance(state, RunState) and state.coordinator.version == 2
        model = load_file(release / "run" / "model.safetensors")
        assert torch.equal(state.params_D.sort().values, torch.cat([t.flatten() for t in model.values()]).sort().values)
    finally:
        directory.close()


@release
def test_a_privacy_ledger_is_read(release: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(release / "private", tmp_path / "private"))
    plan = Plan.from_toml((folder / "plan.toml").read_text())
    ledger = Ledger.read(folder / "privacy.ledger", plan.identity())
    assert ledger.num_charged == 2
    with pytest.raises(RunError):
        Ledger.read(folder / "privacy.ledger", plan.replace({"privacy.sigma": 0.1}).identity())


@release
def test_a_ledger_is_verified(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the command line does it: by the server's key, a client's copy and what was acknowledged to it."""
    server, client = known(release)["server"], release / "client"
    verify(release / "server", key=server["key"], head=[client], receipts=[client])
    assert f"{server['rounds']} rounds, 0 abandoned, 0 updates rejected" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "broadcasts"),
    [("store-1.sql", 0), *((f"{path.name}/server/store.sql", 2) for path in RELEASES)],
    ids=lambda each: str(each).partition("/")[0],
)
def test_a_store_is_brought_up_to_date_with_all_that_is_in_it(script: str, broadcasts: int, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "store.db")
    database.executescript((FIXTURES / script).read_text())
    before = rows_of(database)
    Store(f"sqlite:///{tmp_path}/store.db").close()
    after = rows_of(database)
    database.close()
    assert dict(after.pop("meta"))["schema"] == str(SCHEMA) and before.pop("meta")
    assert after == {
        "agreed": [],
        "refusals": [],
        "evaluations": [],
        "readiness": [],
        **before,
    }  # nothing is lost, and what is new is empty
    assert [(row[1], row[3]) for row in after["clients"]] == [("c0", "approved"), ("c1", "approved")]
    found = audit([line for _, _, line in sorted(after["ledger"])])
    assert isinstance(found, Findings) and (found.rounds, found.broadcasts) == (2, broadcasts)


def rows_of(database: sqlite3.Connection) -> dict[str, list[Any]]:
    """Return all rows of all tables."""
    names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return {name: database.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}


def test_the_wire_format_is_that_of_its_page() -> None:
    page = (PAGE.parent / "wire.md").read_text()
    text = re.search(r"```text\n((?:[0-9a-f]{2}  (?:[0-9a-f]{2} ?)+\n)+)```", page)
    assert text is not None
    data = bytes.fromhex("".join(line[4:] for line in text[1].splitlines()))
    payload = unpack(data, max_bytes=len(data))
    assert payload.carrier.tolist() == [3, -1, 0] and payload.sides[0]["scale"].item() == 0.5
    assert pack(payload) == data


def test_the_page_names_the_numbers_that_are_in_force() -> None:
    page = PAGE.read_text()
    assert f"version {VERSION}" in page and re.search(rf"store \| layout {SCHEMA} ", page)
    assert re.search(rf"checkpoint.safetensors.* \| layout {run_state.SCHEMA},", page)
    paths = json.loads((PAGE.parent / "openapi.json").read_text())["paths"]
    assert paths and all(path.startswith(f"/v{VERSION}/") for path in paths)


def test_every_test_that_the_page_names_is_there() -> None:
    names = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", PAGE.read_text())
    assert names
    for path, test in names:
        text = (PAGE.parents[1] / path).read_text()
        assert not test or f"def {test}(" in text, f"{path} has no {test}"
