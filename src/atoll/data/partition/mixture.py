"""Several kinds of skew at once: what one partition deals out, skews change in turn."""

from __future__ import annotations

from dataclasses import replace

from atoll.core.errors import PlanError
from atoll.core.options import Seed
from atoll.core.parts import Part, members
from atoll.data.dataset import Dataset
from atoll.data.index import Clients, Partition

EXAMPLE = {"parts": ["shards", "noise"]}


def mixture(dataset: Dataset, *, parts: list[Part], num_clients: Clients | None = None, seed: Seed = 0) -> Partition:
    """Deal the data out by the first part, a partition, and let each of the others, a skew, change what was dealt.

    Real federations mix the kinds of skew (Kairouz et al. 2021, arXiv:1912.04977, sec. 3.1). In Python it is written
    `Part("dirichlet", alpha=0.1) | Part("rotation")`. `num_clients` goes to the first part unless that says it itself.
    """
    if not parts:
        raise PlanError(
            "mixture: parts must be a partition and then skews, got []: "
            'write parts = [{name = "dirichlet", alpha = 0.1}, "rotation"]'
        )
    first, *others = map(Part.of, parts)
    asked = {} if num_clients is None else {"num_clients": num_clients}
    partition = _checked(first, dealer(first).build("data.partition", dataset, seed=seed, **asked))
    for part in others:
        if part.name in members("data.partition") and part.name not in members("data.skew"):
            raise PlanError(
                f"'{part.name}' deals data out, so it can only be the first part of a mixture; "
                f"the others are skews: {', '.join(members('data.skew'))}"
            )
        held = partition.dataset or dataset
        partition = _checked(part, part.build("data.skew", held, partition, seed=seed))
        if partition.dataset is None and held is not dataset:
            partition = replace(partition, dataset=held)
    return partition


def dealer(part: Part) -> Part:
    """Return a part that deals data out, or refuse a skew, which can only change what another has dealt."""
    if part.name in members("data.skew") and part.name not in members("data.partition"):
        raise PlanError(
            f"'{part.name}' is a skew: it changes what a partition has dealt. Write Part(\"iid\") | "
            f'Part("{part.name}"), or name = "mixture" and parts = ["iid", "{part.name}"]'
        )
    return part


def _checked(part: Part, made: object) -> Partition:
    if not isinstance(made, Partition):
        raise PlanError(f"'{part.name}' gave {type(made).__name__}: make a partition with dealt of atoll.data.index")
    return made
