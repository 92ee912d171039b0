"""The recipe of attacks and defences, on a tiny grid."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "redteam_defences.py"


@pytest.mark.slow
def test_a_tiny_grid_has_a_table_and_a_picture(tmp_path: Path) -> None:
    """A leak of the first layer without a defence and none under noise; what is kept is not made again."""
    pytest.importorskip("matplotlib")
    main = runpy.run_path(str(RECIPE))["main"]
    cells, out = tmp_path / "cells.json", tmp_path / "heat"
    argv = ["--attacks", "linear_leak", "label_counts", "loss_threshold", "--defences", "none", "noise 1", "sum of 10"]
    argv += ["--rounds", "5", "--member-rounds", "2", "--seconds", "2", "--cells", str(cells), "--out", str(out)]
    main(argv)
    kept = json.loads(cells.read_text())
    text, got = kept["none"]["linear_leak"]
    assert text.endswith(" dB") and float(text[:-3]) > 100 and got == 1.0
    assert kept["noise 1"]["linear_leak"][1] < 0.3 and kept["sum of 10"]["linear_leak"][1] < 0.3
    assert kept["none"]["label_counts"][1] == 1.0
    table = (tmp_path / "heat.table.md").read_text().splitlines()
    assert table[0] == "| defence | linear_leak | label_counts | loss_threshold | accuracy |" and len(table) == 5
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")
    kept["none"]["linear_leak"] = ["7 dB", 0.0]
    cells.write_text(json.dumps(kept))
    main(argv)
    assert "| 7 dB |" in (tmp_path / "heat.table.md").read_text()
