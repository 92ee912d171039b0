"""A partition followed by skews."""

from __future__ import annotations

from dataclasses import replace

from atoll.core.errors import PlanError
from atoll.core.options import Seed
from atoll.core.parts import Part, members
from atoll.data.dataset import Dataset
from atoll.data.index import Clients, Partition

EXAMPLE = {"parts": ["shards", "noise"]}


def mixture(dataset: Dataset, *, parts: list[Part], num_clients: Clients | None = None, seed: Seed = 0) -> Partition:
    """Assign the samples by the first part, a partition, and change them by each of the others, a skew, in order.

    Real federations mix several kinds of skew (Kairouz et al. 2021, arXiv:1912.04977, sec. 3.1). In Python write
    `Part("dirichlet", alpha=0.1) | Part("rotation")`. `num_clients` is an option of the first part, unless it sets its
    own.
    """
    if not parts:
        raise PlanError(
            "mixture: parts must be a partition and then skews, got []: "
            'write parts = [{name = "dirichlet", alpha = 0.1}, "rotation"]'
        )
    first, *skews = map(Part.of, parts)
    options = {} if num_clients is None else {"num_clients": num_clients}
    partition = _checked(first, dealer(first).build("data.partition", dataset, seed=seed, **options))
    for part in skews:
        if part.name in members("data.partition") and part.name not in members("data.skew"):
            raise PlanError(
                f"'{part.name}' deals data out, so it can only be the first part of a mixture; "
                f"the others are skews: {', '.join(members('data.skew'))}"
            )
        current = partition.dataset or dataset
        partition = _checked(part, part.build("data.skew", current, partition, seed=seed))
        if partition.dataset is None and current is not dataset:
            partition = replace(partition, dataset=current)
    return partition


def dealer(part: Part) -> Part:
    """Return the part if it is a partition; refuse a skew, which can only follow a partition."""
    if part.name in members("data.skew") and part.name not in members("data.partition"):
        raise PlanError(
            f"'{part.name}' is a skew: it changes the result of a partition. Write Part(\"iid\") | "
            f'Part("{part.name}"), or name = "mixture" and parts = ["iid", "{part.name}"]'
        )
    return part


def _checked(part: Part, partition: object) -> Partition:
    if not isinstance(partition, Partition):
        raise PlanError(
            f"'{part.name}' gave {type(partition).__name__}: make a partition with dealt of atoll.data.index"
        )
    return partition
