"""The local loop for many clients at once. Shapes: S steps, G clients, D parameters, B samples a batch.

Clients' vectors are stacked (G, D) and one mapped step moves them all. The step is recorded once as a flat list of
tensor operations (no compiler needed), tidied, and its updates are fused into the products that make the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_leaves

from atoll.core.algorithm import Batch, LocalTask, Params
from atoll.core.messages import KEPT, STATISTICS, Broadcast, State, Task, Update
from atoll.core.seeds import derive
from atoll.train.batches import Stacked, client_batches, round_up, stacked_batches
from atoll.train.fuse import hoist, tidy
from atoll.train.job import Job
from atoll.train.loop import features, knowledge, mean_loss
from atoll.train.private import noise_of, stacked_gradients, unprotected
from atoll.train.trace import record

Step = Callable[..., Any]

GATHERED = 1 << 20
"""How many numbers are gathered at once: enough to be quick, few enough to stay in the cache."""


class StackedTrained(NamedTuple):
    """What came of several clients' tasks, stacked."""

    update: Update
    states: State
    loss_G: Tensor


class Fixed(NamedTuple):
    """What does not change from step to step."""

    sent: Broadcast
    """Shared (D,), or one a client (G, D) when clients train from different versions."""
    state: State
    lr_G: Tensor
    num_steps_G: Tensor
    num_samples_G: Tensor
    first_loss_G: Tensor


class Own(NamedTuple):
    """What each client's forward pass gets beside its trained tensors."""

    seed: Tensor
    """Where its dropout begins."""
    buffers: dict[str, Tensor]
    """Its buffers that travel."""
    kept: dict[str, Tensor]
    """The parameters that it keeps."""


def local_task(
    fixed: Fixed, outputs: Callable[..., Tensor], grad_at: Callable[[Tensor], Tensor], features: Callable[..., Tensor]
) -> LocalTask:
    """What one client's slots may look at."""
    sent, state, lr, num_steps, num_samples, first_loss = fixed
    return LocalTask(sent, state, lr, num_steps, num_samples, outputs, grad_at, features, first_loss)


