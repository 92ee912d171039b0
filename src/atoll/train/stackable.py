"""Whether clients of a job may be trained by a recorded step: tried before training, on the job's own model and data.

A recorded step repeats what was done once. A model that draws, counts or decides in its forward pass would be trained
wrongly by it, and one that mixes the samples of a batch would see padding. Both are trained one by one instead. What is
decided depends on the plan alone: the same first parameters, the same clients, one thread.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from atoll.core.errors import AtollError
from atoll.core.messages import Task
from atoll.train.attributes import as_before
from atoll.train.batches import client_batches
from atoll.train.devices import generator_state
from atoll.train.job import Job
from atoll.train.kernels.trainer import KernelTrainer
from atoll.train.loop import Workspace, train_client
from atoll.train.stack import StackedTrainer
from atoll.train.trace import Unrecordable

COMPARED = 3
"""So many clients of a stack are also trained by the plain loop."""
LONGEST = 256
"""Samples that are tried at once, so that trying takes no longer for clients that take all of theirs in a step."""
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far their mean losses may differ, as a share: rounding differs much less, another computation mostly more."""


def why_not(job: Job) -> str | None:
    """Say why no step of this job can be recorded, or None if it may be tried."""
    if not job.work.stackable:
        return "clients that keep models of their own cannot be stacked"
    for module in job.model.modules():
        name = type(module).__name__
        tracks = isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
        if tracks or isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name} mixes the samples of a batch, so padding would change it"
        if isinstance(module, nn.RNNBase):
            return f"{name} has no stacked kernel"
    if job.private is not None and not job.layers:
        return "private steps of this model make gradients sample by sample"
    if job.private is not None and job.spec.num_held:
        return "private steps read the buffers that the server moves one client at a time"
    if job.algorithm.mask is not None:
        return "clients train different parts of the model"
    return None


def why_not_tried(job: Job, stacked: StackedTrainer | KernelTrainer, space: Workspace) -> str | None:
    """Train a few clients for two steps by the plain loop and stacked; say why the second way is not the same.

    The second batch is half as long, so that padding would show. Nothing of the trial is kept but the recorded step.
    """
    rehearsal = replace(job, local=replace(job.local, epochs=None, steps=2), attack=None)
    tasks = [Task(client, 0, 0) for client in range(min(stacked.size, job.federation.num_clients))]
    params_D = job.trainable(job.first_D)
    sent = job.broadcast(job.first_D, job.algorithm.broadcast(params_D, job.algorithm.init_server(params_D)))
    states = [job.algorithm.init_client(params_D) for _ in tasks]
    batches = [_shortened(rehearsal, client_batches(rehearsal, task)) for task in tasks]
    stacked.job = rehearsal
    with _one_thread(), as_before(job.model) as attributes:
        try:
            plain = [
                train_client(rehearsal, space, task, sent, states[i], math.nan, batches[i]).loss
                for i, task in enumerate(tasks[:COMPARED])
            ]
            if changed := _changed_buffers(job, space):
                return f"the model changes its buffer {changed[0]!r}"
            drawn = _generators(job.device)
            found = stacked.train(tasks, [sent] * len(tasks), states, [math.nan] * len(tasks), batches)
            if drawn != _generators(job.device):
                return "the model draws random numbers"
            if attributes.changed():
                return f"the model changes its attribute {attributes.changed()[0]!r}"
        except (AtollError, torch.OutOfMemoryError):
            raise
        except Unrecordable as error:
            return str(error)
        except Exception as error:  # whatever cannot be mapped over clients is left to the plain loop
            return " ".join(f"{type(error).__name__}: {error}".split())[:300]
        finally:
            stacked.job = job
    together, apart = found.loss_G[: len(plain)].cpu().double(), torch.tensor(plain, dtype=torch.float64)
    if not torch.allclose(together, apart, rtol=CLOSE[job.spec.dtype], atol=CLOSE[job.spec.dtype], equal_nan=True):
        return "recorded steps give other losses: the model mixes samples, or keeps something from step to step"
    return None


def _shortened(job: Job, batches: list[np.ndarray]) -> list[np.ndarray]:
    """The first batch, cut off if it is long, and the second half as long; private ones differ in length anyway."""
    if job.private is not None:
        return batches
    first, second = (batch[:LONGEST] for batch in batches)
    return [first, second[: -(-len(second) // 2)]]


def _changed_buffers(job: Job, space: Workspace) -> list[str]:
    """The buffers that are no longer what they were when training began."""
    first = job.spec.views(job.first_D)
    kept = {slot.name: first[slot.name] for slot in job.spec.buffers} | space.own_buffers
    steady = {name: value for name, value in kept.items() if name not in job.dropout_seeds}
    return [name for name, value in steady.items() if not torch.equal(space.model.get_buffer(name), value)]


def _generators(device: torch.device) -> tuple[object, ...]:
    """The state of every generator that code may draw from without bringing its own."""
    numpys = [each.tolist() if isinstance(each, np.ndarray) else each for each in np.random.get_state()]
    there = generator_state(device)
    return random.getstate(), numpys, torch.get_rng_state().tolist(), None if there is None else there.tolist()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
