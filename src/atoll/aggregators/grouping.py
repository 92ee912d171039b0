"""What rules share that average small groups first. Shapes: C clients, M groups."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.seeds import generator


def group_shares(num: int, num_groups: int, seed: int, number: int) -> Tensor:
    """Deal clients out to random groups, as even as can be; each client's share in the mean of its group, (M, C).

    The draw depends on the seed and the number of the round alone.
    """
    order = generator(seed, "groups of updates", number).permutation(num)
    share_MC = torch.zeros(num_groups, num, dtype=torch.float64)
    for group, members in enumerate(np.array_split(order, num_groups)):
        share_MC[group, torch.from_numpy(members)] = 1 / len(members)
    return share_MC
