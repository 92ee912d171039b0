"""Measures of clients' final models on the samples that they hold out, in the process that ran them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from atoll.api import Result
from atoll.commit.run_state import read_fields
from atoll.core.client_work import Samples, Sums
from atoll.core.errors import RunError
from atoll.core.seeds import derive, generator
from atoll.report.figures import write_whole
from atoll.report.record import CHECKPOINT
from atoll.train.build import build_job
from atoll.train.evaluate import SLICE
from atoll.train.exchange import UPLINK
from atoll.train.job import Job
from atoll.train.seeded import seeded

FILE = "held_out.json"
"""Where a run directory holds what was measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run came to: the main figure of each client, and what it cost."""

    clients: tuple[int, ...]
    """Those that took part, where clients remember anything, and otherwise all that can be measured."""
    own: tuple[float | None, ...]
    """The main figure of the model that each client uses; None where it is not defined or not finite."""
    shared: tuple[float | None, ...] | None
    """That of the model that all share on the same samples, if there is a whole one."""
    rounds: int
    reason: str
    samples: int
    """Samples that clients trained on, every pass counted."""
    bytes_up: int
    seconds: float


class Measurable(NamedTuple):
    """The clients that may be measured, and the numbers of others by reason."""

    clients: list[int]
    others: dict[str, int]


def measurable(job: Job, most: int) -> Measurable:
    """Return the clients that hold out samples and do not attack, or as many as a plan allows, by seed."""
    federation = job.federation
    everyone = range(federation.num_clients)
    honest = [client for client in everyone if client not in job.attackers and client not in federation.added]
    able = [client for client in honest if int(federation.holdout * federation.partition.size(client))]
    chosen = able
    if len(able) > most:
        picked = generator(job.seed, "evaluated clients").choice(len(able), size=most, replace=False)
        chosen = [able[place] for place in sorted(picked.tolist())]
    others = {
        "attackers": len(everyone) - len(honest),
        "without a held-out sample": len(honest) - len(able),
        "beyond evaluation.max_clients": len(able) - len(chosen),
    }
    return Measurable(chosen, {reason: num for reason, num in others.items() if num})


def measure(result: Result, most: int) -> None:
    """Measure at most so many clients of a run that has ended, and write the figures to its directory."""
    assert result.path is not None
    job = build_job(result.plan)
    fields = read_fields(result.path / CHECKPOINT)
    memories: list[tuple[int, list[str]]] = fields["clients"]
    remembered = [client for client, names in memories if any(not name.startswith(UPLINK) for name in names)]
    clients = measurable(job, most).clients
    if remembered:
        clients = sorted(set(clients) & set(remembered))
    shared = _shared_figures(job, result.params_D, clients) if job.shares_model else None
    own = shared
    if own is None or job.personal:
        own = [_figure(job, client, _evaluator(job, result.models[client])) for client in clients]
    measured = Measured(
        clients=tuple(clients),
        own=tuple(own),
        shared=None if shared is None else tuple(shared),
        rounds=result.history[-1]["round"] if result.history else 0,
        reason=result.reason,
        samples=fields["samples"],
        bytes_up=fields["bytes_up"],
        seconds=fields["seconds"],
    )
    write_whole(result.path / FILE, msgspec.json.encode(measured))


def read_measured(path: Path) -> Measured:
    """Return what was measured of the run in this directory."""
    try:
        return msgspec.json.decode((path / FILE).read_bytes(), type=Measured)
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(f"{path / FILE} cannot be read ({error}): remove {path} and start again") from error


def _figure(job: Job, client: int, evaluate: Callable[[Samples], Sums]) -> float | None:
    """Return the main figure of a model on the samples that a client holds out."""
    parts = [evaluate(samples) for samples in job.federation.evaluation_slices(client, SLICE)]
    main, _ = job.measures.main_and_loss(job.measures.merge(parts))
    return main if math.isfinite(main) else None


def _evaluator(job: Job, model: nn.Module) -> Callable[[Samples], Sums]:
    """Return what measures a client's own model."""

    def evaluate(samples: Samples) -> Sums:
        x, y = samples.load()
        with torch.inference_mode(), seeded(derive(job.seed, "evaluation")):
            outputs = model(job.inputs(x))
            return job.measures.add(outputs, y, job.loss(outputs, y))

    return evaluate


def _shared_figures(job: Job, params_D: Tensor, clients: list[int]) -> list[float | None]:
    """Measure the shared model as runs do, also where batch-norm statistics stay with the clients."""
    worker = job.work.open(job)
    return [_figure(job, client, lambda samples: worker.evaluate(params_D, {}, samples)) for client in clients]
