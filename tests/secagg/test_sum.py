"""Test that the sum is exact for every drop-out pattern within the threshold, and never opened otherwise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secagg.harness import STEPS, Federation, exact_sum, federation, run, vectors

from atoll.core.errors import PlanError
from atoll.secagg import server as s
from atoll.secagg.aborts import Abort, Reason
from atoll.secagg.graph import parameters


def steps(mode: str) -> list[str]:
    return [step for step in STEPS if step != "consent" or mode == "active"]


def expected(fed: Federation, lost: dict[int, str]) -> list[int] | None:
    """Return the clients in the sum, or None if too few are left, from the rule for complete graphs alone."""
    alive = {
        step: [n for n in fed.clients if n not in lost or STEPS.index(lost[n]) > STEPS.index(step)]
        for step in steps(fed.config.mode)
    }
    try:
        threshold = parameters(
            len(alive["advert"]), fed.config.dropouts, fed.config.colluding, fed.config.mode
        ).threshold
    except PlanError:
        return None
    return alive["masked"] if all(len(alive[step]) >= threshold for step in alive) else None


def check(fed: Federation, lost: dict[int, str]) -> bool:
    """Compare one session with the rule, and return whether there was a sum."""
    inputs, survivors = vectors(fed), expected(fed, lost)
    if survivors is None:
        with pytest.raises(Abort) as abort:
            run(fed, inputs, lost)
        assert abort.value.reason in (Reason.TOO_FEW, Reason.SMALL_COHORT, Reason.INCONSISTENT)
        assert not getattr(abort.value.state, "result", b"")
        assert not getattr(abort.value.state, "total", b"")
        return False
    state = run(fed, inputs, lost)
    assert list(fed.server.survivors(state)) == survivors
    assert (fed.server.result(state) == exact_sum(fed, inputs, tuple(survivors))).all()
    return True


@pytest.mark.parametrize("mode", ["curious", "active"])
@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_every_number_of_drop_outs_at_every_step(num: int, mode: str) -> None:
    """Every multiset of steps at which clients are lost, dealt out to the clients by chance."""
    outcomes = set()
    for pattern in itertools.combinations_with_replacement([None, *steps(mode)], num):
        fed = federation(num, mode=mode, length=3)
        dealt = np.random.default_rng(0).permutation(np.array(pattern, object))
        outcomes.add(check(fed, {n: step for n, step in zip(fed.clients, dealt, strict=True) if step}))
    assert outcomes == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["curious", "active"])
@pytest.mark.parametrize("num", [2, 3, 4, 5])
def test_every_drop_out_pattern_of_small_cohorts(num: int, mode: str) -> None:
    for pattern in itertools.product([None, *steps(mode)], repeat=num):
        fed = federation(num, mode=mode, length=3)
        check(fed, {n: step for n, step in zip(fed.clients, pattern, strict=True) if step})


@settings(max_examples=40, deadline=None)
@given(
    data=st.data(), num=st.integers(6, 20), mode=st.sampled_from(["curious", "active"]), bits=st.sampled_from([32, 64])
)
def test_drop_outs_of_larger_cohorts(data: st.DataObject, num: int, mode: str, bits: int) -> None:
    fed = federation(num, mode=mode, bits=bits, dropouts=0.2, colluding=0.1)
    lost = data.draw(st.dictionaries(st.sampled_from(list(fed.clients)), st.sampled_from(STEPS), max_size=num // 2))
    if mode == "curious":
        lost = {n: step for n, step in lost.items() if step != "consent"}
    check(fed, lost)


@pytest.mark.parametrize("mode", ["curious", "active"])
def test_sparse_graph(mode: str) -> None:
    fed = federation(100, mode=mode, dropouts=0.1, colluding=0.05)
    params = parameters(100, 0.1, 0.05, mode)
    assert not params.complete
    numbers = list(fed.clients)
    lost = {numbers[3]: "shares", numbers[40]: "masked", numbers[41]: "masked", numbers[70]: "reveal"}
    inputs = vectors(fed)
    state = run(fed, inputs, lost)
    survivors = tuple(n for n in numbers if lost.get(n) not in ("shares", "masked"))
    assert fed.server.survivors(state) == survivors
    assert (fed.server.result(state) == exact_sum(fed, inputs, survivors)).all()


def test_sparse_graph_with_too_many_drop_outs_opens_nothing() -> None:
    fed = federation(100, mode="curious", dropouts=0.1, colluding=0.05)
    lost = dict.fromkeys(list(fed.clients)[:11], "masked")
    with pytest.raises(Abort) as abort:
        run(fed, vectors(fed), lost)
    assert abort.value.reason is Reason.TOO_FEW
    assert abort.value.state == s.ServerState(s.Phase.ABORTED, abort.value.state.session, fed.invite)


def test_sparse_graph_that_lost_too_many_holders_opens_nothing() -> None:
    fed = federation(100, mode="curious", dropouts=0.1, colluding=0.05)
    lost = dict.fromkeys(list(fed.clients)[:90], "reveal")
    with pytest.raises(Abort) as abort:
        run(fed, vectors(fed), lost)
    assert abort.value.reason is Reason.TOO_FEW
    assert not abort.value.state.reveals
    assert not abort.value.state.total


def test_large_random_drop_outs_within_the_planned_share() -> None:
    fed = federation(130, mode="curious", dropouts=0.3, colluding=0.05, length=17)
    numbers = np.random.default_rng(0).permutation(list(fed.clients)).tolist()
    lost = {n: STEPS[1 + i % 2] for i, n in enumerate(numbers[:39])}
    inputs = vectors(fed)
    state = run(fed, inputs, lost)
    assert len(fed.server.survivors(state)) == 91
    assert (fed.server.result(state) == exact_sum(fed, inputs, fed.server.survivors(state))).all()
