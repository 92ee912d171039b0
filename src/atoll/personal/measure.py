"""Measures of clients' final models on the samples that they hold out, in the process that ran them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atoll.api import Result
from atoll.commit.run_state import read_fields
from atoll.core.client_work import Sums
from atoll.core.errors import RunError
from atoll.held_out import measurable, of_those_that_took_part, own_sums, shared_sums
from atoll.report.figures import write_whole
from atoll.report.record import CHECKPOINT
from atoll.train.build import build_job
from atoll.train.job import Job

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


def measure(result: Result, most: int) -> None:
    """Measure at most so many clients of a run that has ended, and write the figures to its directory."""
    assert result.path is not None
    job = build_job(result.plan)
    fields = read_fields(result.path / CHECKPOINT)
    clients = of_those_that_took_part(measurable(job, most).clients, fields)
    shared = [_figure(job, sums) for sums in shared_sums(job, result.params_D, clients)] if job.shares_model else None
    own = shared
    if own is None or job.personal:
        own = [_figure(job, sums) for sums in own_sums(job, result.models, clients)]
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


def _figure(job: Job, sums: Sums) -> float | None:
    main, _ = job.measures.main_and_loss(sums)
    return main if math.isfinite(main) else None
