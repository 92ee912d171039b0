"""What `measure_plan` finds, how it is told, and its picture."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from atoll.core.errors import PlanError
from atoll.core.plan import Plan
from atoll.data.heterogeneity import earth_movers_distance, js_divergence
from atoll.report.figures import save_png
from atoll.report.measure_picture import measure_picture
from atoll.report.measuring import Measures, as_text, measure_plan


@pytest.fixture(scope="module")
def shards() -> Measures:
    return measure_plan(Plan(partition={"name": "shards", "num_clients": 20}), clients=8, budget=200)


def cells(text: str, start: str) -> list[str]:
    """The cells of the line that starts so."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith(start))
    return re.split(r"\s{2,}", line.strip())


def test_the_text_tells_every_measure_with_its_unit(shards: Measures) -> None:
    text = as_text(shards)
    assert cells(text, "loss F") == ["loss F, mean over the samples", f"{shards.dissimilarity.loss:.4g}", "nats"]
    assert cells(text, "dissimilarity B")[1:] == [f"{shards.dissimilarity.b:.4g}", "none"]
    assert cells(text, "gradient diversity (0.125 where")[1:] == [f"{shards.dissimilarity.diversity:.4g}", "none"]
    assert cells(text, "Gamma, solved")[1:] == [f"{shards.gamma.value:.4g}", "nats"]
    for name, rule in (("labels, Jensen-Shannon", js_divergence), ("labels, earth mover", earth_movers_distance)):
        assert cells(text, name)[1] == f"{np.average(rule(shards.counts_CK), weights=shards.counts_CK.sum(1)):.4g}"
    assert cells(text, "0.1 ")[1:3] == [f"{shards.drifts[-1].measured:.4g}", f"{shards.drifts[-1].predicted:.4g}"]
    rows = text.split("\n\n")[1].splitlines()[1:]
    assert all(len(re.split(r"\s{2,}", row)) == 3 for row in rows)


def test_a_sample_of_clients_is_by_the_seed_and_named(shards: Measures) -> None:
    plan = Plan(partition={"name": "shards", "num_clients": 20})
    again, other = (measure_plan(plan.replace({"seed": seed}), clients=8, budget=1) for seed in (0, 1))
    assert shards.clients == again.clients == sorted(set(again.clients)) != other.clients
    assert "8 of 20 clients, by seed, with" in as_text(shards)
    everybody = measure_plan(plan, clients=20, budget=1)
    assert everybody.clients == list(range(20)) and "all 20 clients with 1,437 training samples" in as_text(everybody)


def test_an_estimate_of_gamma_is_not_called_solved() -> None:
    hasty = measure_plan(Plan(), clients=2, budget=1)
    assert "Gamma is an estimate and no bound: the budget ended first, so raise it; 0 of 3 solves" in as_text(hasty)
    deep = measure_plan(Plan(model={"name": "mlp_2nn", "hidden": 4}), clients=2, budget=1)
    assert "Gamma is an estimate and no bound: the loss is not known to be convex; 0 of 3" in as_text(deep)
    with pytest.raises(PlanError, match="clients and budget must be at least 1, got 0 and 5"):
        measure_plan(Plan(), clients=0, budget=5)


def test_progress_counts_up_to_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    measure_plan(Plan(), clients=3, budget=1, progress=lambda *step: told.append(step))
    steps = {"steps to the minimum of all samples", "steps to a client's minimum"}
    assert {what for what, *_ in told} == {"curvature", "gradients", "minima", "drift", *steps}
    assert [done for what, done, total in told if what == "minima"] == [1, 2, 3, 4]
    assert all(done <= total for _, done, total in told)


def test_the_picture_shows_clients_and_drift(shards: Measures, tmp_path: Path) -> None:
    figure = measure_picture(shards)
    labels, gradients, drift = figure.axes
    assert sum(bar.get_height() for bar in labels.patches) == 8 * 2  # type: ignore[attr-defined]
    assert sum(bar.get_height() for bar in gradients.patches) == 8  # type: ignore[attr-defined]
    predicted, between, measured = drift.lines
    np.testing.assert_allclose(measured.get_ydata(), [d.measured for d in shards.drifts])
    np.testing.assert_allclose(predicted.get_ydata(), [d.predicted for d in shards.drifts])
    assert (np.asarray(between.get_ydata()) < np.asarray(predicted.get_ydata())).all()
    assert (drift.get_xscale(), drift.get_yscale()) == ("log", "log")
    shown = {text.get_text() for text in figure.findobj(Text)}  # type: ignore[attr-defined]
    assert {"Labels", "Gradients", "Drift in 5 local steps", "norm of the bias (nats)"} <= shown
    with Image.open(save_png(figure, tmp_path / "measures.png", dpi=50)) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert 0.01 < (pixels < 250).any(axis=2).mean() < 0.6
