"""What `atoll.run` gives back."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from helpers import FRAME
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.core.errors import RunError
from atoll.data.catalog.digits import digits


def accuracy_of(model: nn.Module) -> float:
    data = digits()
    with torch.no_grad():
        predicted = model(torch.from_numpy(data.test_x).float() / 16).argmax(1)
    return float((predicted.numpy() == data.test_y).mean())


def noisy() -> nn.Module:
    """Gives other answers while it trains."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)
    )


@pytest.mark.parametrize("model", ["logistic", noisy])
@pytest.mark.parametrize("engine", ["inline", "vectorised", "processes"])
def test_the_model_predicts_what_the_accuracy_says(model: Any, engine: str) -> None:
    result = atoll.run(atoll.Plan(model=model, rounds=3, local={"lr": 0.3}, engine=engine))
    assert result.accuracy == pytest.approx(accuracy_of(result.model), abs=1e-12)
    assert result.accuracy > 0.5
    assert not result.model.training


def test_history_frame_and_plot(tmp_path: Path) -> None:
    evaluation = {"every": 2, "clients_every": 5}
    plan = atoll.Plan(rounds=5, policy={"size": 4}, evaluation=evaluation, engine="vectorised")
    result = atoll.run(plan, out=tmp_path / "run", report=False)
    assert result.path == tmp_path / "run"
    assert result.reason == "all rounds done"
    assert result.plan is plan
    assert result.engine["name"] == "vectorised"
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.history == written
    assert result.accuracy == result.history[-1]["test"]["accuracy"] == result.test["accuracy"]
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["round"].tolist() == [1, 2, 3, 4, 5]
    assert frame["clients"].tolist() == [4] * 5
    assert frame["test.accuracy"].notna().tolist() == [False, True, False, True, True]
    assert frame["clients_test.mean"].notna().tolist() == [False] * 4 + [True]
    assert frame["bytes_up"].tolist() == [4 * (650 * 4 + FRAME) * number for number in range(1, 6)]
    assert (frame["seconds"].diff().dropna() > 0).all()
    for against in ("round", "seconds", "bytes"):
        figure = result.plot(against)
        assert isinstance(figure, Figure)
        x, y = figure.axes[0].lines[0].get_data()
        measured = [row for row in written if "test" in row]
        along = [row["bytes_up" if against == "bytes" else against] for row in measured]
        assert [each / x[-1] for each in x] == pytest.approx([each / along[-1] for each in along])
        assert list(y) == [row["test"]["accuracy"] for row in measured]
    with pytest.raises(RunError, match="cannot be drawn against 'weeks'"):
        result.plot("weeks")  # type: ignore[arg-type]


def test_a_frame_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    result = atoll.run(atoll.Plan(rounds=1, policy={"size": 1}, engine="inline"))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(RunError, match=r"pip install pandas, or use result\.history"):
        result.frame()


def test_the_written_model_is_the_model(tmp_path: Path) -> None:
    result = atoll.run(atoll.Plan(model=noisy, rounds=2), out=tmp_path / "run", report=False)
    written = load_file(tmp_path / "run" / "model.safetensors")
    model = noisy()
    model.load_state_dict(written)
    assert accuracy_of(model.eval()) == pytest.approx(result.accuracy, abs=1e-12)
    assert {name: tuple(t.shape) for name, t in written.items()} == {
        name: tuple(t.shape) for name, t in noisy().state_dict().items()
    }


def test_no_rounds_give_the_first_model(tmp_path: Path) -> None:
    result = atoll.run(atoll.Plan(rounds=0, engine="vectorised"), out=tmp_path / "run", report=False)
    assert result.history == []
    assert result.test == {}
    assert math.isnan(result.accuracy)
    assert len(result.frame()) == 0
    longer = atoll.Plan(rounds=2, engine="vectorised")
    assert torch.equal(
        atoll.run(longer, out=tmp_path / "run", report=False, resume=True).params_D, atoll.run(longer).params_D
    )


def test_a_function_in_a_test_may_be_the_model_and_resumes() -> None:
    width = 9

    def mine(input_shape: tuple[int, ...], num_classes: int, depth: int = 1) -> nn.Module:
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(math.prod(input_shape), width), *layers, nn.Linear(width, num_classes)
        )

    plan = atoll.Plan(model=atoll.Part(mine, depth=2), rounds=1)
    result = atoll.run(plan)
    assert result.params_D.numel() == 64 * 9 + 9 + 2 * (81 + 9) + 90 + 10
    assert plan.model.to_dict()["name"].endswith(
        ":test_a_function_in_a_test_may_be_the_model_and_resumes.<locals>.mine"
    )


def test_resume_from_python_wants_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="resume needs the directory of the run: pass out="):
        atoll.run(atoll.Plan(), resume=True)
    with pytest.raises(RunError, match="is not a run directory"):
        atoll.run(atoll.Plan(), out=tmp_path / "nowhere", resume=True)


def test_a_run_leaves_torch_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    before = torch.get_num_threads()
    for engine in ("inline", "vectorised", "processes"):
        atoll.run(atoll.Plan(model=noisy, rounds=1, engine=engine))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == before
