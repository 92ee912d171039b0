"""A site records its own tasks in a real federation, and sees from them what the server saw."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from network.federation import RUN, federation
from network.fork_server import ForkServer

from atoll import Dataset, Plan
from atoll.core.errors import AtollError, PlanError, RunError
from atoll.core.probe import Work
from atoll.probes.linear_leak import linear_leak
from atoll.redteam.image_judge import match
from atoll.redteam.run import red_team
from atoll.simulation.recorded import watch_recorded
from atoll.simulation.seat import Watched, samples_of, watch
from atoll.train.federation import build_federation

NUM = 3
PLAN = Plan(
    seed=5,
    rounds=3,
    partition={"name": "dirichlet", "num_clients": NUM, "alpha": 1.0, "samples_per_client": 3},
    model={"name": "mlp_2nn", "hidden": 256},
    local={"steps": 1, "batch_size": "all", "lr": 0.1},
)
LOSSY = {"uplink": [{"name": "top_k", "fraction": 0.2}], "downlink": ["delta", {"name": "quantise", "bits": 6}]}


def recorded(tmp: Path, processes: ForkServer, certs: Path, plan: Plan) -> Path:
    """Run a plan between processes, of which client 1 records; return where."""
    with federation(tmp, processes, certs, plan) as made:
        made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        for number in range(NUM):
            made.join(number, *(["--record", str(tmp / "record")] if number == 1 else []))
        made.wait(60)
        assert ("nothing is recorded" in (tmp / "c1.out").read_text()) == (plan.secagg is not None)
    return tmp / "record" / RUN


def at_the_site(plan: Plan) -> Plan:
    """The plan with the samples of client 1 as its data."""
    whole = build_federation(plan)
    data, indices = whole.dataset, whole.partition.indices(1)
    own = Dataset(
        name="own",
        train_x=np.asarray(data.train_x)[indices],
        train_y=data.train_y[indices],
        test_x=data.test_x,
        test_y=data.test_y,
        num_classes=data.num_classes,
        scale=data.scale,
    )
    return plan.replace({"data": own})


def seen_by_the_server(plan: Plan) -> dict[int, torch.Tensor]:
    """Return the update of client 1 from each version, as the server of a simulation sees it."""
    watched = watch(plan, plan.rounds)
    rows = zip(watched.sights, watched.truths, strict=True)
    return {
        sight.version: sight.rows.delta_D[place]
        for sight, truths in rows
        for place, truth in enumerate(truths)
        if truth.clients == (1,)
    }


def sharp(watched: Watched) -> float:
    """Return the share of the site's samples that a leak of the first layer shows, at best."""
    span, shares = watched.known.high - watched.known.low, []
    for guess, [truth] in zip(
        linear_leak().run(watched.known, watched.sights, Work(np.random.default_rng(0), lambda: False)),
        watched.truths,
        strict=True,
    ):
        assert guess.x is not None
        shares.append(match(guess.x, samples_of(watched, truth).x, span).share_sharp)
    return max(shares)


@pytest.mark.parametrize("changes", [{}, pytest.param(LOSSY, marks=pytest.mark.slow)], ids=["plain", "codecs"])
def test_a_site_records_what_the_server_sees_of_it(
    changes: dict[str, Any], tmp_path: Path, processes: ForkServer, certs: Path
) -> None:
    plan = PLAN.replace(changes)
    directory = recorded(tmp_path, processes, certs, plan)
    watched, server = watch_recorded(directory, at_the_site(plan)), seen_by_the_server(plan)
    assert [sight.version for sight in watched.sights] == list(server) == [0, 1, 2]
    for sight in watched.sights:
        assert torch.equal(sight.rows.delta_D[0], server[sight.version])
        assert sight.num_samples_R == (3,) and sight.num_steps_R == (1,) and sight.sender_R == (1,)
    assert torch.equal(watched.sights[0].after_M, watched.sights[1].model_M)
    assert changes or sharp(watched) > 0.2
    found = red_team(
        at_the_site(plan),
        probes=["linear_leak", "trap_weights"],
        recorded=lambda num: watch_recorded(directory, at_the_site(plan), elsewhere=num),
    )
    leak, trap = found.findings
    assert leak.figures and not found.changes and not found.poisoned
    assert "did not plant a model" in trap.why_not
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    with pytest.raises(PlanError, match="recorded with local"):
        watch_recorded(directory, at_the_site(plan).replace({"local": {"lr": 0.2}}))
    with pytest.raises(PlanError, match="parameters"):
        watch_recorded(directory, plan.replace({"data": {"name": "synthetic"}}))
    with pytest.raises(RunError, match=f"one of its runs: {RUN}"):
        watch_recorded(directory.parent, plan)
    newest = max(directory.iterdir())
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(RunError, match="cannot be read"):
        watch_recorded(directory, at_the_site(plan))


@pytest.mark.slow
def test_masked_updates_are_not_recorded(tmp_path: Path, processes: ForkServer, certs: Path) -> None:
    plan = PLAN.replace({"secagg": {}})
    with pytest.raises(AtollError, match="no recorded tasks: let a client record"):
        watch_recorded(recorded(tmp_path, processes, certs, plan), at_the_site(plan))
