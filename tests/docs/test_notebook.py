"""The notebook of the examples: its cells run in order, and show progress and pictures."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atoll.core.events import RoundCommitted, RunStarted, SetupStep
from atoll.report import progress
from atoll.report.progress import Bar

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def last_values(notebook: Path) -> list[Any]:
    """Run the code of every cell in order, as a kernel does; the value that each ends with."""
    names: dict[str, Any] = {}
    values = []
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            *body, last = ast.parse("".join(cell["source"])).body
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            assert isinstance(last, ast.Expr)
            values.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    return values


def test_the_cells_run_and_show_pictures() -> None:
    result, frame, picture, model = last_values(NOTEBOOK)
    assert result.accuracy > 0.85 and "base64,iVBOR" in result._repr_html_()
    assert len(frame) == 5 and "<table" in frame._repr_html_()
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert "Linear" in repr(model)


def test_progress_is_drawn_in_one_place_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython is not among what tests need: what it would be asked to draw is noted down."""
    drawn: list[str] = []
    handle = SimpleNamespace(update=drawn.append)

    def display(html: str, display_id: bool) -> SimpleNamespace:
        assert display_id and not drawn  # once; then it is drawn again in place
        drawn.append(html)
        return handle

    module: Any = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(progress, "screen", lambda: ("notebook", None))
    bar = Bar()
    bar(SetupStep(text="compiling"))
    bar(RunStarted(title="a <plan>", version=0, rounds=2))
    for number in (1, 2):
        bar(RoundCommitted(row={"round": number, "seconds": 1.0}))
    bar.end()
    assert ["setting up" in drawn[0], "compiling" in drawn[1], "a &lt;plan&gt;" in drawn[2]] == [True] * 3
    assert 'value="1.0000"' in drawn[-1] and "round 2/2" in drawn[-1]
