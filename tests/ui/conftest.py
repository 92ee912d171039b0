from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ui.browser import launched, link_to, write_run


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, for all tests of the page."""
    with launched() as started:
        yield started


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs that have ended."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "demo-1", name="demo")
    for seed in range(3):
        write_run(root / "sweep" / "lr=0.1" / f"seed{seed}", name="sweep", seed=seed, shift=0.01 * seed)
    write_run(root / "stopped", 20, planned=50, ended=False)
    (root / "broken").mkdir()
    (root / "broken" / "plan.toml").write_text("rounds = [")
    (root / "broken" / "run.json").write_text("{}")
    return root


@pytest.fixture(scope="session")
def link(runs: Path, browser: Any) -> Iterator[str]:
    """The link of a page of these runs."""
    with link_to(runs) as found:
        yield found
