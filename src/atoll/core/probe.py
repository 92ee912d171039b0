"""Probe: what somebody who sees what the server sees gets out of a plan.

Shapes: R rows that the server can read, D parameters, M values of a model, N samples, K classes, C candidates. A probe
is given what the server sees and the public plan, never the clients' samples; how much it got is judged elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.messages import State, Update
from atoll.core.params import ParamSpec

SAMPLES, LABELS, TOKENS, MEMBERSHIP, PROPERTY, SOURCE, ATTRIBUTE, SAMPLE_LABELS = (
    "samples",
    "labels",
    "tokens",
    "membership",
    "property",
    "source",
    "attribute",
    "sample labels",
)
GOALS = (SAMPLES, LABELS, TOKENS, MEMBERSHIP, PROPERTY, SOURCE, ATTRIBUTE, SAMPLE_LABELS)
"""What probes are after: clients' samples, how many of each class, words, who was trained on, what clients are like,
whose an update is, what samples say that are known but for one attribute, and the label of each sample at a cut."""


class Sight(NamedTuple):
    """What the server sees of one round."""

    version: int
    """The version that clients trained from."""
    model_M: Tensor
    """That version as clients got it."""
    extras: State
    """The algorithm's extras that were sent with it."""
    rows: Update
    """What the server can read, decoded: a row for each client, or one for each sum that was opened."""
    num_clients_R: tuple[int, ...]
    """Of how many clients each row is the weighted mean; 1 for a single client's."""
    num_samples_R: tuple[int, ...]
    """How many samples are behind each row, as far as clients say so; 0 if they do not."""
    after_M: Tensor
    """The next version."""
    sender_R: tuple[int | None, ...] = ()
    """Who sent each row, as the server numbers its clients; None for a sum of several."""
    masked: Mapping[int, np.ndarray] = {}
    """Client -> the first integers that it sent under its masks, of which only the sum can be read."""
    num_steps_R: tuple[int, ...] = ()
    """Steps of the client behind each row, of an average one for a sum; as many as the plan says unless given."""


class Samples(NamedTuple):
    """Samples with their targets."""

    x: Tensor
    y: Tensor


class Known(NamedTuple):
    """What everybody knows of a plan: its model, its loss and how clients train."""

    model: nn.Module
    """An architecture of the plan's, with no weights that matter; probes may run and change it."""
    spec: ParamSpec
    outputs: Callable[[Tensor, Tensor], Tensor]
    """(flat model (M,), inputs) -> outputs, differentiable in both, in training mode."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> a number a sample."""
    input_shape: tuple[int, ...]
    num_classes: int
    tokens: bool
    """Whether inputs are ids of tokens, below the number of classes."""
    low: float
    """The least value of a feature, as models get them."""
    high: float
    lr: Callable[[int], float]
    """Version -> the clients' step size."""
    num_steps: Callable[[int], int]
    """Number of samples of a client -> steps of a task."""
    batch_size: Callable[[int], int]
    """Number of samples of a client -> samples a step."""
    elsewhere: Samples
    """Samples of the same kind that no client holds: what an attacker could gather."""
    num_train: int
    """Samples that all clients together train on."""
    num_clients: int = 1

    def steps(self, sight: Sight) -> tuple[int, ...]:
        """Return the steps of a client behind each row, of an average one for sums and unknown sizes."""
        if sight.num_steps_R:
            return sight.num_steps_R
        usual, pairs = self.num_train / self.num_clients, zip(sight.num_samples_R, sight.num_clients_R, strict=True)
        return tuple(self.num_steps(max(1, round(num / clients if num else usual))) for num, clients in pairs)

    def gradients(self, sight: Sight) -> Tensor:
        """Return what the rows are of a mean gradient: exactly that where clients take one step, else an estimate."""
        scale_R = torch.tensor([-1 / (self.lr(sight.version) * steps) for steps in self.steps(sight)])
        return sight.rows.delta_D * scale_R.to(sight.rows.delta_D.dtype).unsqueeze(1)


