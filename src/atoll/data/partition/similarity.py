"""Label similarity between IID and sorted. Shapes: N training samples."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Range, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Clients, Partition, class_labels, dealt, even_offsets, generator, no_empty_clients

PURPOSE = 108


def similarity(
    dataset: Dataset,
    *,
    num_clients: Clients = 10,
    seed: Seed = 0,
    gamma: Annotated[float, Range(0, 1, hint="it is the share that is dealt IID")] = 0.0,
) -> Partition:
    """Deal a share gamma of the samples IID; sort the rest by label and cut it into equal pieces, one a client.

    (Hsu et al. 2019, arXiv:1909.06335, and Karimireddy et al. 2020, arXiv:1910.06378, section 7, "s % similar".) At
    gamma = 1 clients are IID; at 0 each holds one stretch of the sorted labels, and the clients are in their order.
    """
    if not 0 <= gamma <= 1:
        raise PlanError(f"similarity.gamma is the share that is dealt IID, from 0 to 1: got {gamma}")
    labels_N = class_labels("similarity", dataset)
    no_empty_clients("similarity", dataset, num_clients, way_out=": lower num_clients")
    order_N = generator(seed, PURPOSE).permutation(dataset.num_train)
    cut = int(gamma * dataset.num_train)
    alike, rest = order_N[:cut], order_N[cut:]
    sorted_rest = rest[np.argsort(labels_N[rest], kind="stable")]
    some, more = even_offsets(len(alike), num_clients), even_offsets(len(rest), num_clients)
    pieces = [
        piece
        for client in range(num_clients)
        for piece in (alike[some[client] : some[client + 1]], sorted_rest[more[client] : more[client + 1]])
    ]
    return dealt(np.concatenate(pieces), some + more)
