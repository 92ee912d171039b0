"""Algorithm: slots of pure functions whose defaults ARE FedAvg (McMahan et al. 2017, arXiv:1602.05629, algorithm 1).

An algorithm overrides only what it changes. Slots for the client are written for one client; the engines map them over
many. The optimiser of a client's steps is a contract of its own. Shapes: D parameters, N samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from atoll.core.messages import Aggregate, Broadcast, State, Update
from atoll.core.params import ParamSpec
from atoll.core.parts import Part

Params = Tensor | Mapping[str, Tensor]
"""A flat vector, or the named tensors of the model."""


class LocalTask(NamedTuple):
    """What a client's slots may look at while it trains."""

    broadcast: Broadcast
    state: State
    lr: Tensor
    num_steps: Tensor
    num_samples: Tensor
    outputs: Callable[[Params, Tensor], Tensor]
    """The model's outputs for given parameters and inputs."""
    grad_at: Callable[..., Tensor]
    """(parameters, part=0, of=1) -> the gradient of the local loss at any flat vector, on the present batch.

    With `of` above 1 on every `of`-th sample of the batch alone, beginning with the sample number `part`."""
    features: Callable[[Params, Tensor], Tensor]
    """What the model's last linear layer gets as its input, for given parameters and inputs."""
    first_loss: Tensor
    """The broadcast model's mean loss on all of the client's samples; NaN unless the algorithm `needs_loss`."""
    step: Tensor
    """The number of the present step, from 1; in `finish` that of the last."""
    end_D: Tensor
    """In `finish` of an algorithm with a `start` of its own: the parameters that training ended with."""


class Batch(NamedTuple):
    """Samples of one step; `weight` is each one's share in the mean, 0 for padding."""

    x: Tensor
    y: Tensor
    weight: Tensor


class PublicSamples(NamedTuple):
    """Samples that everybody may look at, without their labels."""

    num_samples: int
    features: Callable[[np.ndarray], Tensor]
    """Indices (N,) -> what a model gets."""


class ServerTask(NamedTuple):
    """What the server's step may look at beside the aggregate."""

    lr: float
    round: int
    num_clients: int
    """How many clients are registered, taking part or not."""
    outputs: Callable[..., Tensor]
    """(parameters, inputs, change of statistics or None) -> the model's outputs in evaluation mode.

    Batch norm uses the new version's statistics, or those of the old one with a client's change.
    """
    public: PublicSamples | None
    """What the plan's `public` gives; never None for an algorithm that `needs_public`."""
    rng: np.random.Generator
    """The randomness of this round's step."""
    spec: ParamSpec
    """The layout of the parameters and of the buffers that the server alone moves."""


class Expected(NamedTuple):
    """What the server knows of the work behind stacked updates; (C,) each."""

    num_steps_C: Tensor
    lr_C: Tensor


def nothing(params_D: Tensor) -> State:
    """Remember nothing."""
    return {}


def no_extras(params_D: Tensor, server: State) -> State:
    """Send the parameters alone."""
    return {}


def send_delta(delta_D: Tensor, task: LocalTask) -> tuple[Update, State]:
    """Send what changed, weighted by the number of samples."""
    return Update(delta_D, task.num_samples, {}), {}


def add_delta(params_D: Tensor, aggregate: Aggregate, server: State, task: ServerTask) -> tuple[Tensor, State]:
    """Move the model by the mean delta times the server's learning rate."""
    step_D = task.lr * aggregate.delta_D
    return step_D.add_(params_D), server  # in place: large models have no room for another vector


def as_samples(num_samples: float) -> float:
    """A client weighs as much as it has samples."""
    return num_samples


def at_most(largest: float) -> Callable[[float], float]:
    """However many samples a client has, it weighs at most so much."""
    return lambda num_samples: largest


class Drift(NamedTuple):
    """What an algorithm adds to every gradient of a task: pull * (w - w_t) + shift, with w_t the broadcast model."""

    pull: float = 0.0
    shift_D: Tensor | None = None


class Adapt(NamedTuple):
    """Steps of gradient descent on a client's own samples, in batches as the plan's."""

    steps: int
    lr: float | None = None
    """Their step size; that of the plan if None."""