def frozen_as(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters that nobody trains, in a precision: they are public, as adapters' bases are."""
    return {name: each.detach().to(dtype) for name, each in model.named_parameters() if not each.requires_grad}


class Hidden(NamedTuple):
    """The attribute that an attacker does not know of its candidates. Shapes: V values of it, F features that say it.

    The candidates are samples of clients, of which the attacker knows everything else.
    """

    columns_F: Tensor
    """The features that hold the attribute; 0 in the candidates."""
    values_VF: Tensor
    """What these features are for each of its values."""
    row_C: Tensor
    """The row that each candidate is behind, counted over all sights."""


class Work(NamedTuple):
    """What a probe has to work with beside what it sees."""

    rng: np.random.Generator
    is_over: Callable[[], bool]
    """Whether the time that it may take is over; it then returns the best that it has."""
    candidates: Samples | None = None
    """For membership: samples of which some were trained on; nobody says which. For attributes: see `hidden`."""
    hidden: Hidden | None = None
    """For attributes: what is not known of the candidates."""


class Guess(NamedTuple):
    """What a probe made of a row, or of all that it saw."""

    row: int | None = None
    """The row that it is about, counted over all sights; None if it is about all of them."""
    x: Tensor | None = None
    """Samples, (N, ...), the surest first."""
    y: Tensor | None = None
    """Their targets, or tokens of a text in order, (N,)."""
    sure_N: Tensor | None = None
    """How sure the attacker is of each sample, by what it sees alone; larger is surer."""
    score_N: Tensor | None = None
    """Of each sample at a cut how likely it is of the second of two classes."""
    counts_K: Tensor | None = None
    """How many samples, or tokens, of each class."""
    score_C: Tensor | None = None
    """Of each candidate how much it looks like one that was trained on."""
    score_CV: Tensor | None = None
    """Of each candidate how likely each value of its hidden attribute is."""
    value: float | None = None
    """Another figure, such as how likely a client has a property."""
    notes: Mapping[str, float] = {}
    """Figures of the attack itself, such as its last loss."""


class CutSight(NamedTuple):
    """What the server of split learning sees of one client's task. Shapes: N samples that were sent, one after another.

    A sample that was sent in several passes is there as often.
    """

    client: int
    version: int
    client_M: Tensor | None
    """The client's layers at the start, where they went through the server."""
    server_M: Tensor
    """The server's layers when the round began."""
    activations_N: Tensor
    """What came over the cut, (N, ...)."""
    batch_N: Tensor
    """Number of the batch that each sample was in."""
    labels_N: Tensor | None = None
    """Their labels, where they travel."""
    outputs_N: Tensor | None = None
    """Outputs of the server's layers, where the loss is computed elsewhere."""
    gradients_N: Tensor | None = None
    """Gradients by these outputs, as they came."""


class CutKnown(NamedTuple):
    """What everybody knows of a plan whose model is cut."""

    client: Callable[[Tensor | None], nn.ModuleDict]
    """(values of the clients' layers) -> a copy of these layers, `head` and perhaps `tail`; untrained ones for None."""
    server: Callable[[Tensor], nn.Module]
    """(values of the server's layers) -> a copy of these layers."""
    as_sent: Callable[[Tensor], Tensor]
    """Activations (N, ...) -> what would be sent of them, by the plan's defences with noise of the attacker's own."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """(outputs, targets) -> a number a sample."""
    labels_K: Tensor
    """The labels that there are; none where targets are no classes."""
    input_shape: tuple[int, ...]
    low: float
    high: float
    lr: Callable[[int], float]
    """Version -> the clients' step size."""
    elsewhere: Samples
    """Samples of the same kind that no client holds: what an attacker could gather."""


def nothing_of_updates(known: Known, sights: Sequence[Sight], work: Work) -> list[Guess]:
    """Guess nothing: the attack of a probe that looks at a cut, on updates."""
    return []


class Probe(NamedTuple):
    """A member of the family."""

    goal: str
    """One of GOALS."""
    run: Callable[[Known, Sequence[Sight], Work], list[Guess]]
    """The attack on updates: (what is known, what is seen, what to work with) -> guesses."""
    why_not: Callable[[Known, Sequence[Sight]], str | None] = lambda known, sights: None
    """Why it cannot be tried on such a model or such updates, in words; None if it can."""
    plant: Callable[[Known, Tensor, Work], Tensor] | None = None
    """For a server that is not only curious: (what is known, model (M,), work) -> the model that it sends instead."""
    assumes: str = "the server follows the protocol and looks at what it sees"
    """The threat model in words."""
    at_cut: Callable[[CutKnown, Sequence[CutSight], Work], list[Guess]] | None = None
    """The attack on what the server of split learning sees; guesses are about sights, in their order, and say a sample,
    or a label, for each that was sent, from the first on. None for attacks on updates."""
    why_not_at_cut: Callable[[CutKnown, Sequence[CutSight]], str | None] = lambda known, sights: None
    """Why it cannot be tried there, in words; None if it can."""
