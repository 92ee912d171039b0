"""What the recipe of vertical learning must show. Slow: minutes of training."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from atoll import Plan, compare_ways

RECIPE = Path(__file__).parents[2] / "recipes" / "vertical_adult.toml"


@pytest.mark.slow
def test_three_parties_are_as_good_as_one_with_all_columns(tmp_path: Path) -> None:
    """On the Adult table; the bank alone falls behind. Bytes are those of activations and gradients, within 2 %."""
    table = compare_ways(Plan.from_toml(RECIPE.read_text()), out=tmp_path, seeds=3)
    assert not table.problems
    central, vertical, alone = (mean(run.figure or 0.0 for run in table.of(way)) for way in table.ways)
    print(f"AUROC: central {central:.4f}, vertical {vertical:.4f}, alone {alone:.4f}")
    assert abs(central - vertical) < 0.005 and vertical > alone + 0.03
    crossed = 2 * 4 * 48 * 10 * 32_561
    for run in table.of("vertical"):
        assert crossed < run.bytes_up + run.bytes_down < 1.02 * crossed
