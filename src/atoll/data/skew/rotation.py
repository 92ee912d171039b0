"""Feature skew: images rotated by an angle for each client. Shapes: S samples, I channels, H height, W width."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from atoll.core.options import Range, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, generator
from atoll.data.skew.features import resampled, with_images

PURPOSE = 112


def rotation(
    dataset: Dataset,
    partition: Partition,
    *,
    seed: Seed = 0,
    degrees: Annotated[float, Range(0, 180, open_low=True)] = 45.0,
) -> Partition:
    """Rotate all images of a client by an angle of its own, uniform in ± `degrees`.

    Covariate shift: P(x) differs between clients (Kairouz et al. 2021, arXiv:1912.04977, sec. 3.1).
    """
    max_angle = np.deg2rad(degrees)
    angle_C = generator(seed, PURPOSE).uniform(-max_angle, max_angle, partition.num_clients)

    def rotate(client: int, x_SIHW: Array) -> Array:
        cos, sin = np.cos(angle_C[client]), np.sin(angle_C[client])
        return resampled(x_SIHW, np.array([[cos, sin], [-sin, cos]]))

    return with_images("rotation", dataset, partition, rotate)
