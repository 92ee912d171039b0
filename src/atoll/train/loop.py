"""The local loop, one client after another: the readable reference. Shapes: D parameters, B samples a batch.

The working model's parameters and buffers are views of the client's flat vector, so that a step in place moves the
vector and nothing is copied. Any nn.Module works here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from atoll.core.algorithm import Batch, LocalTask, Params
from atoll.core.attack import Knowledge
from atoll.core.client_work import Trained
from atoll.core.errors import PlanError
from atoll.core.messages import KEPT, Broadcast, State, Task
from atoll.core.seeds import derive, generator
from atoll.train.attributes import Attributes
from atoll.train.batches import client_batches
from atoll.train.dropout import set_seed
from atoll.train.job import Job, with_statistics
from atoll.train.private import noise_of, private_gradient, unprotected
from atoll.train.seeded import seeded

BUFFER = "buffer."
"""What the names of a client's own buffers begin with among what it remembers."""


class Workspace(NamedTuple):
    """A model whose tensors are views of one flat vector, reused from client to client."""

    model: nn.Module
    params_D: Tensor
    leaves: list[Tensor]
    kept_K: Tensor
    """The parameters that a client keeps, in a flat vector of their own."""
    first_kept_K: Tensor
    own_buffers: State
    """The first values of the buffers that do not travel: every client starts from these or from its own."""
    attributes: Attributes
    """What the model keeps beside tensors, such as a counter: every client starts from the first values."""

    def is_bound(self) -> bool:
        """Whether the model's tensors are still views of this vector."""
        return self.leaves[0].untyped_storage().data_ptr() == self.params_D.untyped_storage().data_ptr()

    def named(self, job: Job, params: Params) -> dict[str, Tensor]:
        """Return named tensors for a forward pass of an algorithm's own, which leaves the client's buffers alone."""
        named = params if isinstance(params, Mapping) else job.spec.without_buffers.views(params)
        names = [*self.own_buffers, *(slot.name for slot in job.spec.buffers)]
        return {**{name: self.model.get_buffer(name).clone() for name in names}, **named}

    def restore(self, params_D: Tensor, memory: State) -> None:
        """Give the model what was sent and what a client keeps of it, or the first of that; nothing of others."""
        self.params_D.copy_(params_D)
        if len(self.kept_K):
            self.kept_K.copy_(memory.get(KEPT, self.first_kept_K))
        for name, first in self.own_buffers.items():
            self.model.get_buffer(name).copy_(memory.get(f"{BUFFER}{name}", first))
        self.attributes.restore()


def workspace(job: Job) -> Workspace:
    """Bind the job's model to a fresh flat vector."""
    params_D, kept_K = job.first_D.clone(), job.first_kept_K.clone()
    views = {**job.spec.views(params_D), **job.spec.kept_views(kept_K)}
    for name, parameter in job.model.named_parameters():
        if name in views:
            _bind(job.model, name, parameter, views[name])
    for slot in job.spec.buffers:
        owner, _, leaf = slot.name.rpartition(".")
        job.model.get_submodule(owner)._buffers[leaf] = views[slot.name]
    parameters = dict(job.model.named_parameters())
    travels = {slot.name for slot in job.spec.buffers}
    own_buffers = {name: buffer.clone() for name, buffer in job.model.named_buffers() if name not in travels}
    return Workspace(
        model=job.model,
        params_D=params_D,
        leaves=[parameters[slot.name] for slot in job.spec.trained],
        kept_K=kept_K,
        first_kept_K=job.first_kept_K,
        own_buffers=own_buffers,
        attributes=Attributes(job.model),
    )


def _bind(model: nn.Module, name: str, parameter: nn.Parameter, view: Tensor) -> None:
    """Make a parameter a view of the flat vector, under all of its names."""
    if type(view) is Tensor:
        parameter.data = view
        return
    bound = nn.Parameter(view)  # the data of a subclass of tensors cannot be exchanged
    for prefix, module in model.named_modules():
        for leaf, other in list(module._parameters.items()):
            if other is parameter or f"{prefix}.{leaf}".lstrip(".") == name:
                setattr(module, leaf, bound)


