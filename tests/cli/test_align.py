"""`atoll align` with options that do not go together, and files that it cannot use: one clear line, and no waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.core.errors import AtollError

THROUGH = ["bank.csv", "--column", "id", "--through", "shared", "--as", "bank", "--ask", "shop"]
PLAN, DATA = 2, 3
WRONG = [
    (["bank.csv", "--check", "--through", "shared"], PLAN, "and --through joins them: leave one of both out"),
    (["bank.csv", "--ask", "shop"], PLAN, "--ask is for parties elsewhere: name the folder that you share"),
    (["bank.csv", "--through", "shared", "--ask", "shop"], PLAN, "needs the name of this party"),
    (["bank.csv", "--through", "shared", "--as", "bank"], PLAN, "got neither: give one of them"),
    ([*THROUGH, "--asked-by", "club"], PLAN, "got both: give one of them"),
    (["shop.csv", *THROUGH], PLAN, "got 2 files and 1 times --column: give one file and its --column"),
    ([*THROUGH, "--column", "late"], PLAN, "got 1 files and 2 times --column"),
    ([*THROUGH, "--patience", "soon"], PLAN, "--patience is a number with a unit (s, m, h or d), e.g. 90s"),
    ([*THROUGH, "--patience", "0s"], PLAN, "--patience is a number with a unit"),
    ([*THROUGH, "--ask", "Shop"], PLAN, "differ by case alone: give each another"),
    (["bank.csv", "--column", "id"], PLAN, "got 1 file: name those of two or more parties, or join with"),
    ([*THROUGH, "--secret-file", "none"], DATA, "none cannot be read: No such file or directory; check the path"),
    ([*THROUGH, "--secret-file", "short"], DATA, "has a secret of 6 bytes, at least 16 are needed"),
    ([*THROUGH, "--secret-file", "shared/secret"], DATA, "shared/secret lies in shared, which others read"),
    ([*THROUGH, "--out", "shared/aligned"], DATA, "shared/aligned lies in shared, which others read"),
    (["shared/bank.csv", *THROUGH[1:]], DATA, "shared/bank.csv lies in shared, which others read"),
    ([*THROUGH, "--out", "full"], DATA, "full is not empty: choose another directory"),
    ([*THROUGH, "--out", "bank.csv"], DATA, "bank.csv cannot be written to (File exists)"),
    ([*THROUGH, "--out", "/proc/aligned"], DATA, "/proc/aligned cannot be written to"),
    ([*THROUGH, "--out", "/proc"], DATA, "/proc is not empty"),
    ([*THROUGH, "--through", "none"], DATA, "none is no directory"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "says"), WRONG, ids=[says[:40] for _, _, says in WRONG])
def test_what_does_not_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("shared").mkdir()
    for name in ("bank.csv", "shop.csv", "shared/bank.csv"):
        Path(name).write_text("id,late\n1,0\n")
    Path("short").write_text("secret\n")
    Path("shared/secret").write_text("x" * 32)
    Path("full").mkdir()
    Path("full/table.csv").touch()
    before = {str(each) for each in Path().rglob("*")}
    done = CliRunner().invoke(app, ["align", *words])
    assert isinstance(done.exception, AtollError) and done.exception.exit_code == code, done.output
    assert says in str(done.exception)
    assert {str(each) for each in Path().rglob("*")} == before
