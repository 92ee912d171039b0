"""Tests of the server's own samples: under a guarantee they are not taken from clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atoll import Plan, run
from atoll.commit.guard import planned
from atoll.core.errors import PlanError
from atoll.core.messages import SERVER
from atoll.data.catalog.digits import digits
from atoll.data.public.held_out import held_out
from atoll.train.federation import build_federation

HELD_OUT = {"name": "held_out", "fraction": 0.1}
SAMPLE: dict[str, Any] = {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-4}
LOCAL: dict[str, Any] = {**SAMPLE, "name": "local"}
FROM_PUBLIC: dict[str, Any] = {"server": {"samples": 40, "source": "public"}, "public": HELD_OUT}


def plan_of(**changes: Any) -> Plan:
    base = {
        "partition": {"name": "iid", "num_clients": 10},
        "policy": {"size": 4},
        "local": {"steps": 1, "batch_size": 8},
        "rounds": 2,
        "engine": "inline",
        "server": {"samples": 40},
    }
    return Plan(**{**base, **changes})


@pytest.mark.parametrize("privacy", [SAMPLE, LOCAL])
@pytest.mark.parametrize(
    "use",
    [{"aggregator": "fltrust"}, {"detection": "loss"}, {"contribution": "leave_one_out"}],
    ids=lambda use: next(iter(use)),
)
def test_clients_samples_are_refused_and_public_ones_run(privacy: dict[str, Any], use: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r'server.source = "public"'):
        planned(plan_of(privacy=privacy, **use))
    result = run(plan_of(privacy=privacy, **use, **FROM_PUBLIC))
    assert result.history[-1]["round"] == 2
    assert not {"detection", "contribution", "train_loss", "samples"} & result.history[-1].keys()


def test_the_servers_public_samples_are_labelled_and_no_clients() -> None:
    federation = build_federation(plan_of(aggregator="fltrust", **FROM_PUBLIC))
    own = federation.train_indices(SERVER)
    rest, public = held_out(digits(), fraction=0.1, seed=0)
    held = {index for client in range(10) for index in federation.train_indices(client).tolist()}
    assert held == set(range(rest.num_train))
    assert len(own) == federation.num_samples(SERVER) == 40
    assert not held & set(own.tolist())
    known = {(x.tobytes(), int(y)) for x, y in zip(public.x, public.y, strict=True)}  # type: ignore[arg-type]
    x, y = federation.train_x[own].numpy(), federation.train_y[own].numpy()
    assert all((np.ascontiguousarray(each).tobytes(), int(label)) in known for each, label in zip(x, y, strict=True))
    assert torch.equal(federation.train_x[: rest.num_train], torch.from_numpy(rest.train_x))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"public": None}, "the plan has none: set public"),
        ({"public": "digits"}, "digits comes without labels: set public"),
        ({"public": {"name": "held_out", "fraction": 0.01}}, "only 14 public samples"),
        ({"server": {"source": "public"}}, "set server.samples"),
    ],
)
def test_impossible_public_samples_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        build_federation(plan_of(aggregator="fltrust", **{**FROM_PUBLIC, **changes}))


def test_plans_without_the_option_are_unchanged() -> None:
    assert "source" not in plan_of(aggregator="fltrust").to_dict()["server"]
