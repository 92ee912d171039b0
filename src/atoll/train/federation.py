"""Federation: a data set dealt out to clients, ready for training. Shapes: B samples of a batch."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from atoll.checks.table import check
from atoll.checks.views import NewClients, ServerSamples
from atoll.core.client_work import Samples
from atoll.core.errors import DataError, PlanError
from atoll.core.messages import SERVER
from atoll.core.parts import Part, members
from atoll.core.plan import Plan
from atoll.core.problem import Problem
from atoll.core.seeds import derive, generator
from atoll.data.dataset import Dataset, Public, as_public
from atoll.data.index import Dealt, Partition, drawn, joined, subset
from atoll.data.partition.iid import draw_iid
from atoll.data.partition.mixture import dealer
from atoll.data.rows import ChainedRows, LazyFeatures, Rows
from atoll.train.shared_rows import shared_rows


class Federation:
    """Who holds which samples. Nothing is copied: a client is a list of indices into the shared training set.

    New clients are numbered after all others, which keep their order: whoever counts or asks the clients of `partition`
    and `num_clients` leaves them out.
    """

    def __init__(
        self,
        dataset: Dataset,
        partition: Partition,
        *,
        seed: int = 0,
        holdout: float = 0.0,
        validation: float = 0.0,
        server_samples: int = 0,
        server_source: str = "clients",
        public: Public | None = None,
        num_added: int = 0,
        num_new: int = 0,
    ) -> None:
        dataset = partition.dataset or dataset
        _no_empty_client(partition)
        self.new_numbers = _picked_apart(partition, num_new, holdout, seed)
        """The new clients as the plan's partition numbers them."""
        self._pool: int | np.ndarray = dataset.num_train
        """The samples that no new client holds, or the number of all."""
        new = subset(partition, self.new_numbers) if num_new else None
        if new is not None:
            self._pool = np.setdiff1d(np.arange(dataset.num_train), new.samples)
            partition = subset(partition, sorted({*range(partition.num_clients)} - {*self.new_numbers}))
        partition = _with_added(partition, num_added, seed, self._pool)
        self.dataset, self.partition, self.public = dataset, partition, public
        self.num_clients = partition.num_clients
        self.added = range(self.num_clients - num_added, self.num_clients)
        """Clients that only attack: nothing is measured on them."""
        self.everybody = partition if new is None else joined(partition, new)
        """The clients of `partition`, then the new ones."""
        self.new_clients = range(self.num_clients, self.everybody.num_clients)
        """Clients that take no part in training, and whose samples nobody else holds."""
        self.train_x, self.train_y = _stored(dataset.train_x), _tensor(dataset.train_y)
        """The clients' samples; after them those that the server took from the public ones, if it did."""
        self.test_x, self.test_y = _stored(dataset.test_x), _tensor(dataset.test_y)
        self._seed, self.holdout, self.validation = seed, holdout, validation
        self._server_indices = self._picked(server_samples, server_source)
        self.max_samples = max(int(self.everybody.sizes().max()), server_samples)
        self.num_samples = lru_cache(maxsize=100_000)(self._num_samples)

    def _num_samples(self, client: int) -> int:
        """How many samples a client, or the server, trains on."""
        if client == SERVER:
            return len(self._server_indices)
        return int(self.training_sizes(np.array(self.everybody.size(client))))

    def training_sizes(self, size_C: np.ndarray) -> np.ndarray:
        """Return how many samples clients train on that have so many."""
        held_C, chosen_by_C = (np.floor(share * size_C).astype(np.int64) for share in (self.holdout, self.validation))
        sizes_C: np.ndarray = size_C - held_C - chosen_by_C
        return sizes_C

    def train_indices(self, client: int) -> np.ndarray:
        """The samples that a client, or the server, trains on."""
        if client == SERVER:
            return self._server_indices
        indices = self.everybody.indices(client)
        if not (self.holdout or self.validation):
            return indices
        return self._shuffled(indices, client)[: self.num_samples(client)]

    def evaluation_indices(self, client: int) -> np.ndarray:
        """The samples that a client is evaluated on: those held out, or else all that it has."""
        indices = self.everybody.indices(client)
        held = int(self.holdout * len(indices))
        return self._shuffled(indices, client)[len(indices) - held :] if held else indices

    def validation_samples(self, client: int) -> Samples:
        """Return the samples that a client chooses between models by, all that it trains on if none are set apart."""
        size = self.everybody.size(client)
        first, num = self.num_samples(client), int(self.validation * size)
        indices = self._shuffled(self.everybody.indices(client), client)[first : first + num]
        indices = indices if num else self.train_indices(client)
        return Samples(client, len(indices), lambda: self._loaded(indices))

    def _picked(self, num: int, source: str) -> np.ndarray:
        """The samples that the server keeps a copy of; public ones, which no client holds, go behind the others."""
        num_held = self._pool if isinstance(self._pool, int) else len(self._pool)
        check(ServerSamples(num, source, num_held, self.public))
        public = self.public if num and source == "public" else None
        pool = self._pool if public is None else len(public.x)
        picked = np.sort(generator(self._seed, "server samples").choice(pool, size=num, replace=False))
        if public is None:
            return picked
        assert public.y is not None
        held, own = len(self.train_y), [torch.from_numpy(each[picked]) for each in (public.x, public.y)]
        if isinstance(self.train_x, LazyFeatures):
            chained = ChainedRows(self.train_x, own[0].numpy())
            self.train_x = LazyFeatures(chained, self.train_x.name, self.train_x.tokens)
        else:
            self.train_x = torch.cat([self.train_x, own[0]])
        self.train_y = torch.cat([self.train_y, own[1]])
        return np.arange(held, held + num)

    def _shuffled(self, indices: np.ndarray, client: int) -> np.ndarray:
        return generator(self._seed, "holdout", client).permutation(indices)

    def test_samples(self, start: int, num: int, client: int = SERVER) -> Samples:
        """Return a slice of the test set, for the shared model or for that of a client."""
        stop = min(start + num, self.dataset.num_test)

        def load() -> tuple[Tensor, Tensor]:
            return self.tested(start, stop)

        groups = self.dataset.test_groups
        return Samples(client, stop - start, load, None if groups is None else groups[start:stop])

    def client_samples(self, client: int, *, evaluation: bool = False) -> Samples:
        """Return the samples that a client, or the server, trains on, or those that it is evaluated on."""
        if not evaluation:
            return Samples(client, self.num_samples(client), lambda: self._loaded(self.train_indices(client)))
        indices = self.evaluation_indices(client)
        return Samples(client, len(indices), lambda: self._loaded(indices))

    def evaluation_slices(self, client: int, num: int) -> list[Samples]:
        """Return the samples that a client is evaluated on, at most `num` at a time."""
        indices = self.evaluation_indices(client)
        cuts = [indices[start : start + num] for start in range(0, len(indices), num)]
        return [Samples(client, len(cut), partial(self._loaded, cut)) for cut in cuts]

    def _loaded(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        picked = torch.from_numpy(indices)
        return self.features(self.take(picked)), self.targets(picked)

    def tested(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return features, as a model wants them, and targets of a part of the test set."""
        return self.features(torch.as_tensor(self.test_x[start:stop])), self.test_y[start:stop]

    def targets(self, indices: Tensor) -> Tensor:
        """Return the targets of training samples, at indices of any shape."""
        return self.train_y[indices]

    def take(self, indices: Tensor) -> Tensor:
        """Return training samples as they are stored, at indices of any shape."""
        if isinstance(self.train_x, LazyFeatures):
            read = torch.from_numpy(self.train_x[indices.flatten().numpy()])
            return read.view(*indices.shape, *read.shape[1:])
        if indices.dim() == 1:
            return self.train_x[indices]
        rows = self.train_x.flatten(1).index_select(0, indices.flatten())  # much faster than indexing
        return rows.view(*indices.shape, *self.train_x.shape[1:])

    def first(self, num: int) -> tuple[Tensor, Tensor]:
        """Return the first training samples, as a model wants them, and their targets: to try parts of a plan on."""
        indices = torch.arange(min(num, len(self.train_y)))
        return self.features(self.take(indices)), self.targets(indices)

    def features(self, raw: Tensor) -> Tensor:
        """Features as a model wants them: scaled floats, or token ids."""
        return raw.long() if self.dataset.tokens else _scaled(raw, self.dataset.scale, self.dataset.shift)

    def public_features(self, indices: np.ndarray) -> Tensor:
        """Public samples as a model wants them."""
        assert self.public is not None
        raw = torch.from_numpy(self.public.x[indices])
        return raw.long() if self.dataset.tokens else _scaled(raw, self.public.scale, self.public.shift)


def _no_empty_client(partition: Partition) -> None:
    sizes = partition.sizes()
    if sizes.min() < 1:
        empty = int(sizes.argmin())
        raise DataError(
            f"client {empty} has no samples, and {int((sizes < 1).sum())} of {partition.num_clients} are empty: "
            "use fewer clients (partition.num_clients), a milder skew, or min_samples = 1"
        )


def _measurable(partition: Partition, holdout: float) -> np.ndarray:
    """Return the clients of whose samples some are held out."""
    return np.flatnonzero(np.floor(holdout * partition.sizes()) >= 1)


def _picked_apart(partition: Partition, num: int, holdout: float, seed: int) -> list[int]:
    """Pick new clients, of those with held-out samples: owners may be sorted, so that the last ones are not any."""
    if not num:
        return []
    picked: list[int] = generator(seed, "new clients").choice(_measurable(partition, holdout), num, False).tolist()
    return sorted(picked)


def _with_added(partition: Partition, num: int, seed: int, pool: int | np.ndarray) -> Partition:
    """Let clients join that only attack, each with as many samples as a middling one, drawn from all of the pool."""
    if not num:
        return partition
    size = max(1, int(np.median(partition.sizes())))
    return joined(partition, drawn(num, size, partial(draw_iid, pool, size, derive(seed, "added"))))


def _scaled(raw: Tensor, scale: float, shift: float) -> Tensor:
    x = raw.to(torch.float32, copy=True)  # then in place: several times faster than letting torch promote bytes
    x = x.mul_(scale) if scale != 1 else x
    return x.add_(shift) if shift else x


def _stored(features: np.ndarray | Rows) -> Tensor | LazyFeatures:
    """The features as a tensor, or as they are if they are read by index."""
    return features if isinstance(features, LazyFeatures) else _tensor(np.asarray(features))


def _tensor(array: np.ndarray) -> Tensor:
    """The same numbers as a tensor, without a copy if torch can take them as they lie.

    A dimension of one has any stride in NumPy, and torch would choose how to convolve by it: it gets the usual one.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes to it
        tensor = torch.from_numpy(array if all(stride >= 0 for stride in array.strides) else array.copy())
    return tensor.view(-1).view(tensor.shape) if tensor.is_contiguous() else tensor


def build_federation(plan: Plan) -> Federation:
    """Load the plan's data and deal them out."""
    dataset, public = _with_public(load_dataset(plan), plan)
    if not dataset.num_test:
        raise DataError(f"{dataset.name}: test: there are no samples; give at least one, to measure the model on")
    if plan.split is not None and plan.split.parties:
        partition: Partition = shared_rows(plan.split, dataset, plan.seed)
    else:
        partition = dealer(plan.partition).build("data.partition", dataset, seed=plan.seed)
    if not isinstance(partition, Partition):
        raise PlanError(
            f"partition '{plan.partition.name}' gave {type(partition).__name__}: "
            "make one with dealt or drawn of atoll.data.index"
        )
    if plan.evaluation.new_clients is not None:
        num_measurable = len(_measurable(partition, plan.evaluation.holdout))
        disjoint = isinstance(partition, Dealt) and len(np.unique(partition.samples)) == len(partition.samples)
        policy = plan.policy.build("rounds")
        check(NewClients(plan, policy, partition.num_clients, num_measurable, disjoint))
    return Federation(
        dataset,
        partition,
        seed=plan.seed,
        holdout=plan.evaluation.holdout,
        validation=plan.evaluation.validation or 0.0,
        server_samples=plan.server.samples or 0,
        server_source=plan.server.source or "clients",
        public=public,
        num_added=(plan.attackers.added or 0) if plan.attack else 0,
        num_new=plan.evaluation.new_clients or 0,
    )


def load_dataset(plan: Plan) -> Dataset:
    """Return the plan's data, with targets for its problem."""
    return with_problem(plan, _dataset(plan.data, "data"))


def with_problem(plan: Plan, dataset: Dataset) -> Dataset:
    """Return a data set with targets for the plan's problem, if it names one."""
    problem = None if plan.problem is None else plan.problem.build("problems")
    return dataset.for_problem(problem.kind) if isinstance(problem, Problem) else dataset


def _dataset(part: Part, where: str) -> Dataset:
    dataset = part.build("data.catalog")
    if not isinstance(dataset, Dataset):
        raise PlanError(f"{where} '{part.name}' gave {type(dataset).__name__}: it must return an atoll.Dataset")
    return dataset


def _with_public(dataset: Dataset, plan: Plan) -> tuple[Dataset, Public | None]:
    """What is left for the clients, and what is public."""
    if plan.public is None:
        return dataset, None
    if plan.public.name in members("data.public"):
        found: tuple[Dataset, Public] = plan.public.build("data.public", dataset, seed=plan.seed)
        return found
    return dataset, as_public(_dataset(plan.public, "public"), dataset)
