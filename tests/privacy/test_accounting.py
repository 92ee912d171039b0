"""What is spent: published values, through plans, and what must hold between accountants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import Plan, run
from atoll.commit.guard import planned
from atoll.commit.privacy_plan import calibrated_plan, outlook
from atoll.core.errors import PlanError
from atoll.core.privacy import Exposure
from atoll.privacy.accounting import calibrate_sigma, quick_bounds, spent
from atoll.privacy.groups import most_exposed
from atoll.privacy.mechanisms.central import central
from atoll.privacy.mechanisms.distributed import concentrated
from atoll.privacy.mechanisms.ftrl import ftrl
from atoll.privacy.mechanisms.local import local
from atoll.privacy.mechanisms.sample import sample


def cost(plan: Plan, accountant: Any = None) -> float:
    return spent(*planned(plan), accountant).epsilon


def client_plan(**changes: Any) -> Plan:
    return Plan(
        **{
            "data": {"name": "helpers:quadratics", "num_clients": 3383},
            "partition": "natural",
            "sampler": "poisson",
            "policy": {"size": 120},
            "rounds": 100,
            "privacy": {"name": "central", "clip": 1.0, "sigma": 1.2, "delta": 1e-5},
            **changes,
        }
    )


def test_published_values_of_clients() -> None:
    plan = client_plan()
    assert planned(plan)[1].rate == pytest.approx(120 / 3383)
    assert round(cost(plan, "rdp"), 2) == 1.99
    assert round(cost(plan, "pld"), 2) == 1.71
    assert cost(plan) == cost(plan, "pld")


@pytest.mark.parametrize(
    ("epochs", "sigma", "by_rdp", "by_pld"),
    [(15, 1.3, 0.92, 0.83), pytest.param(60, 1.1, 2.50, 2.30, marks=pytest.mark.slow)],
)
def test_published_values_of_samples(epochs: int, sigma: float, by_rdp: float, by_pld: float) -> None:
    """MNIST with batches of 240 in one client, as Opacus' example has it (1.16 and 2.91 by an older conversion)."""
    plan = Plan(
        data="mnist",
        partition={"name": "iid", "num_clients": 1},
        model="mlp_2nn",
        local={"epochs": 1, "batch_size": 240},
        rounds=epochs,
        privacy={"name": "sample", "clip": 1.0, "sigma": sigma, "delta": 1e-5},
    )
    exposure = planned(plan)[1]
    assert (exposure.sample_rate, exposure.steps, exposure.attempts) == (0.004, 250, epochs)
    assert round(cost(plan, "rdp"), 2) == by_rdp
    assert round(cost(plan, "pld"), 2) == by_pld


@settings(max_examples=10, deadline=None)
@given(
    sigma=st.floats(0.9, 4.0),
    rate=st.sampled_from([0.004, 0.03, 0.2, 1.0]),
    attempts=st.integers(1, 300),
    delta=st.sampled_from([1e-3, 1e-5, 1e-7]),
)
def test_loss_distributions_are_never_above_renyi(sigma: float, rate: float, attempts: int, delta: float) -> None:
    mechanism = central(clip=1.0, sigma=sigma, delta=delta)
    exposure = Exposure("poisson", rate, attempts, 1.0, 1, 1000)
    by_pld, by_rdp = (spent(mechanism, exposure, kind).epsilon for kind in ("pld", "rdp"))
    assert 0 <= by_pld <= by_rdp
    assert by_pld <= spent(mechanism, exposure._replace(attempts=attempts + 1)).epsilon


def test_coming_to_an_attempt_one_by_one_or_at_once_costs_the_same() -> None:
    mechanism = central(clip=1.0, sigma=1.0, delta=1e-5)
    exposures = [Exposure("poisson", 0.05, attempts, 1.0, 1, 1000) for attempts in range(1, 71)]
    one_by_one = [spent(mechanism, exposure).epsilon for exposure in exposures]
    assert one_by_one == sorted(one_by_one)
    assert spent(mechanism, exposures[40]).epsilon == one_by_one[40]


