"""Same label, different features: groups of clients draw alike things unlike.

Shapes: C clients, G groups, S samples of a client, I channels, H height, W width.
"""

from __future__ import annotations

import numpy as np
from scipy import ndimage

from atoll.core.options import Seed
from atoll.data.dataset import Dataset
from atoll.data.index import Array, Partition, generator
from atoll.data.shares import Groups, random_groups
from atoll.data.skew.features import resampled, with_pictures

PURPOSE = 115
SLANT = 0.5
PEN = (1, 1, 2, 2)


def styles(dataset: Dataset, partition: Partition, *, seed: Seed = 0, num_groups: Groups = 4) -> Partition:
    """Draw the pictures of each group of clients in its own style: slant, thickness of strokes, dark on light or not.

    Slants (shears) are spread over ± 0.5 and thicknesses from eroded to dilated strokes, both dealt to the groups at
    random; every other group is inverted. P(x|y) differs from group to group, P(y) does not (Kairouz et al. 2021,
    arXiv:1912.04977, sec. 3.1, concept drift).
    """
    rng = generator(seed, PURPOSE)
    group_C = random_groups(partition.num_clients, num_groups, rng)
    slant_G = rng.permutation(np.linspace(-SLANT, SLANT, num_groups))
    thickness_G = rng.permutation(np.linspace(-1.0, 1.0, num_groups))
    inverted_G = rng.permutation(num_groups) % 2 == 1
    both_ends = float(dataset.train_x.min()) + float(dataset.train_x.max())

    def drawn(client: int, x_SIHW: Array) -> Array:
        group = group_C[client]
        slanted = resampled(x_SIHW, np.array([[1.0, 0.0], [slant_G[group], 1.0]]))
        stroked = _stroked(slanted, float(thickness_G[group]))
        return both_ends - stroked if inverted_G[group] else stroked

    return with_pictures("styles", dataset, partition, drawn)


def _stroked(x_SIHW: Array, thickness: float) -> Array:
    """Go part of the way to grey dilation (thickness 1) or erosion (-1) by a pen of 2 x 2 pixels."""
    extreme = ndimage.maximum_filter if thickness > 0 else ndimage.minimum_filter
    return np.asarray(x_SIHW + np.float32(abs(thickness)) * (extreme(x_SIHW, size=PEN, mode="nearest") - x_SIHW))
