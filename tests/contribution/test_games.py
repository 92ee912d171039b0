"""The axioms of contribution rules, on games with random values."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from members import every

from atoll.core.contribution import Coalition, Game
from atoll.core.errors import PlanError
from atoll.core.parts import Part, examples

SHAPLEYS = ("shapley", "tmc_shapley", "gtg_shapley")
NEVER_CUT: dict[str, dict[str, Any]] = {
    "shapley": {},
    "tmc_shapley": {"truncate": 0.0},
    "gtg_shapley": {"truncate": 0.0, "round_truncate": 0.0},
}


def game_of(values: list[float]) -> Game:
    """Return the game in which the value of a coalition is the entry at its bits."""
    return Game(len(values).bit_length() - 1, lambda some: values[sum(1 << client for client in some)])


def games(most: int = 5) -> st.SearchStrategy[list[float]]:
    worth = st.floats(-10, 10, allow_subnormal=False)
    return st.integers(1, most).flatmap(lambda num: st.lists(worth, min_size=2**num, max_size=2**num))


def shared(name: str, game: Game, **options: Any) -> np.ndarray:
    options = {**examples("contribution", name)[0], **options}
    found: np.ndarray = Part(name, **options).build("contribution").values(game, np.random.default_rng(0))
    return found


def reference(game: Game) -> np.ndarray:
    """Return the Shapley value as the mean over all permutations of marginal gains."""
    sums, orders = np.zeros(game.num_clients), list(permutations(range(game.num_clients)))
    for order in orders:
        for place, client in enumerate(order):
            sums[client] += game.value(frozenset(order[: place + 1])) - game.value(frozenset(order[:place]))
    return sums / len(orders)


@given(games())
def test_exact_shapley_is_the_mean_over_all_permutations(values: list[float]) -> None:
    game = game_of(values)
    np.testing.assert_allclose(shared("shapley", game), reference(game), atol=1e-9)


@pytest.mark.parametrize("name", SHAPLEYS)
@given(values=games())
def test_values_add_up_to_the_gain(name: str, values: list[float]) -> None:
    gain = values[-1] - values[0]
    assert shared(name, game_of(values), **NEVER_CUT[name]).sum() == pytest.approx(gain, abs=1e-8)


@given(values=games(), data=st.data())
def test_symmetric_clients_get_equal_values(values: list[float], data: st.DataObject) -> None:
    game = game_of(values)
    one, other = (data.draw(st.integers(0, game.num_clients - 1)) for _ in range(2))
    swap = {one: other, other: one}

    def symmetric(some: Coalition) -> float:
        return game.value(some) + game.value(frozenset(swap.get(client, client) for client in some))

    found = shared("shapley", Game(game.num_clients, symmetric))
    assert found[one] == pytest.approx(found[other], abs=1e-9)


@pytest.mark.parametrize("name", every("contribution"))
@given(values=games(), data=st.data())
def test_a_null_player_gets_zero(name: str, values: list[float], data: st.DataObject) -> None:
    game = game_of(values)
    idle = data.draw(st.integers(0, game.num_clients - 1))
    found = shared(name, Game(game.num_clients, lambda some: game.value(some - {idle})))
    assert found[idle] == pytest.approx(0.0, abs=1e-9)


@given(st.integers(1, 4).flatmap(lambda num: st.tuples(*[games(num).filter(lambda v, n=num: len(v) == 2**n)] * 2)))
def test_values_of_a_sum_of_games_add_up(pair: tuple[list[float], list[float]]) -> None:
    left, right = map(np.array, pair)
    both = shared("shapley", game_of((left + right).tolist()))
    apart = shared("shapley", game_of(left.tolist())) + shared("shapley", game_of(right.tolist()))
    np.testing.assert_allclose(both, apart, atol=1e-9)


def test_leave_one_out_by_hand() -> None:
    """Use two clients that can replace each other, and one that cannot be replaced."""
    worth = {0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 5.0, 5: 6.0, 6: 6.0, 7: 6.0}
    assert shared("leave_one_out", game_of(list(worth.values()))).tolist() == [0.0, 0.0, 5.0]


@pytest.mark.parametrize("name", ["tmc_shapley", "gtg_shapley"])
def test_many_permutations_come_close_to_the_exact_value(name: str) -> None:
    values = np.random.default_rng(3).normal(size=2**6).tolist()
    exact = shared("shapley", game_of(values))
    many = {"tolerance": 1e-9, "max_permutations": 20_000}
    found = shared(name, game_of(values), **NEVER_CUT[name], **many)
    assert np.abs(found - exact).sum() < 0.1 * np.abs(exact).sum()  # the games' noise over the root of 20,000
    few = shared(name, game_of(values), **NEVER_CUT[name], tolerance=1e-9, max_permutations=30)
    assert np.abs(few - exact).sum() > np.abs(found - exact).sum()


class Counting:
    """A game that counts every evaluation, repeated ones too."""

    def __init__(self, values: list[float]) -> None:
        self.asked: Counter[Coalition] = Counter()
        inner = game_of(values)

        def value(some: Coalition) -> float:
            self.asked[some] += 1
            return inner.value(some)

        self.game = Game(inner.num_clients, value)


def test_every_client_comes_first_equally_often() -> None:
    counting = Counting(np.random.default_rng(1).normal(size=2**5).tolist())
    shared("gtg_shapley", counting.game, truncate=0.0, max_permutations=42, tolerance=1e-9)
    firsts = [counting.asked[frozenset({client})] for client in range(5)]
    assert firsts == [9] * 5  # 42 orders, rounded up to whole sweeps of five


def test_a_round_that_gains_little_is_skipped() -> None:
    values = np.random.default_rng(1).normal(size=2**5)
    values[-1] = values[0] + 0.0009
    counting = Counting(values.tolist())
    assert not shared("gtg_shapley", counting.game).any()
    assert len(counting.asked) == 2
    assert shared("gtg_shapley", counting.game, round_truncate=0.0008, truncate=0.0).any()


@pytest.mark.parametrize("name", ["tmc_shapley", "gtg_shapley"])
def test_a_permutation_is_cut_where_no_gain_remains(name: str) -> None:
    """The first client brings the whole gain: no coalition of two is evaluated, and all values are equal."""
    counting = Counting([0.0] + [1.0] * (2**6 - 1))
    found = shared(name, counting.game, max_permutations=6000, tolerance=1e-9, window=6000)
    assert {len(some) for some in counting.asked} == {0, 1, 6}
    assert found == pytest.approx([1 / 6] * 6, abs=0.02)
    if name == "gtg_shapley":
        assert found == pytest.approx([1 / 6] * 6, abs=1e-12)


@pytest.mark.parametrize(("name", "orders"), [("tmc_shapley", 101), ("gtg_shapley", 30)])
def test_sampling_stops_when_values_have_converged(name: str, orders: int) -> None:
    """In an additive game all permutations agree: sampling stops as soon as the window is full."""
    weights = np.array([1.0, 2.0, 3.0])
    counting = Counting([float(sum(w for bit, w in enumerate(weights) if n >> bit & 1)) for n in range(8)])
    assert shared(name, counting.game) == pytest.approx(weights)
    assert counting.asked[frozenset({0})] + counting.asked[frozenset({1})] + counting.asked[frozenset({2})] == orders


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("shapley", {"utility": "f1"}, "shapley: utility must be 'loss' or 'accuracy'"),
        ("tmc_shapley", {"truncate": -1.0}, r"truncate must be 0 or more, got .*; 0 is never"),
        ("tmc_shapley", {"tolerance": 0.0}, "tolerance must be above 0"),
        ("gtg_shapley", {"window": 0}, "window must be at least 1"),
        ("gtg_shapley", {"max_permutations": 0}, "max_permutations must be at least 1"),
        ("gtg_shapley", {"round_truncate": -0.1}, "round_truncate must be 0"),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Part(name, **options).build("contribution")
