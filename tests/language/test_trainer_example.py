"""A user's own transformers.Trainer as client work: the example learns, and twice to the same bits."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")
EXAMPLE = Path(__file__).parents[2] / "examples" / "language" / "trainer.py"


@pytest.mark.slow
def test_trainer_as_client_work() -> None:
    example = runpy.run_path(str(EXAMPLE))
    losses = example["main"](rounds=3)
    assert losses[-1] < 1.6 < losses[0]  # of 28 letters, 3.3 nats say nothing
    assert example["main"](rounds=1) == losses[:1]
