"""The places where attacks sit: a bad client's data, its update, and all bad clients together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll import Dataset, Plan, run
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Broadcast, Task, Update
from atoll.core.parts import Part
from atoll.data.catalog.digits import digits
from atoll.engine.inline import inline
from atoll.train.build import build_job
from atoll.train.job import Job

BASE: dict[str, Any] = {"partition": {"num_clients": 10}, "rounds": 1, "engine": "inline", "local": {"lr": 0.1}}
BAD = (2, 5)


def update_of(job: Job, client: int, version: int = 0) -> Tensor:
    """What one client alone sends."""
    engine = inline(job)
    work = engine.train([Task(client, version, version)], {version: Broadcast(job.first_D, {})}, {})
    engine.close()
    return work.folded["delta"] / work.folded["weight"]


def with_attack(attack: Any, clients: tuple[int, ...] = BAD, **changes: Any) -> Plan:
    return Plan(**{**BASE, "attack": attack, "attackers": {"clients": clients}, **changes})


def test_sign_flip_turns_the_updates_of_attackers_and_no_others() -> None:
    honest, attacked = build_job(Plan(**BASE)), build_job(with_attack({"name": "sign_flip", "scale": 3.0}))
    for client in range(10):
        factor = -3 if client in BAD else 1
        assert torch.allclose(update_of(attacked, client), factor * update_of(honest, client), rtol=1e-5, atol=1e-8)


def flipped_digits() -> Dataset:
    true = digits()
    return Dataset(
        name="flipped",
        train_x=true.train_x,
        train_y=9 - true.train_y,
        test_x=true.test_x,
        test_y=true.test_y,
        num_classes=10,
        scale=true.scale,
    )


@pytest.mark.parametrize("engine", ["inline", "vectorised"])
def test_label_flip_trains_attackers_on_turned_labels_and_no_others(engine: str) -> None:
    honest, attacked = build_job(Plan(**BASE)), build_job(with_attack("label_flip"))
    flipped = build_job(Plan(**{**BASE, "data": flipped_digits}))
    for client in (0, 2, 5, 9):
        expected = flipped if client in BAD else honest
        assert torch.equal(update_of(attacked, client), update_of(expected, client))
    weighted = sum(
        update_of(flipped if client in BAD else honest, client) * honest.federation.num_samples(client)
        for client in range(10)
    )
    moved_D = run(with_attack("label_flip", engine=engine)).params_D - honest.first_D
    assert torch.allclose(moved_D, weighted / 1437, atol=1e-6)


def test_the_attack_starts_when_it_is_told_to() -> None:
    plan = Plan(**{**BASE, "rounds": 5})
    attackers = {"num": 4, "start_round": 3}
    attacked = Plan(**{**BASE, "rounds": 5, "attack": {"name": "sign_flip", "scale": 5.0}, "attackers": attackers})
    honest_rows, rows = run(plan).history, run(attacked).history
    losses = [[row["test"]["loss"] for row in history] for history in (honest_rows, rows)]
    assert losses[0][:3] == losses[1][:3]
    assert losses[1][3] > losses[0][3]
    job = build_job(attacked)
    bad = min(job.attackers)
    assert not job.attacks(bad, 2)
    assert job.attacks(bad, 3)


def spying(seen: list[tuple[Update, Tensor, Knowledge]]) -> Any:
    """An attack that looks at everything and answers with a vector of ones."""

    def spy() -> Attack:
        def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
            seen.append((updates, bad_C, known))
            return updates._replace(delta_D=torch.where(bad_C[:, None], 1.0, updates.delta_D))

        return Attack(collude=collude)

    return spy


@pytest.mark.parametrize("engine", ["inline", {"name": "vectorised", "stack": 3}, {"name": "processes", "workers": 2}])
def test_colluding_attackers_see_every_update_and_change_their_own(engine: Any) -> None:
    seen: list[tuple[Update, Tensor, Knowledge]] = []
    result = run(with_attack(spying(seen), engine=engine))
    honest = build_job(Plan(**BASE))
    (updates, bad_C, known), *more = seen
    assert not more  # once a round, wherever clients are trained
    assert torch.equal(known.params_D, honest.first_D)
    assert known.num_classes == 10
    assert updates.delta_D.shape == (10, 650)
    alone = {client: update_of(honest, client) for client in range(10)}
    rows = {}
    for row in range(10):  # the order of rows is the engine's business
        nearest = min(alone, key=lambda client: float((alone[client] - updates.delta_D[row]).norm()))
        assert torch.allclose(alone[nearest], updates.delta_D[row], atol=1e-5)
        rows[nearest] = row
    assert sorted(rows) == list(range(10))
    assert {client for client, row in rows.items() if bad_C[row]} == set(BAD)
    sizes = np.array([honest.federation.num_samples(client) for client in range(10)])
    assert np.array_equal(updates.weight[[rows[client] for client in range(10)]].numpy(), sizes)
    sent = torch.stack([torch.ones(650) if client in BAD else alone[client] for client in range(10)])
    expected_D = honest.first_D + (torch.from_numpy(sizes).float() @ sent) / sizes.sum()
    assert torch.allclose(result.params_D, expected_D, atol=1e-5)


def test_colluders_who_send_nan_are_rejected() -> None:
    def nan() -> Attack:
        def collude(updates: Update, bad_C: Tensor, known: Knowledge) -> Update:
            return updates._replace(delta_D=torch.where(bad_C[:, None], torch.nan, updates.delta_D))

        return Attack(collude=collude)

    result = run(with_attack(nan, rounds=3))
    assert [row["clients"] for row in result.history] == [8, 8, 8]
    assert [row["rejected"] for row in result.history] == [2, 4, 6]
    assert result.accuracy > 0.5


def test_the_median_resists_what_the_mean_does_not() -> None:
    plan: dict[str, Any] = {"rounds": 20, "local": {"lr": 0.5}, "engine": "vectorised"}
    attack = {"name": "sign_flip", "scale": 10.0}
    ends = {
        rule: run(with_attack(attack, clients=(1, 4, 7), aggregator=rule, **plan)).accuracy
        for rule in ("mean", "median")
    }
    honest = run(Plan(**{**BASE, **plan})).accuracy
    assert ends["mean"] < 0.3
    assert ends["median"] > 0.85
    assert honest > 0.9


def test_an_attack_of_ones_own_by_name() -> None:
    """As a plan file would name it."""
    plan = with_attack(Part(f"{__name__}:louder", factor=2.0))
    honest, attacked = build_job(Plan(**BASE)), build_job(plan)
    assert torch.allclose(update_of(attacked, 2), 2 * update_of(honest, 2))


def louder(factor: float) -> Attack:
    def update(honest: Update, known: Knowledge) -> Update:
        return honest._replace(delta_D=factor * honest.delta_D)

    return Attack(update=update)
