"""Feature skew: groups of clients with their own drawing style.

Shapes: C clients, G groups, S samples of a client, I channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from atoll.core.options import Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, generator
from atoll.data.rows import extremes
from atoll.data.shares import Groups, random_groups
from atoll.data.skew.features import resampled, with_images

PURPOSE = 115
MAX_SLANT = 0.5
"""Largest shear: columns per row."""
PEN = (1, 1, 2, 2)
"""Window of dilation and erosion: samples, channels, rows, columns."""


def styles(dataset: Dataset, partition: Partition, *, seed: Seed = 0, num_groups: Groups = 4) -> Partition:
    """Change the images of each group of clients to its own style: slant, thickness of strokes, inverted or not.

    Slants (shears) are spread over ± 0.5 and thicknesses from eroded to dilated strokes, both assigned to the groups at
    random; every other group is inverted. P(x|y) differs between groups, P(y) does not (Kairouz et al. 2021,
    arXiv:1912.04977, sec. 3.1, concept drift).
    """
    rng = generator(seed, PURPOSE)
    group_C = random_groups(partition.num_clients, num_groups, rng)
    slant_G = rng.permutation(np.linspace(-MAX_SLANT, MAX_SLANT, num_groups))
    thickness_G = rng.permutation(np.linspace(-1.0, 1.0, num_groups))
    inverted_G = rng.permutation(num_groups) % 2 == 1
    range_sum = float(sum(map(float, extremes(dataset.train_x))))

    def restyle(client: int, x_SIHW: Array) -> Array:
        group = group_C[client]
        slanted = resampled(x_SIHW, np.array([[1.0, 0.0], [slant_G[group], 1.0]]))
        stroked = _change_strokes(slanted, float(thickness_G[group]))
        return range_sum - stroked if inverted_G[group] else stroked

    return with_images("styles", dataset, partition, restyle)


def _change_strokes(x_SIHW: Array, thickness: float) -> Array:
    """Interpolate between the images and their grey dilation (thickness 1) or erosion (-1) by a pen of 2 x 2 pixels."""
    extreme = ndimage.maximum_filter if thickness > 0 else ndimage.minimum_filter
    return np.asarray(x_SIHW + np.float32(abs(thickness)) * (extreme(x_SIHW, size=PEN, mode="nearest") - x_SIHW))
