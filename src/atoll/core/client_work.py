"""ClientWork: what a client does with a task. Shapes: C clients, D values of what travels.

Steps of gradient descent are one member of the family; whatever else a client may do, from exchanging scores to a loop
of its own, is another. A member says what travels and how a client trains and is evaluated; coordinator, uplink,
secure sums, rules, checkpoints and drivers see vectors and memories only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from atoll.core.messages import Broadcast, State, Task, Update
from atoll.core.params import ParamSpec

Sums = dict[str, Tensor]
"""What was measured of some samples: their `count`, the sum of their `loss`, and the parts of the plan's metrics as
`metric/name`, or for work of a user's own any sums, such as of `right` answers."""


class Trained(NamedTuple):
    """What came of one client's task."""

    update: Update
    state: State
    """What the client remembers for its next task."""
    loss: float
    """Mean training loss; NaN if there is none."""


class Samples(NamedTuple):
    """Samples that a client trains on or is evaluated on; they are read when `load` is called."""

    client: int
    """Whose work this is, SERVER for the server's own and for a model that all share."""
    num_samples: int
    load: Callable[[], tuple[Tensor, Tensor]]
    """Returns features as a model wants them, and targets."""
    groups: np.ndarray | None = None
    """The group of each sample, where it is compared how well a model does for groups."""


class Layout(NamedTuple):
    """What travels, and the values that the run starts from."""

    spec: ParamSpec
    first_D: Tensor
    extras: Mapping[str, Tensor] = MappingProxyType({})
    """What updates hold beside these values: zeros of the same shapes."""


class Worker(ABC):
    """Does the work of clients in one process, one after another."""

    @abstractmethod
    def train(self, task: Task, sent: Broadcast, memory: State, samples: Samples) -> Trained:
        """Do one task; `memory` is what the client remembers, empty at first."""

    @abstractmethod
    def evaluate(self, params_D: Tensor, memory: State, samples: Samples) -> Sums:
        """Measure the shared values, or what a client has made of them, on some samples."""

    def own(self, params_D: Tensor, memory: State, client: int) -> tuple[Tensor, State]:
        """Return what a client makes of the shared values and its memory before it uses them, for `evaluate`."""
        return params_D, memory


class ClientWork(NamedTuple):
    """A member of the family: pure functions of the job that a plan was built into."""

    open: Callable[[Any], Worker]
    """Job -> what trains and evaluates its clients in this process."""
    first: Callable[[Any], Mapping[str, Any]] | None = None
    """Dataset -> named arrays that the run starts from, for work that needs no model; None: the plan's model."""
    layout: Callable[[Any], Layout] | None = None
    """Job -> what travels, if that is not the plan's model."""
    jobs: Callable[[Any], tuple[Any, ...]] = lambda job: (job,)
    """Job -> the jobs of the models that clients train."""
    own_model: Callable[[Any, Sequence[Callable[[], nn.Module]], int, Tensor, State], nn.Module] | None = None
    """(job, makers of the plan's models, client, what travels, memory) -> the client's model; None if all share one."""
    num_passes: Callable[[Any, Task, bool], int] | None = None
    """(job, task, whether it is the client's first) -> samples trained on, every pass counted; None: as in `local`."""
    uses_algorithm: bool = False
    """Whether the client's half of the algorithm takes part: its loss, gradient and what it sends."""
    copies: int | None = None
    """How many copies of the plan's model travel, each with first values of its own; None: one of each model."""
    stackable: bool = False
    """Whether its clients run the local loop, so that many may be trained as one."""

    @property
    def personal(self) -> bool:
        """Whether each client has a model of its own, and there is none that all share."""
        return self.own_model is not None

    @property
    def sends_models(self) -> bool:
        """Whether what travels are models, one or several, and not something that clients make of theirs."""
        return self.own_model is None or self.copies is not None

    @property
    def always_has_loss(self) -> bool:
        """Whether every client reports a training loss; those of other works may have none."""
        return self.uses_algorithm
