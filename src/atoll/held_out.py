"""Clients' models of an ended run, measured on the samples that clients set apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from atoll.core.client_work import Samples, Sums
from atoll.core.seeds import derive, generator
from atoll.train.evaluate import SLICE
from atoll.train.exchange import UPLINK
from atoll.train.job import Job
from atoll.train.seeded import seeded

Kind = Literal["held-out", "validation"]
"""Which samples: those of `evaluation.holdout`, or those of `evaluation.validation`."""


class Measurable(NamedTuple):
    """The clients that may be measured, and the numbers of others by reason."""

    clients: list[int]
    others: dict[str, int]


def measurable(job: Job, most: int, kind: Kind = "held-out") -> Measurable:
    """Return the clients that set samples apart and do not attack, or as many as a plan allows, by seed."""
    federation = job.federation
    share = federation.holdout if kind == "held-out" else federation.validation
    everyone = range(federation.num_clients)
    honest = [client for client in everyone if client not in job.attackers and client not in federation.added]
    able = [client for client in honest if int(share * federation.partition.size(client))]
    chosen = able
    if len(able) > most:
        picked = generator(job.seed, "evaluated clients").choice(len(able), size=most, replace=False)
        chosen = [able[place] for place in sorted(picked.tolist())]
    others = {
        "attackers": len(everyone) - len(honest),
        f"without a {kind} sample": len(honest) - len(able),
        "beyond evaluation.max_clients": len(able) - len(chosen),
    }
    return Measurable(chosen, {reason: num for reason, num in others.items() if num})


def of_those_that_took_part(clients: Sequence[int], fields: Mapping[str, Any]) -> list[int]:
    """Return the clients that remember something, by the fields of a checkpoint; all if nobody does."""
    memories: list[tuple[int, list[str]]] = fields["clients"]
    remembered = {client for client, names in memories if any(not name.startswith(UPLINK) for name in names)}
    return [client for client in clients if client in remembered] if remembered else list(clients)


def shared_sums(job: Job, params_D: Tensor, clients: Sequence[int], kind: Kind = "held-out") -> Iterator[Sums]:
    """Measure the shared model at each client as runs do, also where batch-norm statistics stay with the clients."""
    worker = job.work.open(job)
    for client in clients:
        yield job.measures.merge([worker.evaluate(params_D, {}, each) for each in _slices(job, client, kind)])


def own_sums(
    job: Job, models: Mapping[int, nn.Module], clients: Sequence[int], kind: Kind = "held-out"
) -> Iterator[Sums]:
    """Measure the model that each client keeps."""
    for client in clients:
        model, parts = models[client], list[Sums]()
        for each in _slices(job, client, kind):
            x, y = each.load()
            with torch.inference_mode(), seeded(derive(job.seed, "evaluation")):
                outputs = model(job.inputs(x))
                parts.append(job.measures.add(outputs, y, job.loss(outputs, y)))
        yield job.measures.merge(parts)


def _slices(job: Job, client: int, kind: Kind) -> list[Samples]:
    federation = job.federation
    if kind == "held-out":
        return federation.evaluation_slices(client, SLICE)
    return [federation.validation_samples(client)]
