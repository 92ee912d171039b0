"""Independent, identically distributed clients. Shapes: S samples of one client."""

from __future__ import annotations

from functools import partial

from atoll.core.options import Count, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import (
    Array,
    Clients,
    Partition,
    dealt,
    drawable,
    drawn,
    even_offsets,
    generator,
    no_empty_clients,
)

PURPOSE = 101


def iid(
    dataset: Dataset, *, num_clients: Clients = 10, seed: Seed = 0, samples_per_client: Count | None = None
) -> Partition:
    """Split a random permutation into parts of equal size up to one (McMahan et al. 2017, arXiv:1602.05629, sec. 3).

    With `samples_per_client` each client independently draws that many distinct samples, so that there may be any
    number of clients; two clients may then hold the same sample.
    """
    if samples_per_client is not None:
        draw = partial(draw_iid, dataset.num_train, drawable(dataset, samples_per_client), seed)
        return drawn(num_clients, samples_per_client, draw)
    no_empty_clients("iid", dataset, num_clients, way_out=", or set samples_per_client so that clients may overlap")
    permutation = generator(seed, PURPOSE).permutation(dataset.num_train)
    return dealt(permutation, even_offsets(dataset.num_train, num_clients))


def draw_iid(pool: int | Array, samples_per_client: int, seed: int, client: int) -> Array:
    """Return distinct samples of a client, of the first so many or of those given, (S,)."""
    return generator(seed, PURPOSE, client).choice(pool, samples_per_client, replace=False)
