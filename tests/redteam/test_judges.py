"""Judges of every goal against cases whose answer is known, and what they say of guessing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from probes.test_token_leaks import texts, transformer

from atoll import Plan
from atoll.core.errors import DataError
from atoll.core.probe import Guess
from atoll.probes.fidelity import SAME
from atoll.redteam.judges import (
    Case,
    Judged,
    drawn,
    judge_labels,
    judge_membership,
    judge_property,
    judge_samples,
    judge_source,
    judge_tokens,
    num_candidates,
    owned_candidates,
)
from atoll.redteam.membership_judge import fair_candidates
from atoll.report.redteam import NOTHING, OPEN, SOME
from atoll.simulation.seat import Truth, Watched, samples_of, watch

NONE = torch.zeros(0)


def seen(**changes: Any) -> Watched:
    settings: dict[str, Any] = {
        "model": "logistic",
        "partition": {"name": "shards", "num_clients": 10},
        "local": {"steps": 1},
        "engine": "inline",
        **changes,
    }
    return watch(Plan(**settings), 1, elsewhere=100)


@pytest.fixture(scope="module")
def watched() -> Watched:
    return seen()


def truth_of(watched: Watched, row: int = 0) -> Truth:
    return watched.truths[0][row]


def test_levels_follow_floor_margin_and_what_lays_open() -> None:
    def level(value: float) -> str:
        return Judged({"x": value}, floor=0.5, margin=0.1, open_from=0.9).level

    assert [level(value) for value in (0.55, 0.65, 0.9, math.nan)] == [NOTHING, SOME, OPEN, NOTHING]


def test_true_samples_lay_open_and_public_ones_do_not(watched: Watched) -> None:
    x = samples_of(watched, truth_of(watched)).x
    right = judge_samples(Case(watched, [Guess(row=0, x=x[:3]), Guess(row=1, x=x[:3])], NONE))
    assert right is not None and right.level == OPEN and right.figures["best PSNR in dB"] == SAME
    assert right.pictures[0].psnr == SAME and (right.pictures[0].original == right.pictures[0].guess).all()
    public = judge_samples(Case(watched, [Guess(row=0, x=watched.known.elsewhere.x)], NONE))
    assert public is not None and public.level == NOTHING
    assert public.figures["best PSNR in dB"] == public.figures["best dB of the nearest public one"]
    assert judge_samples(Case(watched, [Guess(row=0)], NONE)) is None


def test_images_are_drawn_from_their_range_and_others_as_numbers() -> None:
    image = torch.linspace(-1, 1, 12).view(3, 2, 2)
    assert drawn(image, -1.0, 1.0).shape == (2, 2, 3) and drawn(image, -1.0, 1.0).max() == 255
    assert drawn(image[:1], -1.0, 1.0).tolist() == [[0, 23], [46, 70]]
    assert drawn(torch.ones(30), 0.0, 1.0).tolist() == [1.0] * 12


def test_the_usual_labels_are_no_finding_and_the_true_ones_are(watched: Watched) -> None:
    own = torch.bincount(samples_of(watched, truth_of(watched)).y, minlength=10)
    usual = torch.bincount(watched.known.elsewhere.y, minlength=10)
    right, guessed = (judge_labels(Case(watched, [Guess(row=0, counts_K=each)], NONE)) for each in (own, usual))
    assert right is not None and guessed is not None
    assert (right.level, guessed.level) == (OPEN, NOTHING) and right.figures["share of labels right"] == 1.0


def test_clients_with_a_class_are_told_from_those_without(watched: Watched) -> None:
    has = [bool((samples_of(watched, truth).y == 3).any()) for truth in watched.truths[0]]
    assert 0 < sum(has) < len(has)

    def judged(values: list[float]) -> Judged | None:
        notes = {"label": 3.0}
        return judge_property(Case(watched, [Guess(row=r, value=v, notes=notes) for r, v in enumerate(values)], NONE))

    right, wrong, same = (judged(each) for each in ([float(h) for h in has], [1.0 - h for h in has], [0.5] * len(has)))
    assert right is not None and wrong is not None and same is not None
    name = "AUC for clients with class 3"
    assert [each.figures[name] for each in (right, wrong, same)] == [1.0, 0.0, 0.5]
    assert same.level == NOTHING and same.chance > 0.7 and judge_property(Case(watched, [Guess(row=0)], NONE)) is None
    iid = seen(partition={"name": "iid", "num_clients": 4})
    with pytest.raises(DataError, match="all of the clients seen have samples of class 0"):
        judge_property(Case(iid, [Guess(row=row, value=0.0) for row in range(4)], NONE))


def test_sources_are_judged_beside_guessing(watched: Watched) -> None:
    candidates, owners = owned_candidates(watched, np.random.default_rng(0))
    assert len(candidates.y) == len(owners) == 200
    clients = [truth.clients[0] for truth in watched.truths[0]]
    scores = torch.stack([(owners == client).double() for client in clients])
    right = judge_source(Case(watched, [Guess(row=r, score_C=s) for r, s in enumerate(scores)], owners))
    level = judge_source(Case(watched, [Guess(row=r, score_C=0 * s) for r, s in enumerate(scores)], owners))
    assert right is not None and level is not None
    assert right.figures["share of samples whose source is named"] == 1.0 and right.level == OPEN
    assert right.floor == pytest.approx(0.1) and level.level == NOTHING
    first = samples_of(watched, Truth((int(owners[0]),), 0))
    assert torch.equal(candidates.x[0], first.x[0])


def test_members_are_judged_with_the_delta_of_the_plan(watched: Watched) -> None:
    num = num_candidates(watched, 400)
    _, member_C = fair_candidates(watched, num, np.random.default_rng(0))
    sure, none = (
        judge_membership(Case(watched, [Guess(score_C=score)], member_C, 1e-5))
        for score in (member_C.double(), torch.zeros(num))
    )
    assert sure is not None and none is not None
    assert sure.figures["AUC"] == sure.figures["members found at 0.1 % false alarms"] == 1.0
    assert sure.figures["empirical epsilon"] > 2 and sure.level == OPEN
    assert none.figures["empirical epsilon"] == 0 and none.level == NOTHING


def test_too_few_candidates_are_refused() -> None:
    few = seen(partition={"name": "iid", "num_clients": 3, "samples_per_client": 2})
    with pytest.raises(DataError, match=r"set evaluation\.holdout"):
        num_candidates(few, 2000)


def test_texts_are_judged_by_words_and_by_positions() -> None:
    watched = seen(
        data=texts(), model=transformer, partition={"name": "iid", "num_clients": 4, "samples_per_client": 1}
    )
    x = samples_of(watched, truth_of(watched)).x[0]
    read, turned = (judge_tokens(Case(watched, [Guess(row=0, y=each)], NONE)) for each in (x, x.flip(0)))
    assert read is not None and turned is not None
    assert read.figures["share of positions right"] == 1.0 and read.texts[0].original == read.texts[0].guess
    assert turned.figures["share of tokens right"] == 1.0 and turned.figures["share of positions right"] < 0.5
    counts = judge_tokens(Case(watched, [Guess(row=0, counts_K=torch.bincount(x, minlength=60))], NONE))
    assert counts is not None and "share of positions right" not in counts.figures and "×" in counts.texts[0].guess
