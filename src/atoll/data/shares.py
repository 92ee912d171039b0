"""Sizes and groups of clients, for partitions and skews. Shapes: C clients."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Range, at_least
from atoll.data.index import Array

Groups = Annotated[int, at_least(2)]
"""Number of groups of clients."""
Amount = Annotated[float, Range(0, 1000, open_low=True)]
"""Amount in the units of a model's input; images are usually in [0, 1]."""
Law = Literal["power", "log_normal", "dirichlet"]
LAWS: dict[Law, tuple[str, float]] = {
    "power": ("exponent", 1.0),
    "log_normal": ("sigma", 1.0),
    "dirichlet": ("alpha", 0.5),
}
"""The parameter of each law and its default."""


def size_shares(law: Law, num_clients: int, rng: np.random.Generator, **parameters: float | None) -> Array:
    """Draw each client's share of all samples, (C,), which sum to one; clients are in random order.

    `power`: the r-th largest share is proportional to r^-exponent, as in the MNIST of Li et al. 2020
    (arXiv:1812.06127). `log_normal`: shares are proportional to exp(sigma z), z ~ N(0, 1). `dirichlet`: shares ~
    Dir_C(alpha) (Li et al. 2022, arXiv:2102.02079, quantity skew).
    """
    value = _parameter(law, parameters)
    if law == "dirichlet":
        return rng.dirichlet(np.full(num_clients, value))
    if law == "power":
        logarithm_C = -value * np.log(rng.permutation(num_clients) + 1.0)
    else:
        logarithm_C = value * rng.standard_normal(num_clients)
    shares_C = np.exp(logarithm_C - logarithm_C.max())
    return np.asarray(shares_C / shares_C.sum())


def _parameter(law: Law, parameters: dict[str, float | None]) -> float:
    """Return the parameter of a law, or its default; refuse those of other laws."""
    name, default = LAWS[law]
    foreign = [key for key, value in parameters.items() if value is not None and key != name]
    if foreign:
        raise PlanError(
            f"law = '{law}' has no {foreign[0]}, got {parameters[foreign[0]]}: set {name}, or choose the law that "
            "has it"
        )
    value = parameters[name]
    return default if value is None else value


def random_groups(num_clients: int, num_groups: int, rng: np.random.Generator) -> Array:
    """Draw the group of each client, (C,); the sizes of groups differ by at most one."""
    if num_groups > num_clients:
        raise PlanError(f"{num_clients} clients cannot form {num_groups} groups: lower num_groups or add clients")
    return rng.permutation(np.arange(num_clients) % num_groups)
