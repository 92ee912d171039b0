"""Synthetic(alpha, beta): devices of adjustable heterogeneity. Shapes: F features, K classes, S samples."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from atoll.core.options import Range, Seed
from atoll.data.dataset import Dataset
from atoll.data.index import generator
from atoll.data.targets import Array

SUMMARY = "generated: logistic regression on devices that differ by alpha (models) and beta (inputs)"
SIZE = "none"

PURPOSE = 105
TRAIN_SHARE = 0.9


Heterogeneity = Annotated[float, Range(0, 1000, hint="0 means alike, 1 is usual")]


def synthetic(
    *,
    alpha: Heterogeneity = 1.0,
    beta: Heterogeneity = 1.0,
    num_devices: Annotated[int, Range(1, 10**6)] = 30,
    num_features: Annotated[int, Range(1, 10**5)] = 60,
    num_classes: Annotated[int, Range(2, 10**4)] = 10,
    seed: Seed = 0,
) -> Dataset:
    """Generate y = argmax(softmax(W_k x + b_k)) on device k (Li et al. 2020, arXiv:1812.06127, sec. 5.1, app. C.1).

    u_k ~ N(0, alpha), W_k ~ N(u_k, 1), b_k ~ N(u_k, 1); B_k ~ N(0, beta), v_k ~ N(B_k, 1), x ~ N(v_k, Sigma) with
    Sigma_jj = j^-1.2; sizes are log-normal(4, 2) + 50. alpha and beta are standard deviations, as in the authors' code.
    """
    devices = [_device(generator(seed, PURPOSE, k), alpha, beta, num_features, num_classes) for k in range(num_devices)]
    cuts = [int(TRAIN_SHARE * len(y_S)) for _, y_S in devices]
    return Dataset(
        name="synthetic",
        train_x=np.concatenate([x_SF[:cut] for (x_SF, _), cut in zip(devices, cuts, strict=True)]),
        train_y=np.concatenate([y_S[:cut] for (_, y_S), cut in zip(devices, cuts, strict=True)]),
        test_x=np.concatenate([x_SF[cut:] for (x_SF, _), cut in zip(devices, cuts, strict=True)]),
        test_y=np.concatenate([y_S[cut:] for (_, y_S), cut in zip(devices, cuts, strict=True)]),
        num_classes=num_classes,
        owners=np.repeat(np.arange(num_devices), cuts),
        owner_names=tuple(f"device {k}" for k in range(num_devices)),
        origin=f"generated: Synthetic({alpha:g}, {beta:g}) of Li et al. 2020, arXiv:1812.06127, seed {seed}",
    )


def _device(
    rng: np.random.Generator, alpha: float, beta: float, num_features: int, num_classes: int
) -> tuple[Array, Array]:
    num_samples = int(rng.lognormal(4, 2)) + 50
    u, centre = rng.normal(0, alpha), rng.normal(0, beta)
    W_FK = rng.normal(u, 1, (num_features, num_classes))
    b_K = rng.normal(u, 1, num_classes)
    v_F = rng.normal(centre, 1, num_features)
    sigma_F = np.arange(1, num_features + 1) ** -0.6
    x_SF = rng.normal(v_F, sigma_F, (num_samples, num_features)).astype(np.float32)
    return x_SF, np.argmax(x_SF @ W_FK + b_K, axis=1)
