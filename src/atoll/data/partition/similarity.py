"""Label skew between IID and sorted. Shapes: N training samples."""

from __future__ import annotations

from typing import Annotated

import numpy as np

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
    """Assign a share gamma of the samples IID; sort the rest by label and cut it into one equal piece per client.

    (Hsu et al. 2019, arXiv:1909.06335, and Karimireddy et al. 2020, arXiv:1910.06378, section 7, "s % similar".) At
    gamma = 1 clients are IID; at 0 each holds one range of the sorted labels, in the order of the clients.
    """
    labels_N = class_labels("similarity", dataset)
    no_empty_clients("similarity", dataset, num_clients, way_out=": lower num_clients")
    shuffled_N = generator(seed, PURPOSE).permutation(dataset.num_train)
    cut = int(gamma * dataset.num_train)
    alike, rest = shuffled_N[:cut], shuffled_N[cut:]
    by_label = rest[np.argsort(labels_N[rest], kind="stable")]
    alike_ends, label_ends = even_offsets(len(alike), num_clients), even_offsets(len(rest), num_clients)
    pieces = [
        piece
        for client in range(num_clients)
        for piece in (
            alike[alike_ends[client] : alike_ends[client + 1]],
            by_label[label_ends[client] : label_ends[client + 1]],
        )
    ]
    return dealt(np.concatenate(pieces), alike_ends + label_ends)
