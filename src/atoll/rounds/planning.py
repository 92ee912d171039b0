"""The size of a cohort for a given noise of the mean gradient.

The mean gradient of a random cohort differs from the mean over all N clients. Let S^2 = (1/N) sum_k |g_k - mean|^2
be the population variance of client gradients (divided by N, summed over coordinates). The mean over m clients, each
equally likely and of equal weight, then has variance

    S^2 / m                        with replacement,
    S^2 / m * (N - m) / (N - 1)    without, which is S^2 / m * (1 - m / N) * N / (N - 1)

(Cochran 1977, Sampling Techniques, theorem 2.2, where S^2 is divided by N - 1 instead).
"""

from __future__ import annotations

import math

from atoll.core.errors import PlanError


def clients_needed(num_clients: int, variance: float, wanted_variance: float, replacement: bool = False) -> int:
    """Return the size of the smallest cohort whose mean gradient has at most the wanted variance V.

    m = S^2 N / (S^2 + V (N - 1)) without replacement; m = S^2 / V with it, which may be more draws than clients.

    >>> [clients_needed(n, variance=4.0, wanted_variance=0.2) for n in (10, 10_000)]
    [7, 20]
    """
    _check(num_clients, variance)
    if not wanted_variance >= 0 or (replacement and wanted_variance == 0):
        allowed = "above 0 with replacement" if replacement else "0 or more"
        raise PlanError(f"the wanted variance must be {allowed}, got {wanted_variance}: choose another noise")
    if variance == 0:
        return 1
    per_client = wanted_variance if replacement else (variance + wanted_variance * (num_clients - 1)) / num_clients
    return math.ceil(variance / per_client * (1 - 1e-12))  # rounding errors must not add a client


def relative_noise(num_clients: int, cohort: int, variance: float, norm: float, replacement: bool = False) -> float:
    """Return the standard error of a cohort's mean gradient, divided by the norm of the mean gradient of all clients.

    >>> relative_noise(10, 10, variance=4.0, norm=1.0), relative_noise(10, 4, variance=4.0, norm=1.0, replacement=True)
    (0.0, 1.0)
    """
    _check(num_clients, variance)
    if cohort < 1 or (cohort > num_clients and not replacement):
        raise PlanError(
            f"a cohort has at least 1 client, and at most {num_clients} without replacement: got {cohort}, change it"
        )
    if not norm > 0:
        raise PlanError(f"the norm of the mean gradient must be above 0, got {norm}: measure it before training ends")
    correction = 1.0 if replacement else (num_clients - cohort) / max(1, num_clients - 1)
    return math.sqrt(variance / cohort * correction) / norm


def as_table(
    num_clients: int,
    variance: float,
    norm: float,
    model_bytes: int,
    wanted_noise: float = 0.1,
    replacement: bool = False,
) -> str:
    """Return a text table of cohort sizes with their noise and bytes; the last line gives the size for `wanted_noise`.

    The bytes of a round are those of the model, down and up, for every distinct client (on average, if clients are
    drawn with replacement).
    """
    needed = clients_needed(num_clients, variance, (wanted_noise * norm) ** 2, replacement)
    ladder = {digit * 10**power for power in range(len(str(num_clients))) for digit in (1, 2, 5)}
    lines = [f"{'clients':>12}{'noise':>12}{'bytes a round':>20}"]
    for cohort in sorted({size for size in ladder if size < num_clients} | {needed, num_clients}):
        noise = relative_noise(num_clients, cohort, variance, norm, replacement)
        num_distinct = num_clients * (1 - (1 - 1 / num_clients) ** cohort) if replacement else cohort
        lines.append(f"{cohort:>12,}{noise:>12.1%}{2 * model_bytes * num_distinct:>20,.0f}")
    lines.append(f"A noise of {wanted_noise:.1%} needs {needed:,} of {num_clients:,} clients a round.")
    return "\n".join(lines)


def _check(num_clients: int, variance: float) -> None:
    if num_clients < 1:
        raise PlanError(f"a federation has at least 1 client: got {num_clients}, raise it")
    if not 0 <= variance < math.inf:
        raise PlanError(f"the variance of client gradients must be 0 or more, got {variance}: measure it again")
