"""Table, page and picture of personal methods, from figures made up here."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from atoll.report.personal import Clients, MethodRun, PersonalTable, notes, problem_rows, table_rows, table_text
from atoll.report.personal_page import personal_page
from atoll.report.personal_picture import personal_picture, swarm

HOSTILE = '</pre><script>alert("1")</script>'


def made_up(runs: list[MethodRun], num_clients: int = 2, **fields: Any) -> PersonalTable:
    alone = {run.seed for run in runs if run.method == "local" and run.status == "done"}
    whole: dict[str, Any] = {
        "title": "made up",
        "metric": "accuracy",
        "larger_is_better": True,
        "rounds": 5,
        "seeds": tuple(dict.fromkeys(run.seed for run in runs)),
        "methods": tuple(dict.fromkeys(run.method for run in runs)),
        "clients": {seed: Clients(tuple(range(num_clients)), num_clients, {}) for seed in sorted(alone)},
        "runs": tuple(runs),
    }
    return PersonalTable(**{**whole, **fields})


def run_of(method: str, own: tuple[float | None, ...], seed: int = 0, **fields: Any) -> MethodRun:
    return MethodRun(method=method, seed=seed, own=own, **{"steps": 8.0, "rounds": 5, "gradients": 1, **fields})


class Strict(HTMLParser):
    """Reads a page in which every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened, self.scripts, self.best = list[str](), 0, 0
        self.feed(text)
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.best += ("class", "best") in attrs
        if tag not in ("meta", "link", "img"):
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def test_ties_are_not_better_and_ranks_follow_the_mean() -> None:
    runs = [run_of("local", (0.5, 0.7)), run_of("fedavg", (0.5, 0.6)), run_of("a", (0.5, 0.8)), run_of("b", (0.9, 0.9))]
    table = made_up(runs)
    better = {method: table.row(method).better.mean for method in table.ranked()}  # type: ignore[union-attr]
    assert better == {"local": 0, "fedavg": 0, "b": 1, "a": 0.5} and list(better) == ["local", "fedavg", "b", "a"]
    turned = made_up(runs, metric="rmse", larger_is_better=False)
    assert turned.ranked() == ["local", "fedavg", "a", "b"]
    assert turned.row("fedavg").gain.mean == pytest.approx(0.05)  # type: ignore[union-attr]
    assert Strict(personal_page(table, "")).best == 4  # in four columns, one each


def test_a_client_without_a_figure_is_not_left_out() -> None:
    table = made_up([run_of("local", (0.5, 0.7)), run_of("a", (0.9, None))])
    row = table.row("a")
    assert row is not None and math.isnan(row.mean.mean) and math.isnan(row.worst.mean) and row.better.mean == 0.5
    _, [_, cells] = table_rows(table)
    assert cells[1:4] == ["not finite"] * 3
    assert table.to_dict()["methods"]["a"]["mean"]["mean"] is None
    personal_picture(table)


def test_seeds_without_training_alone_are_not_compared() -> None:
    failed = MethodRun(method="local", seed=1, status="failed", why="diverged")
    table = made_up([run_of("local", (0.5, 0.7)), run_of("a", (0.6, 0.7)), failed, run_of("a", (0.9, 0.9), seed=1)])
    assert table.row("a").mean.mean == pytest.approx(0.65)  # type: ignore[union-attr]
    assert table_rows(table)[1][1][0] == "a*" and "A star" in table_text(table)
    assert problem_rows(table) == [
        ("failed", "local", " (seed 1)", "diverged"),
        ("failed", "a", " (seed 1)", "local has no result to compare"),
    ]
    nobody = made_up([failed, run_of("a", (0.9, 0.9), seed=1)])
    assert nobody.ranked() == [] and "<img " not in personal_page(nobody, "")


def test_more_work_than_alone_is_said() -> None:
    runs = [run_of("local", (0.5, 0.7)), run_of("a", (0.6, 0.7), steps=8.5, exact=False)]
    table = made_up(runs)
    assert any("a took more local steps than training alone" in note for note in notes(table))
    assert "≈ 8.5" in table_text(table) and 'class="warning"' in personal_page(table, "")


def test_the_page_is_whole_and_runs_no_script() -> None:
    runs = [run_of("local", (0.5, 0.7)), run_of(HOSTILE, (0.6, 0.7))]
    runs.append(MethodRun(method="refused", seed=0, status="refused", why=HOSTILE))
    page = Strict(personal_page(made_up(runs, title=HOSTILE, protection="privacy"), HOSTILE))
    assert page.scripts == 0
    assert "no guarantee covers it" in personal_page(made_up(runs, protection="privacy"), "")


def test_many_clients_make_no_large_page() -> None:
    rng = np.random.default_rng(0)
    methods = ["local", "fedavg", *"abcdefgh"]
    runs = [run_of(method, tuple(rng.beta(8, 2, 3000).tolist())) for method in methods]
    assert len(personal_page(made_up(runs, num_clients=3000), "")) < 2_000_000


@pytest.mark.parametrize("num", [1, 7, 60])
def test_dots_of_equal_gains_lie_apart(num: int) -> None:
    values_C = np.concatenate([np.full(num, 0.1), np.full(num, 0.3)])
    at_C2 = swarm(values_C, 0.01, 0.1) + np.stack([values_C, np.zeros(2 * num)], axis=1)
    gaps_CC = np.abs((at_C2[:, None] - at_C2[None, :]) / np.array([0.01, 0.1])).max(2) + 2 * np.eye(2 * num)
    assert gaps_CC.min() > 0.99
    assert np.abs(at_C2[:, 1]).max() <= 0.38 and np.abs(at_C2[:, 0] - values_C).max() < 0.1
