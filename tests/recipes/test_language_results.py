"""The figures of docs/language_results: epsilons by an outside accountant, tables as figures, and what is claimed."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.plan import Plan
from atoll.train.federation import build_federation

ROOT = Path(__file__).parents[2]
FIGURES: dict[str, Any] = json.loads((ROOT / "docs" / "language_results.json").read_text())


@pytest.fixture(scope="module")
def compare() -> Any:
    """The recipe as a module."""
    pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
    sys.path.insert(0, str(ROOT / "recipes" / "language"))
    spec = importlib.util.spec_from_file_location("language_compare", ROOT / "recipes" / "language" / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "recipes" / "language"))
    return module


def noisy_rows() -> list[dict[str, Any]]:
    return [row for row in FIGURES["privacy"]["rows"] if row["sigma"] is not None]


def test_epsilons_are_those_of_an_outside_accountant() -> None:
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting import pld

    about, seen = FIGURES["privacy"], set()
    for row in noisy_rows():
        key = row["mechanism"], row["cohort"], row["sigma"]
        if key in seen:
            continue
        seen.add(key)
        event: Any = dp.GaussianDpEvent(row["sigma"])
        if row["mechanism"] == "central":
            event = dp.SelfComposedDpEvent(
                dp.PoissonSampledDpEvent(row["cohort"] / about["clients"], event), about["rounds"]
            )
        else:  # each in turn: so many times at most, and nothing is gained by sampling
            event = dp.SelfComposedDpEvent(event, math.ceil(row["cohort"] * about["rounds"] / about["clients"]))
        spent = pld.PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL).compose(event).get_epsilon(about["delta"])
        assert row["epsilon"] == pytest.approx(spent, rel=0.02), row
    assert {mechanism for mechanism, _, _ in seen} == {"central", "local", "distributed"}
    assert {round(row["epsilon"]) for row in noisy_rows()} == {2, 8} and about["clients"] >= 100


def test_noise_gains_nothing() -> None:
    """Rates of rows with and without noise were searched alike, so that what noise seems to gain is chance."""
    rows = FIGURES["privacy"]["rows"]
    free = {(row["method"], row["rank"], row["cohort"]): row["nats"] for row in rows if row["mechanism"] == "clip"}
    for row in noisy_rows():
        whole = free[row["method"], row["rank"], row["cohort"]]
        assert statistics.fmean(row["nats"].values()) >= statistics.fmean(whole.values()) - 0.03, row


def test_exact_sums_of_large_cohorts_keep_most_of_the_gain() -> None:
    about = FIGURES["privacy"]
    gains = {
        (row["mechanism"], row["method"], row["rank"], row["cohort"], round(row["epsilon"] or 0)): (
            about["base"] - statistics.fmean(row["nats"].values())
        )
        for row in about["rows"]
    }
    best = gains["central", "ffa_lora", 4, 90, 8]
    assert best >= 0.95 * gains["clip", "ffa_lora", 4, 90, 0]
    assert best == max(gain for (mechanism, *_), gain in gains.items() if mechanism not in ("clip", "none"))
    assert gains["local", "ffa_lora", 4, 30, 8] < 0.4 * gains["clip", "ffa_lora", 4, 30, 0]


@pytest.mark.parametrize(("first", "least"), [(1.0, 4.0), (16.0, 4.0), (4.0, 4.0), (1.0, 0.25)])
def test_rates_are_doubled_and_halved_until_the_best_has_worse_neighbours(
    compare: Any, first: float, least: float
) -> None:
    best, losses = sys.modules["compare_private"].best_rate(
        lambda rate: math.nan if rate > 4 * least else abs(math.log(rate / least)), first
    )
    assert best == least and {least / 2, 2 * least} <= set(losses)
    assert len(sys.modules["compare_private"].best_rate(lambda rate: -rate, first, most=5)[1]) == 5


def test_a_run_that_was_measured_is_not_made_again(compare: Any, tmp_path: Path) -> None:
    runs = compare.Runs(tmp_path / "runs", "models/base")
    assert runs.kept("one", lambda: {"nats": 1.5}) == {"nats": 1.5}
    assert compare.Runs(tmp_path / "runs", "models/base").kept("one", lambda: pytest.fail("again")) == {"nats": 1.5}
    with pytest.raises(KeyboardInterrupt):
        runs.kept("two", interrupt)
    assert runs.kept("two", lambda: 2) == 2 and not list((tmp_path / "runs").glob("*.part"))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_tables_on_the_page_are_those_of_the_figures(compare: Any) -> None:
    page = (ROOT / "docs" / "language_results.md").read_text()
    assert {"methods", "codecs", "ranks"} <= set(FIGURES)
    for name, figures in FIGURES.items():
        _, table = compare.TABLES[name]
        lines = page.partition(f"<!-- {name} -->\n")[2].partition("\n<!-- end -->")[0].splitlines()
        assert [lines[0], *lines[2:]] == table(figures), name


def test_the_unigram_model_is_smoothed_and_pooled(compare: Any, tmp_path: Path) -> None:
    from atoll.data.dataset import Dataset

    x = np.zeros((4, 2), dtype=np.int32)
    y = np.array([[0, 1], [1, 2], [0, 0], [2, -100]])
    data = Dataset(
        name="tokens",
        train_x=np.concatenate([x, x]),
        train_y=np.concatenate([y, y]),
        test_x=x,
        test_y=y,
        num_classes=4,
        tokens=True,
        problem="tokens",
        owners=np.repeat([0, 1], 4),
    )
    plan = Plan(data=data, partition="natural", evaluation={"holdout": 0.25})
    found = compare.of_unigram(plan)
    federation = build_federation(plan)
    train = [y for client in (0, 1) for y in data.train_y[federation.train_indices(client)].ravel() if y >= 0]
    held = [data.train_y[federation.evaluation_indices(client)].ravel() for client in (0, 1)]
    alpha = found["alpha"]
    share = (np.bincount(train, minlength=4) + alpha) / (len(train) + 4 * alpha)
    assert found["nats"] == pytest.approx([-np.log(share[some[some >= 0]]).mean() for some in held])
    assert found["tokens"] == len(train) and share.sum() == pytest.approx(1)


@pytest.mark.parametrize("method", ["fedit", "fedex_lora"])
def test_federated_models_are_better_than_alone_and_than_frequencies(method: str) -> None:
    for seed in FIGURES["methods"].values():
        assert seed[method] <= seed["local"] - 0.3 and seed[method] <= seed["unigram"] - 0.3


def test_codecs_and_ranks_cost_little() -> None:
    codecs, ranks = FIGURES["codecs"], FIGURES["ranks"]
    small = [each for each in codecs.values() if each["fewer"] >= 1000]
    plain = codecs["none"]["nats"]
    assert any(all(each["nats"][seed] <= plain[seed] + 0.05 for seed in plain) for each in small)
    assert all(ranks["4, 8, 16"][seed] <= ranks["all 16"][seed] + 0.05 for seed in ranks["all 16"])