class OneStep:
    """One step of G clients, in place."""

    def __init__(self, job: Job, size: int) -> None:
        self.job, self.size = job, size
        self.names = [slot.name for slot in job.spec.trained]
        self.num_shared = len(job.spec.trainable)

    def take(
        self,
        batch: Batch,
        seed_G: Tensor,
        live_G: Tensor,
        number: Tensor,
        noise: list[Tensor],
        params_GD: Tensor,
        leaves: list[Tensor],
        memory: list[Tensor],
        fixed: Fixed,
    ) -> Tensor:
        """Move the leaves, of which the first are views of `params_GD`, and return the clients' losses (G,).

        `noise` holds one matrix (G, T) where steps are private, and nothing otherwise.
        """
        job, dims = self.job, _dims(fixed)
        own = self._own(seed_G, leaves, fixed)
        if noise:
            loss_G, grads = stacked_gradients(
                job, self._of_private, batch, seed_G, leaves, noise[0], fixed.num_samples_G
            )
        else:
            loss_G, grads = self._gradients(batch, own, leaves, fixed, dims)
        targets = leaves
        if job.algorithm.local_grad is not None:
            shared, num = grads[: self.num_shared], self.num_shared
            grad_GD = torch.cat([g.flatten(1) if g.dim() > 1 else g.unsqueeze(1) for g in shared], dim=1)
            grad_GD = vmap(self._slot, in_dims=(0, 0, 0, 0, dims))(grad_GD, params_GD, batch, own, fixed)
            targets, grads = [params_GD, *leaves[num:]], [grad_GD, *grads[num:]]
        job.optimizer.step_(targets, grads, memory, fixed.lr_G * live_G, number)
        return loss_G.detach()

    def _own(self, seed_G: Tensor, leaves: list[Tensor], fixed: Fixed) -> Own:
        buffers = {}
        if self.job.spec.buffers:
            buffers = self.job.spec.buffer_views(fixed.sent.aux[STATISTICS].expand(self.size, -1))
        return Own(seed_G, buffers, dict(zip(self.names[self.num_shared :], leaves[self.num_shared :], strict=True)))

    def _tensors(self, params: Params, own: Own) -> dict[str, Tensor]:
        named = params if isinstance(params, Mapping) else self.job.spec.without_buffers.views(params)
        return {**own.buffers, **own.kept, **named, **dict.fromkeys(self.job.dropout_seeds, own.seed)}

    def _of_private(self, leaves: list[Tensor], seed: Tensor) -> dict[str, Tensor]:
        return self._tensors(dict(zip(self.names, leaves, strict=True)), Own(seed, {}, {}))

    def _outputs(self, own: Own) -> Callable[[Params, Tensor], Tensor]:
        def outputs(params: Params, x: Tensor) -> Tensor:
            found: Tensor = functional_call(self.job.model, self._tensors(params, own), (x,))
            return found

        return outputs

    def _task(self, fixed: Fixed, batch: Batch, own: Own) -> LocalTask:
        job, outputs = self.job, self._outputs(own)

        def grad_at(params_D: Tensor) -> Tensor:
            found: Tensor = grad(lambda p_D: mean_loss(job, outputs(p_D, batch.x), batch))(params_D)
            return found

        return local_task(
            fixed,
            outputs,
            grad_at if job.private is None else unprotected,
            lambda params, x: features(job.model, self._tensors(params, own), x),
        )

    def _loss(self, leaves: list[Tensor], batch: Batch, own: Own, fixed: Fixed) -> Tensor:
        named = dict(zip(self.names, leaves, strict=True))
        loss = mean_loss(self.job, self._outputs(own)(named, batch.x), batch)
        if self.job.algorithm.local_loss is not None:
            loss = self.job.algorithm.local_loss(loss, named, batch, self._task(fixed, batch, own))
        return loss

    def _slot(self, grad_D: Tensor, params_D: Tensor, batch: Batch, own: Own, fixed: Fixed) -> Tensor:
        assert self.job.algorithm.local_grad is not None
        return self.job.algorithm.local_grad(grad_D, params_D, self._task(fixed, batch, own))

    def _gradients(
        self, batch: Batch, own: Own, leaves: list[Tensor], fixed: Fixed, dims: Fixed
    ) -> tuple[Tensor, list[Tensor]]:
        with torch.enable_grad():
            if self.size == 1:
                rows = [leaf[0].detach().requires_grad_() for leaf in leaves]
                loss_G = self._loss(rows, *_only((batch, own, fixed), (0, 0, dims))).unsqueeze(0)
            else:  # a client's loss depends on its own row alone: one backward pass serves all
                rows = [leaf.detach().requires_grad_() for leaf in leaves]
                loss_G = vmap(self._loss, in_dims=(0, 0, 0, dims))(rows, batch, own, fixed)
            grads = list(torch.autograd.grad(loss_G.sum(), rows, materialize_grads=True))
        return loss_G, [grad.unsqueeze(0) for grad in grads] if self.size == 1 else grads


def _only(values: Any, dims: Any) -> Any:
    """Of values with a dimension for clients, where `dims` is 0, take the only client's."""
    if dims is None:
        return values
    if isinstance(values, Tensor):
        return values[0]
    if isinstance(values, dict):
        return {name: _only(value, dims if dims == 0 else dims[name]) for name, value in values.items()}
    inner = [_only(value, dims if dims == 0 else dims[i]) for i, value in enumerate(values)]
    return type(values)(*inner) if hasattr(values, "_fields") else inner


