"""Federation: a data set dealt out to clients, ready for training. Shapes: B samples of a batch."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import DataError
from atoll.core.plan import Plan
from atoll.core.seeds import generator

if TYPE_CHECKING:
    from atoll.data.dataset import Dataset
    from atoll.data.index import Partition


class Federation:
    """Who holds which samples. Nothing is copied: a client is a list of indices into the shared training set."""

    def __init__(self, dataset: Dataset, partition: Partition, *, seed: int = 0, holdout: float = 0.0) -> None:
        self.dataset, self.partition = dataset, partition
        self.num_clients = partition.num_clients
        self.train_x, self.train_y = torch.from_numpy(dataset.train_x), torch.from_numpy(dataset.train_y)
        self.test_x, self.test_y = torch.from_numpy(dataset.test_x), torch.from_numpy(dataset.test_y)
        self._seed, self._holdout = seed, holdout
        sizes = partition.sizes()
        if sizes.min() < 1:
            empty = int(sizes.argmin())
            raise DataError(
                f"client {empty} has no samples, and {int((sizes < 1).sum())} of {self.num_clients} are empty: "
                "use fewer clients (partition.num_clients), a milder skew, or min_samples = 1"
            )
        self.max_samples = int(sizes.max())
        self.num_samples = lru_cache(maxsize=100_000)(self._num_samples)

    def _num_samples(self, client: int) -> int:
        """How many samples a client trains on."""
        size = self.partition.size(client)
        return size - int(self._holdout * size)

    def train_indices(self, client: int) -> np.ndarray:
        """The samples that a client trains on."""
        indices = self.partition.indices(client)
        return self._shuffled(indices, client)[: self.num_samples(client)] if self._holdout else indices

    def evaluation_indices(self, client: int) -> np.ndarray:
        """The samples that a client is evaluated on: those held out, or else all that it has."""
        indices = self.partition.indices(client)
        held = self._shuffled(indices, client)[self.num_samples(client) :] if self._holdout else indices
        return held if len(held) else indices

    def _shuffled(self, indices: np.ndarray, client: int) -> np.ndarray:
        return generator(self._seed, "holdout", client).permutation(indices)

    def features(self, raw: Tensor) -> Tensor:
        """Features as a model wants them: scaled floats, or token ids."""
        if self.dataset.tokens:
            return raw.long()
        x = raw if raw.dtype.is_floating_point else raw.float()
        if self.dataset.scale != 1:
            x = x * self.dataset.scale
        return x + self.dataset.shift if self.dataset.shift else x


def build_federation(plan: Plan) -> Federation:
    """Load the plan's data and deal them out."""
    dataset = plan.data.build("data.catalog")
    partition = plan.partition.build("data.partition", dataset, seed=plan.seed)
    return Federation(dataset, partition, seed=plan.seed, holdout=plan.evaluation.holdout)
