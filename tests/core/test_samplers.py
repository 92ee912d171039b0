"""What every sampler must satisfy. Shapes: N registered clients, R repeated draws, W kinds of weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from members import every_example
from scipy.stats import binom, chisquare

from atoll.core.coordinator import Begin, Coordinator, CoordinatorState, Policy, Send
from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.sampler import Pick, Population, Sampler
from atoll.core.seeds import generator
from atoll.rounds.drawing import draw_weighted
from atoll.simulation.dry_run import dry_run

VARIANTS = [
    Part("uniform", replacement=True),
    Part("poisson", rate=0.3),
    Part("importance", by="loss", explore=0.5),
]
EVERY = [*every_example("rounds.samplers"), *VARIANTS]
UNBIASED = [VARIANTS[0], Part("weighted"), Part("importance"), VARIANTS[2]]

every = pytest.mark.parametrize("part", EVERY, ids=repr)
SIZE_N = np.array([1, 2, 3, 5, 8, 13, 21, 34])
SCORES = {0: 2.0, 1: 0.5, 3: 4.0, 6: 1.5}


def built(part: Part) -> Sampler:
    sampler: Sampler = part.build("rounds.samplers")
    return sampler


def people(
    size_N: np.ndarray = SIZE_N,
    free: Callable[[int], bool] = lambda client: True,
    scores: Mapping[int, float] = SCORES,
    attempt: int = 0,
) -> Population:
    return Population(len(size_N), free, lambda: size_N, scores, attempt)


def times_picked(part: Part, num: int, repeats: int, **options: Any) -> np.ndarray:
    """Return how often each client was chosen in `repeats` attempts."""
    sampler, times_N = built(part), np.zeros(len(SIZE_N))
    for attempt in range(repeats):
        for client, _ in sampler.sample(generator(5, "test", attempt), num, people(attempt=attempt, **options)):
            times_N[client] += 1
    return times_N


@every
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_picks_are_different_free_and_never_too_many(part: Part, data: st.DataObject) -> None:
    size_N = np.array(data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=12)))
    clients = st.integers(0, len(size_N) - 1)
    free = data.draw(st.sets(clients))
    scores = data.draw(st.dictionaries(clients, st.floats(-1, 100) | st.just(float("nan"))))
    num, seed, attempt = data.draw(st.integers(1, len(size_N))), data.draw(st.integers(0, 999)), data.draw(clients)
    everyone = people(size_N, free.__contains__, scores, attempt)
    sampler = built(part)
    picks = sampler.sample(generator(seed, "test"), num, everyone)
    assert len({pick.client for pick in picks}) == len(picks)
    assert {pick.client for pick in picks} <= free
    assert all(type(pick.client) is int and 0 < pick.share < np.inf for pick in picks)
    if sampler.scheme != "poisson":
        with_data = free & set(np.flatnonzero(size_N))
        asked = free if {pick.client for pick in picks} - with_data else with_data  # some never ask who has no data
        assert len(picks) <= num
        assert "with replacement" in sampler.scheme or len(picks) in (min(num, len(asked)), min(num, len(free)))
        assert picks or not with_data
    assert picks == sampler.sample(generator(seed, "test"), num, everyone)


@every
def test_a_coordinator_never_asks_the_busy_or_the_unreachable(part: Part) -> None:
    machine = Coordinator(
        policy=Policy(lambda state, n: 5, lambda n: 99, overlaps_rounds=True),
        sampler=built(part),
        num_clients=len(SIZE_N),
        rounds=9,
        seed=3,
        sizes=lambda: SIZE_N,
    )
    state, commands = machine.step(CoordinatorState(), Begin(lambda client: client not in (2, 7)))
    assert isinstance(commands[0], Send)
    asked = {task.client for task in commands[0].tasks}
    assert not asked & {2, 7}
    state = CoordinatorState(attempt=1, in_flight={task.client: task for task in commands[0].tasks})
    state, commands = machine.step(state, Begin())
    again = {task.client for task in commands[0].tasks} if commands and isinstance(commands[0], Send) else set()
    assert not again & asked


def odds(part: Part) -> np.ndarray:
    """The stated probability of one draw among SIZE_N and SCORES."""
    if part.name == "weighted":
        return SIZE_N / SIZE_N.sum()
    if part.name == "importance":
        score_N = np.array([SCORES.get(client, 2.0) for client in range(len(SIZE_N))])
        explore = part.options.get("explore", 0.1)
        return explore / len(SIZE_N) + (1 - explore) * score_N / score_N.sum()
    return np.full(len(SIZE_N), 1 / len(SIZE_N))


@pytest.mark.parametrize("part", UNBIASED, ids=repr)
@pytest.mark.parametrize("free", [range(8), (0, 3, 4, 6)], ids=["all", "some"])
def test_draws_with_replacement_have_the_stated_odds_and_shares(part: Part, free: range | tuple[int, ...]) -> None:
    sampler, odds_N, times_N = built(part), odds(part), np.zeros(len(SIZE_N))
    for repeat in range(2000):
        picks = sampler.sample(generator(6, "test", repeat), 5, people(free=free.__contains__))
        count_N = {client: share * odds_N[client] * len(SIZE_N) for client, share in picks}
        assert all(abs(count - round(count)) < 1e-9 for count in count_N.values())
        assert round(sum(count_N.values())) == 5
        for client, count in count_N.items():
            times_N[client] += round(count)
    stated = odds_N[list(free)] / odds_N[list(free)].sum()
    assert chisquare(times_N[list(free)], stated * times_N.sum()).pvalue > 1e-3


@pytest.mark.parametrize("part", [Part("uniform"), Part("poisson"), Part("poisson", rate=0.3)], ids=repr)
@pytest.mark.parametrize("free", [range(8), (0, 3, 4, 6)], ids=["all", "some"])
def test_uniform_schemes_are_uniform(part: Part, free: range | tuple[int, ...]) -> None:
    times_N = times_picked(part, 3, 2000, free=free.__contains__)
    assert chisquare(times_N[list(free)]).pvalue > 1e-3
    rate = {"uniform": 3 / len(free), "poisson": part.options.get("rate", 3 / 8)}[part.name]
    assert abs(times_N.sum() - 2000 * rate * len(free)) <= 4 * np.sqrt(2000 * len(free) * rate * (1 - rate))


def test_poisson_clients_are_independent() -> None:
    """The size is binomial, and three clients come together as often as three coins show heads."""
    sampler, num = built(Part("poisson")), 3
    cohorts = [{p.client for p in sampler.sample(generator(8, "test", r), num, people())} for r in range(2000)]
    times_S = np.bincount([len(found) for found in cohorts], minlength=9)
    stated_S = 2000 * binom.pmf(np.arange(9), 8, 3 / 8)
    few = np.append(times_S[:6], times_S[6:].sum()), np.append(stated_S[:6], stated_S[6:].sum())
    assert chisquare(*few).pvalue > 1e-3
    assert times_S[0] > 0
    kinds = [4 * (0 in found) + 2 * (5 in found) + (7 in found) for found in cohorts]
    heads = np.array([bin(kind).count("1") for kind in range(8)])
    assert chisquare(np.bincount(kinds, minlength=8), 2000 * (3 / 8) ** heads * (5 / 8) ** (3 - heads)).pvalue > 1e-3


def test_weighted_draws_without_replacement_are_sequential() -> None:
    """The first three of 1, 2, 3 and 6 come in each order as often as drawing from what is left says."""
    weight_N, orders = np.array([1.0, 2.0, 3.0, 0.0, 6.0]), {}
    for repeat in range(4000):
        drawn = draw_weighted(generator(9, "test", repeat), 3, people(weight_N), weight_N, replacement=False)
        assert set(drawn.values()) == {1}
        orders[tuple(drawn)] = orders.get(tuple(drawn), 0) + 1

    def stated(order: tuple[int, ...]) -> float:
        left, chance = 12.0, 1.0
        for client in order:
            chance, left = chance * weight_N[client] / left, left - weight_N[client]
        return chance

    assert len(orders) == 24
    assert chisquare(list(orders.values()), [4000 * stated(order) for order in orders]).pvalue > 1e-3


@pytest.mark.parametrize("part", UNBIASED, ids=repr)
def test_shares_keep_the_mean_unbiased(part: Part) -> None:
    """Sums over the picks are m times the mean over all, whether updates weigh n_k or 1, within 4 standard errors."""
    sampler, value_N, num, repeats = built(part), np.array([3.0, -1, 4, 1, -5, 9, 2, -6]), 4, 2000
    weight_WN = np.stack([SIZE_N.astype(float), np.ones(len(SIZE_N))])
    sums_RW = np.zeros((repeats, 2))
    totals_RW = np.zeros((repeats, 2))
    for repeat in range(repeats):
        for client, share in sampler.sample(generator(10, "test", repeat), num, people()):
            totals_RW[repeat] += share * weight_WN[:, client]
            sums_RW[repeat] += share * weight_WN[:, client] * value_N[client]
    for found_RW, full_W in ((sums_RW, (weight_WN * value_N).mean(1)), (totals_RW, weight_WN.mean(1))):
        error_W = found_RW.std(0) / np.sqrt(repeats)
        assert (abs(found_RW.mean(0) - num * full_W) <= 4 * error_W + 1e-9).all()
    if part.name == "weighted":  # scheme I: with weights n_k each draw counts once, so every single mean is unbiased
        assert np.allclose(totals_RW[:, 0], num * SIZE_N.mean())


def test_importance_takes_scores_below_zero_as_zero_and_no_number_as_the_mean() -> None:
    scores = {0: -3.0, 1: 1.0, 2: 3.0, 3: float("nan")}
    for client, score in {0: 0.0, 1: 0.75, 2: 2.25, 3: 1.0, 4: 1.0}.items():
        alone = people(scores=scores, free=(client,).__contains__)
        [pick] = built(Part("importance")).sample(generator(0, "test"), 2, alone)
        assert pick == (client, pytest.approx(2 / (0.1 + 0.9 * score)))


def test_power_of_choice_takes_the_largest_losses_of_its_candidates() -> None:
    ask = built(Part("power_of_choice", candidates=8)).sample
    losses = {client: float(client) for client in range(8)}
    assert ask(generator(0, "test"), 3, people(scores=losses)) == [Pick(7), Pick(6), Pick(5)]
    del losses[2]
    assert ask(generator(0, "test"), 3, people(scores=losses)) == [Pick(2), Pick(7), Pick(6)]
    assert ask(generator(0, "test"), 2, people(scores=losses, free=(0, 1, 4).__contains__)) == [Pick(4), Pick(1)]


def test_power_of_choice_with_as_many_candidates_as_picks_goes_by_size() -> None:
    times_N = times_picked(Part("power_of_choice", candidates=1), 1, 2000)
    assert chisquare(times_N, 2000 * SIZE_N / SIZE_N.sum()).pvalue > 1e-3


def test_round_robin_chooses_all_clients_equally_often() -> None:
    assert set(times_picked(Part("round_robin"), 3, 8)) == {3}
    ask = built(Part("round_robin")).sample
    in_turn = ask(generator(0, "test"), 3, people(attempt=2, free=lambda client: client != 7))
    assert [pick.client for pick in in_turn] == [6, 0, 1]


@every
def test_a_million_clients_are_sampled_in_milliseconds(part: Part) -> None:
    size_N = np.random.default_rng(0).integers(1, 100, 10**6)
    options = {**part.options, "rate": 1e-4} if "rate" in part.options else part.options
    sampler = built(Part(part.name, **options))
    population = people(size_N, lambda client: client % 3 > 0, {client: 1.0 + client for client in range(1000)})
    seconds = []
    for attempt in range(5):
        started = time.process_time()
        picks = sampler.sample(generator(0, "test", attempt), 100, population)
        seconds.append(time.process_time() - started)
        assert 30 <= len(picks) <= 130
    assert min(seconds) < 0.05


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Part("poisson", rate=0.0), "poisson: rate must be in"),
        (Part("poisson", rate=1.5), "poisson: rate must be in"),
        (Part("importance", explore=0.0), "never be asked again"),
        (Part("importance", explore=1.1), r"in \(0, 1\]"),
        (Part("importance", by="size"), "'loss' or 'norm'"),
        (Part("power_of_choice", candidates=0), "at least 1"),
    ],
    ids=repr,
)
def test_impossible_options_are_refused(part: Part, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        built(part)


def test_fewer_candidates_than_picks_are_refused() -> None:
    with pytest.raises(PlanError, match="set it to at least 3"):
        dry_run(Plan(sampler={"name": "power_of_choice", "candidates": 2}, policy={"size": 3}))
