"""The recipe of a federation that tunes a language model: real processes, kills, and the simulation's bits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import DataError
from atoll.data.catalog.shakespeare import speeches

pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")
RECIPE = Path(__file__).parents[2] / "recipes" / "language" / "federation.py"


def recipe(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_killed_processes_do_not_change_the_end(base: Path, tmp_path: Path) -> None:
    try:
        speeches(quiet=True)
    except DataError as error:
        pytest.skip(f"needs real data: {error}")
    done = recipe(tmp_path, str(base))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("! SIGKILL") == 2
    assert "same bits at the server, 3 clients and in a simulation" in done.stdout
    before, after = re.search(r"([\d.]+) nats a token by the base, ([\d.]+) with", done.stdout).groups()  # type: ignore[union-attr]
    assert float(after) < float(before)
    assert "Traceback" not in (tmp_path / "runs" / "language-1" / "server.log").read_text() + done.stderr


def test_without_a_model_it_says_how_to_make_one(tmp_path: Path) -> None:
    done = recipe(tmp_path)
    assert done.returncode == 1 and "recipes/language/stories15m.py models/stories15m" in done.stderr
    assert not list(tmp_path.iterdir())
