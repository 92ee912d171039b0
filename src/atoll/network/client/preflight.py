"""Preflight: try an app against the plans of runs, tell the server whether it is ready, and train for nobody.

Nothing that was trained leaves the process: the server hears whether the client is ready, or the first reason why not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from atoll.core.errors import AtollError, RunError
from atoll.core.messages import Task
from atoll.network.client.agreeing import agree
from atoll.network.client.app import ClientApp
from atoll.network.client.connection import Connection
from atoll.network.client.home import Home, RunHome
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol import endpoints
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.messages import Readiness, RunInfo, Welcome
from atoll.privacy.noise import fresh_secret
from atoll.report.reading import human_bytes, human_seconds
from atoll.train.job import Job
from atoll.train.resident import own_peak_memory
from atoll.train.trainer import Trainer

MAX_REASON = 1000
"""Characters of a reason that are told."""


def preflight(
    make_app: Callable[[], ClientApp],
    home: Home,
    connection: Connection,
    floors: Floors | None,
    names: Collection[str],
    say: Callable[[str], None],
    *,
    keys_known: bool,
) -> bool:
    """Check the runs of these names, or all that have not ended; return whether the client is ready for each."""
    welcome = connection.welcome()
    runs = [info for info in connection.ask(endpoints.RUNS, None).runs if not names or info.run in names]
    missing = set(names) - {info.run for info in runs}
    if missing or not runs:
        what = f"there is no run {', '.join(sorted(missing))}" if missing else "there is no run"
        raise RunError(f"{what} that has not ended: ask the operator")
    torch.set_num_threads(1)  # as when it works
    ready = True
    for info in runs:
        say(f"{info.run}:")
        told = _checked(make_app, home, floors, info, welcome, lambda text: say(f"  {text}"), keys_known=keys_known)
        connection.ask(endpoints.READINESS, told, run=info.run)
        say(f"  {'ready' if told.ready else 'NOT READY'}; the operator was told")
        ready = ready and told.ready
    return ready


def _checked(
    make_app: Callable[[], ClientApp],
    home: Home,
    floors: Floors | None,
    info: RunInfo,
    welcome: Welcome,
    say: Callable[[str], None],
    *,
    keys_known: bool,
) -> Readiness:
    """Try one run, a line a check; stop at the first that fails."""

    def passed(check: str, detail: str) -> None:
        say(f"{check:<12} ok      {detail}")

    check = "data"
    try:
        app = make_app()
        passed(check, _described(app))
        if not _has_columns_only(info):  # which are compared with the plan's parties below
            check = "shapes"
            _check_shapes(app, info)
            passed(check, f"samples {app.dataset().input_shape}, {app.dataset().num_outputs} outputs, as the server's")
        check = "plan, floors"
        with tempfile.TemporaryDirectory() as folder:
            trial = RunHome(Path(folder), home.run_budget(info.run))
            own = app.floors if floors is None else floors
            agreed = agree(
                app, own, info, welcome.number, trial, fresh_secret(), name=welcome.name, keys_known=keys_known
            )
            passed(check, f"{agreed.job.spec.num_params:,} parameters, {info.plan.get('rounds', '?')} rounds")
            check = "one step"
            seconds = _step_seconds(agreed)
            steps = agreed.job.num_steps(agreed.number)
            passed(
                check, f"{human_seconds(seconds)}; a round of {steps:,} takes about {human_seconds(steps * seconds)}"
            )
            if not _has_columns_only(info):  # nobody but the server has all of the model
                check = "evaluation"
                passed(check, _evaluated(agreed))
        passed("memory", f"{human_bytes(own_peak_memory())} at most")
    except AtollError as error:
        say(f"{check:<12} FAILED  {error}")
        return Readiness(ready=False, reason=f"{check}: {error}"[:MAX_REASON])
    return Readiness(ready=True, seconds=steps * seconds)


def _described(app: ClientApp) -> str:
    """Describe samples that were checked when the app was made: no value is missing, and targets fit the problem."""
    data = app.dataset()
    held = f", {len(np.unique(data.train_y))} of {data.num_classes} classes" if data.has_classes else ""
    return f"{data.num_train:,} samples of {data.train_x.dtype}, none missing; {data.problem}{held}"


def _has_columns_only(info: RunInfo) -> bool:
    """Return whether clients of a run hold columns of samples."""
    split = info.plan.get("split")
    return isinstance(split, dict) and bool(split.get("parties"))


def _check_shapes(app: ClientApp, info: RunInfo) -> None:
    """Refuse samples of another shape, or targets of other outputs, than the server's data have."""
    data = app.dataset()
    if info.input_shape not in (None, data.input_shape):
        raise WorkRefused(f"a sample has shape {data.input_shape}, one of the server's data {info.input_shape}")
    if info.num_outputs not in (None, data.num_outputs):
        raise WorkRefused(
            f"the targets ask for {data.num_outputs} outputs, those of the server's data for {info.num_outputs}: "
            "check num_classes"
        )


def _step_seconds(agreed: AgreedRun) -> float:
    """Take one step of training twice, of which the second is timed; whatever it makes is dropped."""
    trainer, task = (
        Trainer(of_one_step(agreed.job), place=agreed.place),
        Task(client=agreed.number, version=0, attempt=0),
    )
    for _ in range(2):
        began = time.perf_counter()
        trained = trainer.train_one(task, agreed.layout, {})
        seconds = time.perf_counter() - began
    if not bool(trained.update.delta_D.isfinite().all()):
        raise WorkRefused("one step gives NaN or Inf: lower local.lr, or check this client's data")
    return seconds


def of_one_step(job: Job) -> Job:
    """Return a job whose tasks take one step, of whichever of its models a client trains."""
    local = replace(job.local, steps=1, epochs=None)
    return replace(job, local=local, architectures=tuple(map(of_one_step, job.architectures)))


def _evaluated(agreed: AgreedRun) -> str:
    """Measure the model that a run starts from on this client's evaluation samples."""
    began, job = time.perf_counter(), agreed.job
    sums = job.measures.condense(agreed.trainer.measure_client(job.first_D, agreed.number, {}))
    figures = {name: value for name, value in job.measures.finish_sums(sums).items() if not name.endswith("_error")}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
    return f"{int(sums['count']):,} samples in {human_seconds(time.perf_counter() - began)}, before training {shown}"
