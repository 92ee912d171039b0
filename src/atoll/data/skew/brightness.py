"""Feature skew: a gain and an offset for each client. Shapes: C clients, S samples."""

from __future__ import annotations

from atoll.core.options import Seed, ShareAboveZero
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, generator
from atoll.data.shares import Amount
from atoll.data.skew.features import with_features

PURPOSE = 114


def brightness(
    dataset: Dataset, partition: Partition, *, seed: Seed = 0, gain: ShareAboveZero = 0.5, offset: Amount = 0.2
) -> Partition:
    """Change contrast and brightness of all samples of a client: a x + b, a ~ U(1 ± gain), b ~ U(± offset).

    The offset is in the units of a model's input; images are usually in [0, 1]. Covariate shift: P(x) differs between
    clients (Kairouz et al. 2021, arXiv:1912.04977, sec. 3.1).
    """
    rng = generator(seed, PURPOSE)
    gain_C = rng.uniform(1 - gain, 1 + gain, partition.num_clients)
    offset_C = rng.uniform(-offset, offset, partition.num_clients) / dataset.scale

    def brighten(client: int, x_S: Array) -> Array:
        return x_S * float(gain_C[client]) + float(offset_C[client])

    return with_features("brightness", dataset, partition, brighten)
