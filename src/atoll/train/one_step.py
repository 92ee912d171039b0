"""One step of many clients at once. Shapes: G clients, D parameters, B samples a batch, T trained parameters.

Slots of an algorithm are written for one client and mapped over all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from atoll.core.algorithm import Batch, LocalTask, Params, spread
from atoll.core.messages import STATISTICS, Broadcast, State
from atoll.train.job import Job
from atoll.train.loop import features, mean_loss, part_of
from atoll.train.private import stacked_gradients, unprotected


class Fixed(NamedTuple):
    """What does not change from step to step."""

    sent: Broadcast
    """Shared (D,), or one a client (G, D) when clients train from different versions."""
    state: State
    """What clients remember, unless it changes within local steps."""
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
    number: Tensor
    """The number of the step."""
    memory: State
    """What it remembers, if that changes within local steps."""


def local_task(
    fixed: Fixed,
    outputs: Callable[..., Tensor],
    grad_at: Callable[..., Tensor],
    features: Callable[..., Tensor],
    step: Tensor,
) -> LocalTask:
    """What one client's slots may look at."""
    return LocalTask(
        broadcast=fixed.sent,
        state=fixed.state,
        lr=fixed.lr_G,
        num_steps=fixed.num_steps_G,
        num_samples=fixed.num_samples_G,
        outputs=outputs,
        grad_at=grad_at,
        features=features,
        first_loss=fixed.first_loss_G,
        step=step,
        end_D=fixed.sent.params_D,
    )


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
        memory: list[list[Tensor]],
        states: State,
        fixed: Fixed,
    ) -> Tensor:
        """Move the leaves, of which the first are views of `params_GD`, and return the clients' losses (G,).

        `noise` holds one matrix (G, T) where steps are private, and nothing otherwise. `states` is what clients
        remember if that changes with each step; it is changed in place, as is the optimiser's `memory`.
        """
        job, dims, algorithm = self.job, client_dims(fixed), self.job.algorithm
        own = self._own(seed_G, leaves, number.expand(self.size), states, fixed)
        if noise:
            loss_G, grads = stacked_gradients(
                job, self._of_private, batch, seed_G, leaves, noise[0], fixed.num_samples_G
            )
        else:
            loss_G, grads = self._gradients(batch, own, leaves, fixed, dims)
        targets, shared = leaves, self.num_shared
        if algorithm.local_memory is not None:
            after = vmap(self._memory, in_dims=(0, 0, 0, dims))(params_GD, batch, own, fixed)
            own = own._replace(memory=after)
        if algorithm.local_grad is not None:
            grad_GD = torch.cat([g.flatten(1) if g.dim() > 1 else g.unsqueeze(1) for g in grads[:shared]], dim=1)
            grad_GD = vmap(self._slot, in_dims=(0, 0, 0, 0, dims))(grad_GD, params_GD, batch, own, fixed)
            targets, grads, shared = [params_GD, *leaves[shared:]], [grad_GD, *grads[shared:]], 1
        for name, state in states.items():
            torch.where(spread(live_G, state) > 0, own.memory[name], state, out=state)
        lr_G = fixed.lr_G * live_G
        if algorithm.moves is None:
            job.optimizer.step_(targets, grads, memory[0], lr_G, number)
        else:
            moves = vmap(self._moves, in_dims=(0, 0, dims))(batch, own, fixed)
            for part, each, move_G in zip((slice(shared), slice(shared, None)), memory, moves, strict=True):
                changed = [*targets[part], *each]
                before = [tensor.clone() for tensor in changed]
                job.optimizer.step_(targets[part], grads[part], each, lr_G, number)
                for tensor, old in zip(changed, before, strict=True):
                    tensor.copy_(torch.where(spread(move_G, tensor), tensor, old))
        return loss_G.detach()

    def _own(self, seed_G: Tensor, leaves: list[Tensor], number_G: Tensor, states: State, fixed: Fixed) -> Own:
        buffers = {}
        if self.job.spec.buffers:
            buffers = self.job.spec.buffer_views(fixed.sent.aux[STATISTICS].expand(self.size, -1))
        kept = dict(zip(self.names[self.num_shared :], leaves[self.num_shared :], strict=True))
        return Own(seed_G, buffers, kept, number_G, states)

    def _tensors(self, params: Params, own: Own) -> dict[str, Tensor]:
        named = params if isinstance(params, Mapping) else self.job.spec.without_buffers.views(params)
        return {**own.buffers, **own.kept, **named, **dict.fromkeys(self.job.dropout_seeds, own.seed)}

    def _of_private(self, leaves: list[Tensor], seed: Tensor) -> dict[str, Tensor]:
        return self._tensors(dict(zip(self.names, leaves, strict=True)), Own(seed, {}, {}, seed, {}))

    def _outputs(self, own: Own) -> Callable[[Params, Tensor], Tensor]:
        def outputs(params: Params, x: Tensor) -> Tensor:
            found: Tensor = functional_call(self.job.model, self._tensors(params, own), (x,))
            return found

        return outputs

    def _task(self, fixed: Fixed, batch: Batch, own: Own) -> LocalTask:
        job, outputs = self.job, self._outputs(own)

        def grad_at(params_D: Tensor, part: int = 0, of: int = 1) -> Tensor:
            some, views = part_of(batch, part, of), job.spec.without_buffers.views(params_D)
            grads = grad(lambda named: mean_loss(job, outputs(named, batch.x), some))(views)
            return torch.cat([each.reshape(-1) for each in grads.values()])

        return local_task(
            fixed._replace(state={**fixed.state, **own.memory}),
            outputs,
            grad_at if job.private is None else unprotected,
            lambda params, x: features(job.model, self._tensors(params, own), x),
            own.number,
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

    def _memory(self, params_D: Tensor, batch: Batch, own: Own, fixed: Fixed) -> State:
        assert self.job.algorithm.local_memory is not None
        return self.job.algorithm.local_memory(params_D, self._task(fixed, batch, own))

    def _moves(self, batch: Batch, own: Own, fixed: Fixed) -> tuple[Tensor, Tensor]:
        assert self.job.algorithm.moves is not None
        return self.job.algorithm.moves(self._task(fixed, batch, own))

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
            total = loss_G.sum() if self.job.loss_scale == 1 else loss_G.sum() * self.job.loss_scale
            grads = list(torch.autograd.grad(total, rows, materialize_grads=True))
        if self.job.loss_scale != 1:
            grads = [grad / self.job.loss_scale for grad in grads]
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


def client_dims(fixed: Fixed) -> Fixed:
    """Which inputs have a dimension for clients."""
    each = 0 if fixed.sent.params_D.dim() == 2 else None
    sent: Any = Broadcast(each, dict.fromkeys(fixed.sent.aux, each))  # type: ignore[arg-type]
    return Fixed(sent, dict.fromkeys(fixed.state, 0), 0, 0, 0, 0)  # type: ignore[arg-type]
