"""What IFCA is measured against: somebody who knows the groups of clients, and trains a model for each by FedAvg."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import nn

from atoll import Plan, run
from atoll.core.sampler import Pick, Population, Sampler
from atoll.personal.measure import FILE, measure, read_measured
from atoll.train.federation import build_federation, load_dataset


class Known(NamedTuple):
    """Groups that are known beside groups that are found."""

    knowing: float
    """Mean accuracy over clients of a model for each group, in [0, 1]."""
    finding: float
    """That of IFCA, on the same samples."""
    found: bool
    """Whether IFCA put two clients together exactly if they are of one group."""


def only(clients: list[int]) -> Sampler:
    """Choose these clients, in every round."""

    def sample(rng: np.random.Generator, num: int, population: Population) -> list[Pick]:
        return [Pick(client) for client in clients if population.free(client)][:num]

    return Sampler(sample=sample, scheme="the same clients in every round")


def groups_of(plan: Plan) -> list[list[int]]:
    """Return the clients of each group: those that give the same names to the classes."""
    federation, original_N = build_federation(plan), load_dataset(plan).train_y
    groups: dict[frozenset[tuple[int, int]], list[int]] = {}
    for client in range(federation.num_clients):
        held = federation.partition.indices(client)
        pairs = zip(original_N[held].tolist(), federation.dataset.train_y[held].tolist(), strict=True)
        groups.setdefault(frozenset(pairs), []).append(client)
    return list(groups.values())


def known(plan: Plan, seed: int, out: Path) -> Known:
    """Train one model a group, and one federation that must find the groups; runs are kept in `out`."""
    plan = plan.replace({"seed": seed, "evaluation.every": 0})
    groups, knowing = groups_of(plan), dict[int, float | None]()
    for number, clients in enumerate(groups):
        sampler = {"name": "known_groups:only", "clients": clients}
        mine = plan.replace({"algorithm": "fedavg", "policy": {"size": len(clients)}, "sampler": sampler})
        figures = _figures(mine, out / f"{seed}-group-{number}")
        knowing |= {client: figures[client] for client in clients}
    ifca = plan.replace({"algorithm": {"name": "ifca", "clusters": len(groups)}})
    finding = _figures(ifca, out / f"{seed}-ifca")
    models = run(ifca, out=out / f"{seed}-ifca", resume=True).models
    keys = {client: _key(models[client]) for client in finding}
    together = [len({keys[client] for client in clients}) == 1 for clients in groups]
    return Known(_mean(knowing), _mean(finding), all(together) and len(set(keys.values())) == len(groups))


def _figures(plan: Plan, out: Path) -> dict[int, float | None]:
    if not (out / FILE).exists():
        measure(run(plan, out=out, resume=out.exists()), plan.evaluation.max_clients)
    measured = read_measured(out)
    return dict(zip(measured.clients, measured.own, strict=True))


def _key(model: nn.Module) -> bytes:
    return b"".join(values.detach().numpy().tobytes() for values in model.parameters())


def _mean(figures: dict[int, float | None]) -> float:
    return statistics.fmean(float("nan") if value is None else value for value in figures.values())