def test_the_noise_on_the_grid_costs_what_the_gaussian_does() -> None:
    """On a grid of only 64 steps to the clip the discrete Gaussian is no different; Atoll's has 2^24."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    interval = {"value_discretization_interval": 1e-4}
    exact = pld.from_gaussian_mechanism(1.2, sampling_prob=0.05, **interval)
    whole = pld.from_discrete_gaussian_mechanism(1.2 * 64, sensitivity=64, sampling_prob=0.05, **interval)
    two = [each.self_compose(4).get_epsilon_for_delta(1e-5) for each in (exact, whole)]
    assert two[1] == pytest.approx(two[0], rel=1e-3)


def test_a_tree_costs_its_depth() -> None:
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    mechanism = ftrl(clip=1.0, sigma=4.0, delta=1e-5)
    exposure = Exposure("in turn", 0.1, 25, 1.0, 1, 100)
    assert exposure.attempts_per_pass == 10
    nodes = 4 + 4 + 3  # of two trees of ten rounds, and of one of five
    by_hand = RdpAccountant().compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(4.0), nodes)).get_epsilon(1e-5)
    found = spent(mechanism, exposure)
    assert found.epsilon == pytest.approx(by_hand)
    assert found.accountant == "rdp"


def test_clients_that_protect_themselves_pay_for_each_time_that_they_took_part() -> None:
    mechanism = local(clip=1.0, sigma=4.0, delta=1e-5)
    in_turn = spent(mechanism, Exposure("in turn", 0.3, 7, 1.0, 1, 10)).epsilon
    drawn = spent(mechanism, Exposure("fixed-size without replacement", 0.3, 7, 1.0, 1, 10)).epsilon
    three = spent(mechanism, Exposure("fixed-size without replacement", 0.3, 3, 1.0, 1, 10)).epsilon
    assert in_turn == three  # 3 of 10 at a time: nobody twice in three attempts
    assert drawn > in_turn


def test_coarse_shares_cost_more_than_the_gaussian() -> None:
    assert concentrated(1.0, 10, 0, 10) > 10 / 10**0.5 + 1e-3
    assert concentrated(30.0, 10, 0, 10) == 10 / (30 * 10**0.5)


def test_calibration_finds_the_noise_for_an_epsilon() -> None:
    exposure = Exposure("poisson", 0.05, 50, 1.0, 1, 1000)
    sigma = calibrate_sigma(lambda noise: central(clip=1.0, sigma=noise, delta=1e-5), exposure, 2.0)
    found = spent(central(clip=1.0, sigma=sigma, delta=1e-5), exposure).epsilon
    assert 1.99 < found <= 2.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampler": "uniform"}, 'set sampler = "poisson"'),
        ({"sampler": "round_robin"}, 'privacy = "ftrl"'),
        ({"sampler": {"name": "importance"}}, 'sampler = "poisson"'),
        ({"sampler": {"name": "uniform", "replacement": True}}, 'set sampler = "poisson"'),
        ({"aggregator": "median"}, "leave it out"),
        ({"policy": {"size": 120, "min_reports": 5}}, "min_reports"),
        ({"algorithm": "qffl"}, "not protected"),
        ({"algorithm": "feddf", "public": {"name": "held_out", "fraction": 0.1}}, "looks at each update"),
        ({"detection": "distance"}, "leave it out"),
        ({"evaluation": {"clients_every": 1}}, "not charged"),
        ({"stop": {"bytes": 10**9}}, "not charged"),
        ({"stop": {"samples": 10**9}}, "not charged"),
        ({"attack": "alie", "attackers": {"num": 3}}, "the attack looks at each update"),
    ],
)
def test_what_cannot_be_private_is_refused_with_the_way_out(changes: dict[str, Any], says: str) -> None:
    plan = Plan(
        **{
            "partition": {"name": "iid", "num_clients": 200},
            "sampler": "poisson",
            "policy": {"size": 120},
            "privacy": {"name": "central", "clip": 1.0, "sigma": 1.2, "delta": 1e-5},
            **changes,
        }
    )
    with pytest.raises(PlanError, match=says.replace("(", r"\(")):
        planned(plan)


@pytest.mark.parametrize(
    ("privacy", "changes", "says"),
    [
        ({"name": "ftrl"}, {"sampler": "poisson"}, "round_robin"),
        ({"name": "ftrl"}, {"sampler": "round_robin", "devices": "fleet"}, "leave devices out"),
        ({"name": "distributed"}, {"sampler": "poisson"}, "round_robin"),
        ({"name": "distributed", "dropouts": 120}, {}, "lower privacy.dropouts"),
        ({"name": "distributed", "bits": 4}, {}, "raise privacy.bits"),
        ({"name": "central", "sigma": 0.0}, {"sampler": "poisson"}, "sigma must be"),
        ({"name": "central", "delta": 1.0}, {"sampler": "poisson"}, "delta must be a probability"),
        ({"name": "central", "epsilon": -1.0}, {"sampler": "poisson"}, "epsilon must be"),
        ({"name": "central", "quantile": 0.5, "per_layer": True}, {"sampler": "poisson"}, "leave out per_layer"),
        ({"name": "central", "quantile": 0.5, "bit_sigma": 0.1}, {"sampler": "poisson"}, "bit_sigma must be"),
        (
            {"name": "central", "quantile": 0.5},
            {"sampler": "poisson", "policy": {"size": 2}},
            "would use the whole privacy budget",
        ),
        ({"name": "local"}, {"policy": {"name": "buffered", "size": 5, "concurrency": 20}}, 'policy = "cohort"'),
        ({"name": "local"}, {"sampler": "weighted"}, "how many samples they have"),
        ({"name": "local"}, {"policy": {"size": 120, "over_selection": 1.2}}, "over_selection"),
    ],
)
def test_mechanisms_refuse_settings_that_do_not_fit(
    privacy: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    plan = Plan(
        **{
            "partition": {"name": "iid", "num_clients": 200},
            "policy": {"size": 120},
            "privacy": {"clip": 1.0, "sigma": 1.2, "delta": 1e-5, **privacy},
            **changes,
        }
    )
    with pytest.raises(PlanError, match=says):
        planned(plan)


def sample_plan(sizes: list[int], **privacy: Any) -> Plan:
    return Plan(
        data={"name": "privacy.watching:ragged", "sizes": sizes},
        partition="natural",
        local={"epochs": 1, "batch_size": 10},
        rounds=10,
        privacy={"name": "sample", "clip": 1.0, "sigma": 1.2, "delta": 1e-5, **privacy},
    )


def test_each_client_is_accounted_for_by_its_own_rate_and_steps() -> None:
    """Not by the rate of the smallest with the steps of the largest, whom nobody is like."""
    mechanism, exposure = planned(sample_plan([20, 35, 60, 400]))
    alone = [cost(sample_plan([size])) for size in (20, 35, 60, 400)]
    found = spent(mechanism, exposure)
    assert found.epsilon == pytest.approx(max(alone), rel=1e-12)
    assert found.largest is not None
    assert found.largest == (0.5, 2, 0)
    nobody = exposure._replace(sample_rate=0.5, steps=40, groups=())
    assert spent(mechanism, nobody).epsilon > 3 * found.epsilon
    assert [spent(mechanism, exposure, kind).epsilon >= found.epsilon for kind in ("pld", "rdp")] == [True, True]


def test_a_thousand_sizes_make_few_groups_that_hide_nobody() -> None:
    rng = np.random.default_rng(3)
    for low, high in ((11, 3000), (10_000, 11_000), (2000, 30_000)):
        size_C = rng.integers(low, high, 1000)
        rate_C, steps_C = 10 / size_C, -(-size_C // 10)
        groups = most_exposed(rate_C, steps_C)
        assert len(groups) <= 24
        for rate, steps in zip(rate_C, steps_C, strict=True):
            assert any(one.rate >= rate and one.steps >= steps for one in groups)
        worst = (rate_C * np.sqrt(steps_C)).max()
        assert max(one.rate * math.sqrt(one.steps) for one in groups) <= 1.011 * worst


def test_epsilon_of_ragged_clients_never_falls_and_is_the_largest() -> None:
    """Whoever spends most after some rounds, and whichever groups are spared a closer look."""
    rng = np.random.default_rng(4)
    size_C = rng.integers(15, 400, 200)
    groups = most_exposed(10 / size_C, -(-size_C // 10))
    exposure = Exposure("all", 1.0, 1, groups[0].rate, groups[0].steps, groups=groups)
    mechanism = sample(clip=1.0, sigma=2.0, delta=1e-6)
    found = [spent(mechanism, exposure._replace(attempts=number)).epsilon for number in range(1, 8)]
    assert found == sorted(found)
    whole = exposure._replace(attempts=7)
    assert found[-1] == max(spent(mechanism, one).epsilon for one in whole.per_group())


def test_quick_bounds_are_never_below_the_accountants() -> None:
    exposures = [Exposure("all", 1.0, 7, rate, steps) for rate, steps in ((0.5, 2), (0.01, 300), (1.0, 5), (1e-3, 9))]
    for sigma, delta in ((0.7, 1e-5), (3.0, 1e-9)):
        mechanism = sample(clip=1.0, sigma=sigma, delta=delta)
        bounds = quick_bounds(sigma, exposures, delta)
        for bound, exposure in zip(bounds, exposures, strict=True):
            assert bound >= spent(mechanism, exposure, "rdp").epsilon * (1 - 1e-9)


def test_rows_and_outlook_name_the_client_that_spends_most() -> None:
    plan = sample_plan([40, 20, 300]).replace({"rounds": 2, "engine": "inline"})
    result = run(plan)
    assert result.history[-1]["privacy"] | {"epsilon": 0} == {
        "epsilon": 0,
        "delta": 1e-5,
        "unit": "sample",
        "relation": "zero-out",
        "accountant": "pld",
        "client": 1,
    }
    assert result.history[-1]["privacy"]["epsilon"] == pytest.approx(cost(plan), abs=2e-6)
    shown = outlook(plan)
    assert shown.largest == (0.5, 2, 1)
    assert "an empty one in its place" in shown.statement["neighbours"]


def test_zero_out_costs_what_adding_or_removing_does() -> None:
    """The library is asked for the relation that is stated, and gives the numbers of the usual one."""
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    mechanism, exposure = planned(sample_plan([50, 50]))
    event = mechanism.event(exposure)
    relations = dp.NeighboringRelation
    for accountant, kind in ((RdpAccountant, "rdp"), (PLDAccountant, "pld")):
        both = [
            accountant(neighboring_relation=relation).compose(event).get_epsilon(1e-5)
            for relation in (relations.ADD_OR_REMOVE_ONE, relations.REPLACE_SPECIAL)
        ]
        assert both[0] == both[1]
        assert spent(mechanism, exposure, kind).epsilon == pytest.approx(both[1], rel=2e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["central", "ftrl", "local", "distributed", "sample"])
@pytest.mark.parametrize(("delta", "says"), [(0.5, "got 0.5"), (0.006, "set it below"), (1e-301, "got 1e-301")])
def test_a_delta_that_means_nothing_is_refused(name: str, delta: float, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        planned(hiding(name, delta=delta))


def hiding(name: str, **privacy: Any) -> Plan:
    """A plan with 200 clients, and more samples than that."""
    samplers = {"central": "poisson", "ftrl": "round_robin", "distributed": "round_robin"}
    return Plan(
        partition={"name": "iid", "num_clients": 200},
        policy={"size": 40},
        sampler=samplers.get(name, "uniform"),
        rounds=3,
        privacy={"name": name, "clip": 1.0, "sigma": 1.0, "delta": 1e-5, **privacy},
    )


@pytest.mark.parametrize("name", ["central", "ftrl", "local", "distributed", "sample"])
def test_extreme_noise_and_delta_are_answered(name: str) -> None:
    """With a finite number, by Renyi divergences where loss distributions would give infinity, or never end."""
    base, tiny = cost(hiding(name)), cost(hiding(name, delta=1e-300))
    assert base < tiny < math.inf
    if name != "distributed":  # whose grid is too coarse for it, which it says
        quiet = spent(*planned(hiding(name, sigma=1e-3)))
        assert 1e5 < quiet.epsilon < 1e9
        assert outlook(hiding(name, sigma=1e-3)).epsilons["rdp"][-1] >= quiet.epsilon


def test_calibration_says_when_no_noise_is_enough() -> None:
    with pytest.raises(PlanError, match="no sigma up to 1e"):
        calibrated_plan(hiding("local", delta=1e-300), 1e-9)