def features(model: nn.Module, named: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What the last linear layer of a model gets, with these tensors in place of the model's own."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise PlanError("this algorithm compares what the last nn.Linear of the model gets, but the model has none")
    seen: list[Tensor] = []
    handle = layers[-1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        functional_call(model, dict(named), (x,))
    finally:
        handle.remove()
    return seen[-1]


def train_client(
    job: Job,
    space: Workspace,
    task: Task,
    sent: Broadcast,
    state: State,
    first_loss: float = math.nan,
    drawn: list[np.ndarray] | None = None,
) -> Trained:
    """Do one task: batches, gradients, slots, optimiser, and what the algorithm sends up.

    `drawn` are other batches than the usual.
    """
    algorithm, start_M, masks = job.algorithm, _start(job, sent, state), None
    if algorithm.mask is not None:
        mask_D = algorithm.mask(job.spec, task.client).to(job.device)
        start_M = torch.cat([job.trainable(start_M) * mask_D, start_M[job.spec.num_trainable :]])
        masks = list(job.spec.without_buffers.views(mask_D).values())
    space.restore(start_M, state)
    lr = job.number(job.lr_of(task.version))
    batches = client_batches(job, task) if drawn is None else drawn
    memories: list[list[Tensor]] = []
    losses: list[Tensor] = []
    base = derive(job.seed, "dropout", task.attempt, task.client) >> 2
    with seeded(base, job.device):
        for number, indices in enumerate(batches):
            if job.dropout_seeds:
                set_seed(space.model, job.dropout_seeds, base + number)
            batch = load_batch(job, torch.from_numpy(indices), task, sent.params_D, number)
            order = _order(job, space, sent, state, lr, len(batches), batch, task, first_loss, number + 1)
            if job.private is None:
                loss, grads = _gradient(job, space, batch, order)
            else:
                leaves = {s.name: leaf.detach() for s, leaf in zip(job.spec.trained, space.leaves, strict=True)}
                noise_T = noise_of(job, task, number)
                loss, grads = private_gradient(job, leaves, batch, order, noise_T, base + number)
            if masks is not None:
                grads[: len(masks)] = [grad * mask for grad, mask in zip(grads, masks, strict=False)]
            state = {**state, **_move(job, space, grads, order, memories)}
            losses.append(loss)
    delta_M = space.params_D - start_M
    order = order._replace(state=state, end_D=job.trainable(space.params_D))
    update, remembered = algorithm.finish(job.trainable(delta_M), order)
    if algorithm.start is not None:  # no view of the workspace, which goes on to the next client
        remembered = {name: value.clone() for name, value in remembered.items()}
    kept = {KEPT: space.kept_K.clone()} if job.spec.kept else {}
    buffers = {f"{BUFFER}{name}": space.model.get_buffer(name).clone() for name in job.local_buffers}
    return Trained(
        update=with_statistics(job, update, delta_M),
        state={**remembered, **kept, **buffers},
        loss=float(torch.stack(losses).mean()),
    )


def _move(job: Job, space: Workspace, grads: list[Tensor], task: LocalTask, memories: list[list[Tensor]]) -> State:
    """Let the algorithm's slots and the optimiser take a step, and return what of the client's memory changed.

    `memories` are the optimiser's, empty before the first step.
    """
    algorithm, changed = job.algorithm, dict[str, Tensor]()
    targets: list[Tensor] = [leaf.data for leaf in space.leaves]
    shared, params_D = len(job.spec.trainable), job.trainable(space.params_D)
    if algorithm.local_memory is not None:
        changed = algorithm.local_memory(params_D, task)
    if algorithm.local_grad is not None:
        grad_D = torch.cat([grad.reshape(-1) for grad in grads[:shared]])
        grad_D = algorithm.local_grad(grad_D, params_D, task._replace(state={**task.state, **changed}))
        targets, grads, shared = [params_D, *targets[shared:]], [grad_D, *grads[shared:]], 1
    parts = [slice(None)] if algorithm.moves is None else [slice(shared), slice(shared, None)]
    moves = [True] if algorithm.moves is None else [bool(move) for move in algorithm.moves(task)]
    if not memories:
        memories += [job.optimizer.init(targets[part]) for part in parts]
    with torch.no_grad():
        for part, memory, move in zip(parts, memories, moves, strict=True):
            if move:
                job.optimizer.step_(targets[part], grads[part], memory, task.lr, task.step)
    return changed


def _start(job: Job, sent: Broadcast, state: State) -> Tensor:
    """Return the flat vector that a client's steps begin with: the model that was sent, or what it makes of it."""
    if job.algorithm.start is None:
        return job.model_of(sent)
    return job.model_of(sent._replace(params_D=job.algorithm.start(sent, state)))


def load_batch(job: Job, indices: Tensor, task: Task, params_D: Tensor, step: int) -> Batch:
    """Gather samples, poisoned if the client attacks its data."""
    federation = job.federation
    x, y = job.inputs(federation.features(federation.take(indices))), federation.targets(indices)
    if job.attack is not None and job.attack.data is not None and len(y) and job.attacks(task.client, task.version):
        x, y = job.attack.data(x, y, knowledge(job, task, params_D, step))
    return Batch(x, y, torch.full((len(y),), 1 / max(1, len(y)), dtype=job.spec.dtype, device=y.device))


def knowledge(job: Job, task: Task, params_D: Tensor, step: int = 0) -> Knowledge:
    """What an attacking client may look at; in each step it draws other numbers."""
    rng = generator(job.seed, "attack", task.attempt, task.client, step)
    return Knowledge(params_D, job.federation.dataset.num_classes, task.attempt, rng)


def part_of(batch: Batch, part: int, of: int) -> Batch:
    """Return a batch in which every `of`-th sample from number `part` on counts, and no other."""
    if of == 1:
        return batch
    weight_B = batch.weight * (torch.arange(batch.weight.shape[-1], device=batch.weight.device) % of == part)
    return batch._replace(weight=weight_B / weight_B.sum().clamp(min=torch.finfo(weight_B.dtype).tiny))


def mean_loss(job: Job, outputs: Tensor, batch: Batch) -> Tensor:
    """The mean loss over the samples of a batch that are not padding."""
    return (job.loss(outputs, batch.y) * batch.weight).sum()


def _order(
    job: Job,
    space: Workspace,
    sent: Broadcast,
    state: State,
    lr: Tensor,
    num_steps: int,
    batch: Batch,
    task: Task,
    first_loss: float,
    step: int,
) -> LocalTask:
    def outputs(params: Params, x: Tensor) -> Tensor:
        found: Tensor = functional_call(space.model, space.named(job, params), (x,))
        return found

    def grad_at(params_D: Tensor, part: int = 0, of: int = 1) -> Tensor:
        views = job.spec.without_buffers.views(params_D.detach())
        with torch.enable_grad():  # by layers: through slices of a flat vector each would make a gradient as long as it
            leaves = {name: view.clone().requires_grad_() for name, view in views.items()}
            loss = mean_loss(job, outputs(leaves, batch.x), part_of(batch, part, of))
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return torch.cat([each.reshape(-1) for each in grads])

    return LocalTask(
        broadcast=sent,
        state=state,
        lr=lr,
        num_steps=job.number(float(num_steps)),
        num_samples=job.number(float(job.federation.num_samples(task.client))),
        outputs=outputs,
        grad_at=grad_at if job.private is None else unprotected,
        features=lambda params, x: features(space.model, space.named(job, params), x),
        first_loss=job.number(first_loss),
        step=job.number(float(step)),
        end_D=sent.params_D,
    )


def _gradient(job: Job, space: Workspace, batch: Batch, order: LocalTask) -> tuple[Tensor, list[Tensor]]:
    loss = mean_loss(job, space.model(batch.x), batch)
    if job.algorithm.local_loss is not None:
        named = {slot.name: leaf for slot, leaf in zip(job.spec.trained, space.leaves, strict=True)}
        loss = job.algorithm.local_loss(loss, named, batch, order)
    scaled = loss if job.loss_scale == 1 else loss * job.loss_scale
    grads = torch.autograd.grad(scaled, space.leaves, allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(space.leaves, grads, strict=True)]
    return loss.detach(), filled if job.loss_scale == 1 else [grad / job.loss_scale for grad in filled]
