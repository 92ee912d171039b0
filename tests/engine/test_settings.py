from __future__ import annotations

from pathlib import Path

import pytest

from atoll.api import run
from atoll.core.errors import PlanError, RunError
from atoll.core.plan import Plan


@pytest.mark.parametrize("engine", ["auto", "processes"])
@pytest.mark.parametrize("workers", [0, -2])
def test_a_number_of_workers_that_cannot_be_is_refused(digits_plan: Plan, engine: str, workers: int) -> None:
    plan = digits_plan.replace({"engine": engine, "engine.workers": workers})
    with pytest.raises(PlanError, match=rf"engine\.workers must be in \[1, 1024\], got {workers}"):
        run(plan)


def test_a_field_of_two_kinds_names_both() -> None:
    with pytest.raises(PlanError, match=r"local\.batch_size must be a whole number of at least 1 or 'all', got 1\.5"):
        Plan.from_toml("[local]\nbatch_size = 1.5")


def test_a_damaged_run_file_is_named(digits_plan: Plan, tmp_path: Path) -> None:
    run(digits_plan, out=tmp_path / "run", report=False)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        run(digits_plan.replace({"rounds": 5}), out=tmp_path / "run", report=False, resume=True)


def test_auto_says_what_it_chose_and_resume_repeats_it(digits_plan: Plan, tmp_path: Path) -> None:
    plan = digits_plan.replace({"engine": "auto"})
    first = run(plan, out=tmp_path / "run", report=False)
    again = run(plan.replace({"rounds": 5}), out=tmp_path / "run", report=False, resume=True)
    assert first.engine == again.engine
    assert first.engine["name"] in ("inline", "vectorised", "processes")


def test_a_model_that_cannot_be_mapped_is_trained_one_by_one(digits_plan: Plan) -> None:
    def branching(input_shape: tuple[int, ...], num_classes: int):  # type: ignore[no-untyped-def]
        from torch import nn

        class Branching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(input_shape[1] * input_shape[2], num_classes)

            def forward(self, x):  # type: ignore[no-untyped-def]
                x = x.flatten(1)
                return self.linear(x) if float(x.sum()) > 0 else self.linear(-x)

        return Branching()

    fields = {name: getattr(digits_plan, name) for name in ("partition", "policy", "local", "rounds")}
    for engine in ("auto", {"name": "vectorised", "stack": 3}, {"name": "processes", "stack": 3, "workers": 2}):
        assert run(Plan(**fields, model=branching, engine=engine)).engine.get("stack", 0) == 0