class Algorithm(NamedTuple):
    """The slots of an algorithm; see the module for who fills them and who calls them."""

    init_server: Callable[[Tensor], State] = nothing
    init_client: Callable[[Tensor], State] = nothing
    broadcast: Callable[[Tensor, State], State] = no_extras
    local_loss: Callable[[Tensor, Mapping[str, Tensor], Batch, LocalTask], Tensor] | None = None
    local_grad: Callable[[Tensor, Tensor, LocalTask], Tensor] | None = None
    local_memory: Callable[[Tensor, LocalTask], State] | None = None
    """(parameters before a step, task) -> the client's memory after it, where memory changes within local steps.

    `task.state` is the memory before; `local_grad` gets the one after."""
    start: Callable[[Broadcast, State], Tensor] | None = None
    """(broadcast, memory) -> the parameters that local steps begin with, if that is not the broadcast model.

    The delta that `finish` gets is counted from there."""
    moves: Callable[[LocalTask], tuple[Tensor, Tensor]] | None = None
    """Task -> whether the present step moves what is shared, and whether it moves what the client keeps."""
    finish: Callable[[Tensor, LocalTask], tuple[Update, State]] = send_delta
    server_step: Callable[[Tensor, Aggregate, State, ServerTask], tuple[Tensor, State]] = add_delta
    plausible: Callable[[Update, Expected], Tensor] | None = None
    """(stacked update, what the server knows) -> (C,): which clients sent extra vectors that `finish` could have made.

    Others are rejected: a step that divides or multiplies by a client's word needs it. Leave room for lossy uplinks."""
    max_weight: Callable[[float], float] = as_samples
    """Number of samples -> the largest weight that `finish` gives a client that has so many."""
    personal: Callable[[Tensor, State], Tensor] | None = None
    """(shared parameters, memory) -> the client's own model, (1, D); or candidates for it, (A, D), of which it takes
    the one with the least loss on its validation samples."""
    adapt: Adapt | None = None
    """Steps by which a client makes the model its own before it uses it; nothing of them is sent."""
    needs_validation: bool = False
    """Whether `personal` gives candidates, so that clients need validation samples."""
    keep: tuple[str, ...] | None = None
    """What clients keep of the model where a plan does not say, by patterns as in `keep` of a plan."""
    needs_loss: bool = False
    """Whether clients measure the broadcast model on their data first, for `first_loss`."""
    needs_updates: bool = False
    """Whether the server's step sees each update, as `aggregate.updates`; all then start from one version."""
    needs_public: bool = False
    """Whether a plan must say which samples are public."""
    work: Part | None = None
    """What its clients do, if that is not steps of gradient descent: a member of `train/works`."""
    server_lr: float = 1.0
    """The server's learning rate where a plan does not say."""
    local: Mapping[str, object] = MappingProxyType({})
    """Local settings that it fixes, such as one step on all samples; a plan that says otherwise is refused."""
    prepare: Callable[[nn.Module], None] | None = None
    """Changes a model before its parameters are laid out: freezes some, adds buffers; refuses one that does not fit."""
    mask: Callable[[ParamSpec, int], Tensor] | None = None
    """(layout, client's number) -> ones for the parameters (D,) that the client trains, and zeros for those that are
    zero in its model and do not change by its update."""
    measure: Callable[[Tensor, Tensor, Aggregate, ServerTask], Mapping[str, float]] | None = None
    """(model before, model after, aggregate, task) -> figures for the metrics row. It sees each update, and is left out
    where nobody may: under secure aggregation and privacy, and where updates are late by different amounts."""
    drift: Callable[[LocalTask], Drift] | None = None
    """What `local_grad` adds, where it adds the same in every step of a task: kernels then need not call it.

    Of the task it may look at the broadcast, the state and the learning rate."""
    multiplies: bool = False
    """Whether the server's step multiplies what single clients sent, so that no rule can stand in for their mean."""


def remember_nothing(tensors: list[Tensor]) -> list[Tensor]:
    """Return an empty memory, for optimisers that keep nothing between steps."""
    return []


class Optimizer(NamedTuple):
    """One step of a client's parameters by a gradient, in place, and the initial memory.

    It works on lists of tensors: the layers of one model, the stacked layers of many clients, or one flat vector. Only
    elementwise operations are allowed, so that all three give the same numbers.
    """

    step_: Callable[[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor], None]
    """(tensors, gradients, memory, learning rate, number of the step from 1) -> None; one rate per stacked client."""
    init: Callable[[list[Tensor]], list[Tensor]] = remember_nothing
    """(tensors) -> memory before the first step."""


def spread(scalar: Tensor, like: Tensor) -> Tensor:
    """Reshape one number per client so that it broadcasts over the trailing dimensions of `like`."""
    return scalar.reshape(scalar.shape + (1,) * (like.dim() - scalar.dim()))
