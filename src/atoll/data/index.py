"""Partition: the training samples of each client. Shapes: C clients, N training samples, S samples of one client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, final

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Range
from atoll.data.dataset import Dataset
from atoll.data.targets import BINARY

Array = np.ndarray[Any, np.dtype[Any]]
Draw = Callable[[int], Array]
"""(client) -> indices of its training samples, (S,)."""
Clients = Annotated[int, Range(1, 10**9)]
"""Number of clients."""


@dataclass(frozen=True, eq=False)
class Partition(ABC):
    """The training samples of each client; make one with `dealt` or `drawn`."""

    num_clients: int
    dataset: Dataset | None = field(default=None, kw_only=True)
    """The samples as a skew has changed them, see `changed`; None: those of the original data set."""

    @abstractmethod
    def indices(self, client: int) -> Array:
        """Return the training samples of one client, (S,) int64."""

    @abstractmethod
    def size(self, client: int) -> int:
        """Return the number of samples of one client."""

    @abstractmethod
    def sizes(self) -> Array:
        """Return the number of samples of every client, (C,) int64."""

    def _check(self, client: int) -> None:
        if not 0 <= client < self.num_clients:
            raise PlanError(f"there is no client {client}: this partition has clients 0 to {self.num_clients - 1}")


@final
@dataclass(frozen=True, eq=False)
class Dealt(Partition):
    """Disjoint parts: client c holds `samples[offsets[c]:offsets[c + 1]]`."""

    samples: Array
    offsets: Array

    def indices(self, client: int) -> Array:
        self._check(client)
        return self.samples[self.offsets[client] : self.offsets[client + 1]].astype(np.int64)

    def size(self, client: int) -> int:
        self._check(client)
        return int(self.offsets[client + 1] - self.offsets[client])

    def sizes(self) -> Array:
        return np.diff(self.offsets)


@final
@dataclass(frozen=True, eq=False)
class Drawn(Partition):
    """Parts that are drawn on demand, so that a million clients cost no more than one; they may overlap."""

    samples_per_client: int
    draw: Draw

    def indices(self, client: int) -> Array:
        self._check(client)
        drawn_S = np.asarray(self.draw(client), dtype=np.int64)
        if drawn_S.shape != (self.samples_per_client,):
            raise PlanError(
                f"draw({client}) returned shape {drawn_S.shape}; it must return samples_per_client = "
                f"{self.samples_per_client} indices"
            )
        return drawn_S

    def size(self, client: int) -> int:
        self._check(client)
        return self.samples_per_client

    def sizes(self) -> Array:
        return np.full(self.num_clients, self.samples_per_client, dtype=np.int64)


@final
@dataclass(frozen=True, eq=False)
class Joined(Partition):
    """The clients of one partition, then those of another, which may hold the same samples."""

    first: Partition
    second: Partition

    def indices(self, client: int) -> Array:
        partition, number = self._where(client)
        return partition.indices(number)

    def size(self, client: int) -> int:
        partition, number = self._where(client)
        return partition.size(number)

    def sizes(self) -> Array:
        return np.concatenate([self.first.sizes(), self.second.sizes()])

    def _where(self, client: int) -> tuple[Partition, int]:
        self._check(client)
        before = self.first.num_clients
        return (self.first, client) if client < before else (self.second, client - before)


def dealt(samples: Array, offsets: Array) -> Partition:
    """Assign the samples `samples[offsets[c]:offsets[c + 1]]` to client c.

    >>> dealt(np.array([3, 1, 0, 2]), np.array([0, 1, 4])).indices(1)
    array([1, 0, 2])
    """
    offsets = np.asarray(offsets, dtype=np.int64)
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(samples) or (np.diff(offsets) < 0).any():
        raise PlanError(
            f"offsets must rise from 0 to the {len(samples)} samples dealt, one more than there are clients: "
            f"got {len(offsets)} from {offsets[:1]} to {offsets[-1:]}"
        )
    return Dealt(num_clients=len(offsets) - 1, samples=np.asarray(samples), offsets=offsets)


def drawn(num_clients: int, samples_per_client: int, draw: Draw) -> Partition:
    """Assign the samples `draw(client)` to a client, drawn on demand.

    `draw` must be deterministic and picklable for worker processes: a `functools.partial`, not a lambda.
    """
    return Drawn(num_clients=num_clients, samples_per_client=samples_per_client, draw=draw)


def joined(first: Partition, second: Partition) -> Partition:
    """Append the clients of a second partition to those of the first, on the samples of the first.

    >>> joined(dealt(np.arange(3), np.array([0, 1, 3])), dealt(np.arange(3), np.array([0, 3]))).indices(2)
    array([0, 1, 2])
    """
    num_clients = first.num_clients + second.num_clients
    return Joined(num_clients=num_clients, first=first, second=second, dataset=first.dataset)


def subset(partition: Partition, clients: Sequence[int]) -> Dealt:
    """Return some clients of a partition, numbered anew in the given order.

    >>> subset(dealt(np.array([3, 1, 0, 2]), np.array([0, 1, 4])), [1]).indices(0)
    array([1, 0, 2])
    """
    parts = [partition.indices(client) for client in clients]
    offsets = np.cumsum([0, *map(len, parts)])
    return Dealt(len(parts), np.concatenate(parts), offsets, dataset=partition.dataset)


def changed(partition: Partition, dataset: Dataset) -> Partition:
    """Return the same partition of changed samples, for skews that change a client's features or labels.

    Each sample must belong to one client, so that partitions with overlapping clients are refused.
    """
    return replace(disjoint(partition), dataset=dataset)


def disjoint(partition: Partition) -> Dealt:
    """Return the partition if no two clients can hold the same sample; refuse it otherwise."""
    if not isinstance(partition, Dealt):
        raise PlanError(
            "clients that draw their samples may share some, which cannot be changed for a single client: "
            "leave samples_per_client out"
        )
    return partition


def generator(seed: int, *purpose: int) -> np.random.Generator:
    """Return a generator that depends only on the seed and the purpose."""
    return np.random.default_rng([seed, *purpose])


def even_offsets(num_samples: int, num_parts: int) -> Array:
    """Return the offsets of parts whose sizes differ by at most one, (num_parts + 1,)."""
    return np.arange(num_parts + 1, dtype=np.int64) * num_samples // num_parts


def no_empty_clients(rule: str, dataset: Dataset, num_clients: int, *, way_out: str) -> None:
    """Refuse more clients than training samples."""
    if num_clients > dataset.num_train:
        raise PlanError(
            f"{rule} cannot deal the {dataset.num_train} training samples of {dataset.name} to {num_clients} clients: "
            f"some would be empty; ask for at most {dataset.num_train} clients{way_out}"
        )


def drawable(dataset: Dataset, samples_per_client: int) -> int:
    """Return samples_per_client if one client can draw that many different samples."""
    if samples_per_client > dataset.num_train:
        raise PlanError(
            f"samples_per_client is {samples_per_client}, but {dataset.name} has {dataset.num_train} training samples, "
            "and a client draws each at most once; lower it"
        )
    return samples_per_client


def class_labels(rule: str, dataset: Dataset) -> Array:
    """Return the training labels (N,); refuse data whose samples have a sequence of labels, or numbers instead."""
    if dataset.problem == BINARY:
        return dataset.train_y.astype(np.int64)
    if not dataset.has_classes:
        raise PlanError(
            f"{rule} deals by label, but {dataset.name} has targets for {dataset.problem}, no classes; "
            "use partition = 'natural' or 'iid'"
        )
    if dataset.train_y.ndim != 1:
        raise PlanError(
            f"{rule} deals by label, but each sample of {dataset.name} has {dataset.train_y.shape[1]} of them "
            "(a sequence); use partition = 'natural' or 'iid'"
        )
    return dataset.train_y
