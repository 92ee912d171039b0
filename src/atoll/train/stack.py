"""The local loop for many clients at once. Shapes: S steps, G clients, D parameters, B samples a batch.

Clients' vectors are stacked (G, D) and one mapped step moves them all. The step is recorded once as a flat list of
tensor operations (no compiler needed), tidied, and its updates are fused into the products that make the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from atoll.core.algorithm import Batch, send_delta
from atoll.core.messages import KEPT, STATISTICS, Broadcast, State, Task, Update
from atoll.core.seeds import derive
from atoll.train.batches import Stacked, client_batches, round_up, stacked_batches
from atoll.train.fuse import hoist, tidy
from atoll.train.job import Job
from atoll.train.loop import knowledge
from atoll.train.one_step import Fixed, OneStep, client_dims, local_task
from atoll.train.private import noise_of
from atoll.train.trace import record

Step = Callable[..., Any]

GATHERED = 1 << 20
"""How many numbers are gathered at once: enough to be quick, few enough to stay in the cache."""


class StackedTrained(NamedTuple):
    """What came of several clients' tasks, stacked."""

    update: Update
    states: State
    loss_G: Tensor


class StackedTrainer:
    """Trains up to `size` clients at once; recorded steps are kept for each shape that occurs.

    Fewer clients are padded to the whole, half, quarter or eighth of `size`, so that few steps are recorded.
    """

    def __init__(self, job: Job, *, size: int, compile: bool = False) -> None:
        self.job, self.size, self.compile = job, size, compile
        self._steps: dict[tuple[object, ...], tuple[Step, Step]] = {}

    def train(
        self,
        tasks: list[Task],
        sent: list[Broadcast],
        states: list[State],
        first_losses: list[float],
        drawn: list[list[np.ndarray]] | None = None,
    ) -> StackedTrained:
        """Do several tasks; idle copies of the first fill up their stack. `drawn` are other batches than the usual."""
        job, num = self.job, len(tasks)
        size = self._padded(num)
        idle = size - num
        padded = tasks + tasks[:1] * idle
        batches = stacked_batches(drawn or [client_batches(job, task) for task in tasks], self._width, size)
        fixed = fixed_of(
            job, padded, sent + sent[:1] * idle, states + states[:1] * idle, first_losses + first_losses[:1] * idle
        )
        moving = fixed.state if job.algorithm.local_memory is not None else {}
        fixed = fixed._replace(state={}) if moving else fixed
        start_GD = fixed.sent.params_D.expand(size, -1)
        if job.algorithm.start is not None:
            start_GD = vmap(job.algorithm.start, in_dims=(client_dims(fixed).sent, 0))(fixed.sent, fixed.state)
        params_GD = start_GD.clone()
        kept_GK = params_GD[:, :0]
        if job.spec.kept:
            kept_GK = torch.stack([state.get(KEPT, job.first_kept_K) for state in states + states[:1] * idle])
        leaves, num_shared = self._leaves(params_GD, kept_GK), len(job.spec.trainable)
        flat = job.algorithm.local_grad is not None
        moved, shared = ([params_GD, *leaves[num_shared:]], 1) if flat else (leaves, num_shared)
        parts = [moved] if job.algorithm.moves is None else [moved[:shared], moved[shared:]]
        memory = [job.optimizer.init(part) for part in parts]
        losses_SG = self._run(padded, batches, params_GD, leaves, memory, moving, fixed, sent)
        live_SG = torch.from_numpy(batches.live_SG).to(job.device)
        loss_G = (losses_SG * live_SG).sum(0) / live_SG.sum(0).clamp(min=1)
        fixed = fixed._replace(state={**fixed.state, **moving})
        if job.algorithm.start is None:  # in place: a stack of large models is large
            update, after = finished(job, params_GD.sub_(start_GD), fixed, params_GD)
        else:
            update, after = finished(job, params_GD - start_GD, fixed, params_GD)
        keep = slice(0, num)
        aux = {k: v[keep] for k, v in update.aux.items()}
        if job.spec.num_statistics:  # no step that can be stacked changes them
            aux[STATISTICS] = params_GD.new_zeros(num, job.spec.num_statistics)
        states_G = {**after, KEPT: kept_GK} if job.spec.kept else after
        return StackedTrained(
            update=Update(update.delta_D[keep], update.weight[keep], aux),
            states={name: rows[keep] for name, rows in states_G.items()},
            loss_G=loss_G[keep],
        )

    def _run(
        self,
        tasks: list[Task],
        batches: Stacked,
        params_GD: Tensor,
        leaves: list[Tensor],
        memory: list[list[Tensor]],
        moving: State,
        fixed: Fixed,
        sent: list[Broadcast],
    ) -> Tensor:
        job, federation = self.job, self.job.federation
        base_G = torch.tensor([derive(job.seed, "dropout", t.attempt, t.client) >> 2 for t in tasks]).to(job.device)
        index_SGB, weight_SGB = torch.from_numpy(batches.index_SGB), torch.from_numpy(batches.weight_SGB)
        weight_SGB = weight_SGB.to(job.device, job.spec.dtype)
        live_SG = torch.from_numpy(batches.live_SG).to(job.device, job.spec.dtype)
        losses_SG = torch.empty(live_SG.shape, dtype=job.spec.dtype, device=job.device)
        attack = job.attack.data if job.attack is not None else None
        bad = [g for g, task in enumerate(tasks) if attack and job.attacks(task.client, task.version)]
        numbers = torch.arange(1, len(index_SGB) + 1, dtype=job.spec.dtype, device=job.device).unbind()
        seeds = (base_G + torch.arange(len(index_SGB), device=job.device)[:, None]).unbind()
        weights, lives = weight_SGB.unbind(), live_SG.unbind()
        lasting = tree_leaves((params_GD, leaves, memory, moving, fixed))
        widths = self._widths(batches)
        ready: dict[int, tuple[Step, list[Tensor]]] = {}
        chunk = max(1, GATHERED // max(1, index_SGB[0].numel() * math.prod(federation.dataset.input_shape)))
        with torch.no_grad():
            for start in range(0, len(index_SGB), chunk):
                index = index_SGB[start : start + chunk]
                each_x = self._inputs(index).unbind()
                each_y = federation.targets(index).unbind()
                for s, (x, y) in enumerate(zip(each_x, each_y, strict=True), start):
                    for g in bad:
                        assert attack is not None
                        x[g], y[g] = attack(x[g], y[g], knowledge(job, tasks[g], sent[g].params_D, s))
                    noise = [] if job.private is None else [self._noise(tasks, s, batches.live_SG[s])]
                    width = widths[s]
                    batch = Batch(x[:, :width], y[:, :width], weights[s][:, :width])
                    fresh = (batch, seeds[s], lives[s], numbers[s], noise)
                    if width not in ready:
                        once, step = self._step_for(fresh, params_GD, leaves, memory, moving, fixed)
                        ready[width] = step, [*lasting, *once(*tree_leaves(fixed))]
                    step, given = ready[width]
                    losses_SG[s] = step(*batch, *fresh[1:4], *noise, *given)[0]
        return losses_SG

    def _widths(self, batches: Stacked) -> list[int]:
        """How much of its batches a step takes: all, but for a client alone whose private batches differ in size."""
        steps, size, width = batches.weight_SGB.shape
        if self.job.private is None or size > 1 or self.compile:
            return [width] * steps
        return [self._width(int(longest)) for longest in (batches.weight_SGB[:, 0] > 0).sum(1)]

    def _noise(self, tasks: list[Task], step: int, live_G: np.ndarray) -> Tensor:
        """The noise of a step of every client that takes it (G, T)."""
        drawn = [noise_of(self.job, task, step) if live else None for task, live in zip(tasks, live_G, strict=True)]
        none = torch.zeros_like(next(each for each in drawn if each is not None))
        rows = [none if each is None else each for each in drawn]
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def _inputs(self, index: Tensor) -> Tensor:
        """The features of the samples at an index of any shape, as the model wants them."""
        x = self.job.federation.features(self.job.federation.take(index))
        return x.to(self.job.spec.dtype) if x.dtype.is_floating_point else x

    def _step_for(
        self,
        fresh: tuple[Any, ...],
        params_GD: Tensor,
        leaves: list[Tensor],
        memory: list[list[Tensor]],
        moving: State,
        fixed: Fixed,
    ) -> tuple[Step, Step]:
        """The recorded step for arguments of these shapes, and what is to be computed once before the first.

        Recording runs the step once, on copies of what it changes.
        """
        batch: Batch = fresh[0]
        key = (batch.x.shape, batch.y.shape, fixed.sent.params_D.dim())
        if key not in self._steps:
            copy_GD, num_shared = params_GD.clone(), len(self.job.spec.trainable)
            shared = self.job.spec.without_buffers.views(copy_GD).values()
            copies = [*shared, *(leaf.clone() for leaf in leaves[num_shared:])]
            memory, moving = tree_map(torch.clone, (memory, moving))
            args = (*fresh, copy_GD, copies, memory, moving, fixed)
            recording = record(OneStep(self.job, len(params_GD)).take, args)
            tidy(recording.graph)
            once = recording._replace(graph=hoist(recording.graph, len(tree_leaves(fixed)))).function()
            step = recording.function()
            self._steps[key] = (once, torch.compile(step, dynamic=False) if self.compile else step)
        return self._steps[key]

    def _padded(self, num: int) -> int:
        """How many rows a stack of so many clients has; it is always whole where compiling another takes long."""
        sizes = [self.size] if self.compile else [-(-self.size // parts) for parts in (8, 4, 2, 1)]
        return next(size for size in sizes if size >= num)

    def _leaves(self, params_GD: Tensor, kept_GK: Tensor) -> list[Tensor]:
        """Return the trained tensors of all clients as views: those that they share, then those that they keep."""
        spec = self.job.spec
        return [*spec.without_buffers.views(params_GD).values(), *spec.kept_views(kept_GK).values()]

    def _width(self, longest: int) -> int:
        """How wide batches of at most this size are: few distinct widths, so that few steps are recorded."""
        if self.job.private is not None:
            return round_up(longest, 8)
        return round_up(longest, 4) if self.job.local.batch_size == "all" else self.job.batch_size


def finished(job: Job, delta_GD: Tensor, fixed: Fixed, end_GD: Tensor) -> tuple[Update, State]:
    """Return what an algorithm sends of each client, and what it remembers; `end_GD` is looked at if it has a start."""
    algorithm = job.algorithm
    if algorithm.finish is send_delta:
        return Update(delta_GD, fixed.num_samples_G, {}), {}

    def finish(delta_D: Tensor, each: Fixed, end: list[Tensor]) -> tuple[Update, State]:
        task = local_task(each, unavailable, unavailable, unavailable, each.num_steps_G)
        return algorithm.finish(delta_D, task._replace(end_D=end[0]) if end else task)

    end = [] if algorithm.start is None else [end_GD]
    return vmap(finish, in_dims=(0, client_dims(fixed), 0))(delta_GD, fixed, end)


def fixed_of(
    job: Job, tasks: list[Task], sent: list[Broadcast], states: list[State], first_losses: list[float]
) -> Fixed:
    """Return what does not change from step to step of several clients."""
    dtype = job.spec.dtype
    one_version = all(each is sent[0] for each in sent)
    shared = (
        sent[0]
        if one_version
        else Broadcast(
            torch.stack([each.params_D for each in sent]),
            {name: torch.stack([each.aux[name] for each in sent]) for name in sent[0].aux},
        )
    )
    num_steps = [float(job.num_steps(task.client, task.work)) for task in tasks]
    num_samples = [float(job.federation.num_samples(task.client)) for task in tasks]
    return Fixed(
        shared,
        {name: torch.stack([state[name] for state in states]) for name in states[0] if name != KEPT},
        torch.tensor([job.lr_of(task.version) for task in tasks], dtype=dtype, device=job.device),
        torch.tensor(num_steps, dtype=dtype, device=job.device),
        torch.tensor(num_samples, dtype=dtype, device=job.device),
        torch.tensor(first_losses, dtype=dtype, device=job.device),
    )


def unavailable(*args: Any) -> Any:
    """Stand in for what a slot may not call outside of a step."""
    raise RuntimeError("outputs, features and grad_at are for training, not for `finish`")
