"""The training rows of parties that hold different columns: those that all of them hold, in one order."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from atoll.alignment.local import align
from atoll.alignment.machines import committed_tag, must_be_same
from atoll.core.errors import PlanError
from atoll.core.seeds import generator
from atoll.core.split import Split
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, drawn


def shared_rows(split: Split, dataset: Dataset, seed: int) -> Partition:
    """Return a partition in which every party of a plan has the same rows in the same order.

    Where parties lack rows, each holds others in an order of its own, and they join them by private set intersection of
    their ids, which are the numbers of the rows.
    """
    names = tuple(party.name for party in split.parties or ())
    rows = np.arange(dataset.num_train)
    if split.missing:
        rows = _joined_rows(dataset.num_train, names, split.label_holder, split.missing, seed)
    return drawn(len(names), len(rows), partial(_same, rows))


@lru_cache(maxsize=4)
def _joined_rows(num: int, names: tuple[str, ...], owner: int, missing: float, seed: int) -> Array:
    """Return the rows that all parties hold, in rising order: the alignment's own order differs in every session."""
    kept = max(1, round((1 - missing) * num))
    held = {
        name: generator(seed, "rows of a party", number).permutation(num)[:kept] for number, name in enumerate(names)
    }
    if len(names) == 1:
        return np.sort(held[names[0]])
    if not set.intersection(*(set(rows.tolist()) for rows in held.values())):
        raise PlanError(
            f"split.missing is {missing}, so that no row of {num} is held by all {len(names)} parties: lower it"
        )
    ids = {name: [str(row) for row in rows] for name, rows in held.items()}
    found = align(ids, names[owner], rule="exact").aligned
    aligned = {name: held[name][list(found[name].rows)] for name in names}
    must_be_same({name: committed_tag(found[name].key, [str(row) for row in rows]) for name, rows in aligned.items()})
    return np.sort(aligned[names[owner]])


def _same(rows: Array, client: int) -> Array:
    return rows
