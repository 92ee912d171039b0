"""The server's seat for a recorded federation: what a real server saw of the site that recorded its own tasks.

Shapes: M values of a model.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, stack
from atoll.core.plan import Plan
from atoll.core.probe import Sight
from atoll.data.index import drawn
from atoll.simulation.seat import Truth, Watched, known_of, must_be_attackable
from atoll.train.build import build_job
from atoll.train.federation import Federation, load_dataset
from atoll.train.job import Job
from atoll.train.recording import RecordedTask, read_tasks, settings_of


def watch_recorded(directory: Path, plan: Plan, *, elsewhere: int = 2000) -> Watched:
    """Return what a server saw of the site that recorded this directory by `atoll join --record`.

    `plan` is the one of the run, with the site's own samples as its data: they are the truth that a judge compares
    with, and its test samples are what an attacker could gather. A sight holds one row, since a site knows of no other
    client's update; `after_M` is the next model that the site was sent, or, for the last, what its update alone makes.
    """
    tasks = read_tasks(directory)
    _must_be_of(plan, tasks[0], directory)
    dataset, number = load_dataset(plan), tasks[0].task.client
    indices, num_clients = np.arange(dataset.num_train), max(tasks[0].num_clients, number + 1)
    partition = drawn(num_clients, dataset.num_train, lambda client: indices)
    ask = plan.evaluation
    federation = Federation(dataset, partition, seed=plan.seed, holdout=ask.holdout, validation=ask.validation or 0.0)
    job = build_job(plan, federation)
    must_be_attackable(job)
    if tasks[0].update.delta_D.shape != (job.spec.num_trainable,):
        raise PlanError(
            f"{directory} has updates of {tasks[0].update.delta_D.numel():,} parameters, the plan's model on these "
            f"samples has {job.spec.num_trainable:,}: give the samples that the site trained on"
        )
    later = [*(each.sent for each in tasks[1:]), None]
    sights = [_sight(job, each, sent) for each, sent in zip(tasks, later, strict=True)]
    truths = [[Truth((each.task.client,), each.task.attempt)] for each in tasks]
    return Watched(known_of(job, elsewhere), sights, truths, job, sights[-1].after_M)


def _must_be_of(plan: Plan, recorded: RecordedTask, directory: Path) -> None:
    given, true = json.loads(settings_of(plan)), json.loads(recorded.settings)
    for name in true:
        if given[name] != true[name]:
            raise PlanError(
                f"{directory} was recorded with {name} = {true[name]}, the plan says {given[name]}: give the run's plan"
            )


def _sight(job: Job, recorded: RecordedTask, later: Broadcast | None) -> Sight:
    task, model_M = recorded.task, job.model_of(recorded.sent)
    if later is None:
        after_M = model_M.clone()
        job.trainable(after_M).add_(recorded.update.delta_D)
    else:
        after_M = job.model_of(later)
    return Sight(
        version=task.version,
        model_M=model_M,
        extras=dict(recorded.sent.aux),
        rows=stack([recorded.update]),
        num_clients_R=(1,),
        num_samples_R=(job.federation.num_samples(task.client),),
        after_M=after_M,
        sender_R=(task.client,),
        num_steps_R=(job.num_steps(task.client, task.work),),
    )