def _dims(fixed: Fixed) -> Fixed:
    """Which inputs have a dimension for clients."""
    each = 0 if fixed.sent.params_D.dim() == 2 else None
    sent: Any = Broadcast(each, dict.fromkeys(fixed.sent.aux, each))  # type: ignore[arg-type]
    return Fixed(sent, dict.fromkeys(fixed.state, 0), 0, 0, 0, 0)  # type: ignore[arg-type]


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
        fixed = self._fixed(
            padded, sent + sent[:1] * idle, states + states[:1] * idle, first_losses + first_losses[:1] * idle
        )
        params_GD = fixed.sent.params_D.expand(size, -1).clone()
        kept_GK = params_GD[:, :0]
        if job.spec.kept:
            kept_GK = torch.stack([state.get(KEPT, job.first_kept_K) for state in states + states[:1] * idle])
        leaves, num_shared = self._leaves(params_GD, kept_GK), len(job.spec.trainable)
        moved = [params_GD, *leaves[num_shared:]] if job.algorithm.local_grad is not None else leaves
        memory = job.optimizer.init(moved)
        losses_SG = self._run(padded, batches, params_GD, leaves, memory, fixed, sent)
        live_SG = torch.from_numpy(batches.live_SG)
        loss_G = (losses_SG * live_SG).sum(0) / live_SG.sum(0).clamp(min=1)
        delta_GD = params_GD.sub_(fixed.sent.params_D)
        update, after = vmap(
            lambda delta_D, each: job.algorithm.finish(delta_D, local_task(each, _none, _none, _none)),
            in_dims=(0, _dims(fixed)),
        )(delta_GD, fixed)
        keep = slice(0, num)
        aux = {k: v[keep] for k, v in update.aux.items()}
        if job.spec.buffers:  # no step that can be stacked changes them
            aux[STATISTICS] = params_GD.new_zeros(num, job.spec.num_params - job.spec.num_trainable)
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
        memory: list[Tensor],
        fixed: Fixed,
        sent: list[Broadcast],
    ) -> Tensor:
        job, federation = self.job, self.job.federation
        base_G = torch.tensor([derive(job.seed, "dropout", t.attempt, t.client) >> 2 for t in tasks])
        index_SGB, weight_SGB = torch.from_numpy(batches.index_SGB), torch.from_numpy(batches.weight_SGB)
        weight_SGB, live_SG = weight_SGB.to(job.spec.dtype), torch.from_numpy(batches.live_SG).to(job.spec.dtype)
        losses_SG = torch.empty(live_SG.shape, dtype=job.spec.dtype)
        attack = job.attack.data if job.attack is not None else None
        bad = [g for g, task in enumerate(tasks) if attack and job.attacks(task.client, task.version)]
        numbers = torch.arange(1, len(index_SGB) + 1, dtype=job.spec.dtype).unbind()
        seeds = (base_G + torch.arange(len(index_SGB))[:, None]).unbind()
        weights, lives = weight_SGB.unbind(), live_SG.unbind()
        lasting = tree_leaves((params_GD, leaves, memory, fixed))
        widths = self._widths(batches)
        ready: dict[int, tuple[Step, list[Tensor]]] = {}
        chunk = max(1, GATHERED // max(1, index_SGB[0].numel() * math.prod(federation.dataset.input_shape)))
        with torch.no_grad():
            for start in range(0, len(index_SGB), chunk):
                index = index_SGB[start : start + chunk]
                each_x = self._inputs(index).unbind()
                each_y = federation.train_y[index].unbind()
                for s, (x, y) in enumerate(zip(each_x, each_y, strict=True), start):
                    for g in bad:
                        assert attack is not None
                        x[g], y[g] = attack(x[g], y[g], knowledge(job, tasks[g], sent[g].params_D, s))
                    noise = [] if job.private is None else [self._noise(tasks, s, batches.live_SG[s])]
                    width = widths[s]
                    batch = Batch(x[:, :width], y[:, :width], weights[s][:, :width])
                    fresh = (batch, seeds[s], lives[s], numbers[s], noise)
                    if width not in ready:
                        once, step = self._step_for(fresh, params_GD, leaves, memory, fixed)
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
        self, fresh: tuple[Any, ...], params_GD: Tensor, leaves: list[Tensor], memory: list[Tensor], fixed: Fixed
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
            args = (*fresh, copy_GD, copies, [each.clone() for each in memory], fixed)
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

    def _fixed(self, tasks: list[Task], sent: list[Broadcast], states: list[State], first_losses: list[float]) -> Fixed:
        job = self.job
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
        return Fixed(
            shared,
            {name: torch.stack([state[name] for state in states]) for name in states[0] if name != KEPT},
            torch.tensor([job.lr_of(task.version) for task in tasks], dtype=dtype),
            torch.tensor([float(job.num_steps(task.client, task.work)) for task in tasks], dtype=dtype),
            torch.tensor([float(job.federation.num_samples(task.client)) for task in tasks], dtype=dtype),
            torch.tensor(first_losses, dtype=dtype),
        )

    def _width(self, longest: int) -> int:
        """How wide batches of at most this size are: few distinct widths, so that few steps are recorded."""
        if self.job.private is not None:
            return round_up(longest, 8)
        return round_up(longest, 4) if self.job.local.batch_size == "all" else self.job.batch_size


def _none(*args: Any) -> Any:
    raise RuntimeError("outputs, features and grad_at are for training, not for `finish`")
