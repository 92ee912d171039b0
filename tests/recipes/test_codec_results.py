"""What the codec recipe must show, on one of its seeds. Slow: minutes of training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from atoll.report.codecs import bytes_an_update
from atoll.report.reading import RunRecord, rounds_to, series

RECIPE = Path(__file__).parents[2] / "recipes" / "codecs.py"


def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("codecs_recipe", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def smaller(plain: RunRecord, packed: RunRecord) -> float:
    sizes = [bytes_an_update(record) for record in (plain, packed)]
    assert sizes[0] is not None and sizes[1] is not None
    return sizes[0] / sizes[1]


@pytest.mark.slow
def test_a_hundredth_of_the_bytes_and_hardly_more_rounds(tmp_path: Path) -> None:
    """2NN, two digits a client, to 97 %: 32 times fewer bytes for 5 % more rounds, 100 times fewer for 15 %."""
    done = recipe().done
    plain = done("mlp", "none", 0, tmp_path)
    rounds = rounds_to(plain, 0.97)
    assert rounds is not None
    for codec, least, most in (
        ("random_k 90 %, eden 1 bit", 32, 1.05),
        ("random_k 30 %, eden 1 bit", 100, 1.15),
    ):
        packed = done("mlp", codec, 0, tmp_path)
        found = rounds_to(packed, 0.97)
        assert found is not None
        print(f"{codec}: {smaller(plain, packed):.1f} times fewer bytes, {found:.0f} rounds against {rounds:.0f}")
        assert smaller(plain, packed) >= least
        assert found <= most * rounds


@pytest.mark.slow
def test_the_cnn_loses_nothing(tmp_path: Path) -> None:
    """CNN, IID, 10 rounds: 32 times fewer bytes at no more than 0.2 points less."""
    done = recipe().done
    plain, packed = (done("cnn", codec, 0, tmp_path) for codec in ("none", "random_k 90 %, eden 1 bit"))
    ends = [series(record, "test.accuracy")[1][-1] for record in (plain, packed)]
    print(f"{smaller(plain, packed):.1f} times fewer bytes: {ends[1]:.4f} against {ends[0]:.4f}")
    assert smaller(plain, packed) >= 32
    assert ends[1] >= ends[0] - 0.002
