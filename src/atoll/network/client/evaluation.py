"""What a client tells of how a version does on its samples: the sums of the plan's metrics, counts with noise, or that
there are sums to be added in secret.

Noise is the exact discrete Gaussian (`privacy/noise.py`) on counts alone: sums without a bound, such as of losses, are
not told. It protects each sample against being replaced by another; how many samples there are is no secret.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from atoll.core.messages import State
from atoll.data.targets import TOKENS
from atoll.network.client.budget import Budget, Cost
from atoll.network.client.secret_evaluation import keep_for_sum
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol.agreement import NOISED, NOTHING, Floors, evaluates_in_secret
from atoll.network.protocol.messages import EvaluationOrder, SiteEvaluation
from atoll.network.protocol.secret_sums import pack_sums
from atoll.privacy.accounting import rdp_epsilon
from atoll.privacy.composing import as_plain
from atoll.privacy.noise import discrete_gaussian, fresh_secret
from atoll.train.metrics import Measures

DELTA = 1e-6
"""The delta at which the epsilon of an evaluation is stated."""
REPLACED = 2.0
"""Replacing a sample moves counts at most twice as far as adding one."""
WIDEST_NOISE = 1e6
"""Largest ratio of noise to sensitivity that is tried."""


def tell(agreed: AgreedRun, order: EvaluationOrder, budget: Budget, measure: Callable[[], State]) -> SiteEvaluation:
    """Return what the floors allow to tell of a version; what has noise or is secret is on disk before it leaves.

    `measure` returns the condensed sums of this client's samples.
    """
    if not agreed.plan.evaluation.clients_every:
        raise WorkRefused("the plan does not say evaluation.clients_every: this client did not agree to evaluate")
    if agreed.floors.evaluation == NOTHING:
        raise WorkRefused('floors.evaluation = "none": this client tells nothing of how a model does')
    if evaluates_in_secret(agreed.floors, agreed.plan):
        return keep_for_sum(agreed, order, measure)
    if agreed.floors.evaluation == NOISED:
        return _told_with_noise(agreed, order.version, budget, measure)
    sums = measure()
    return SiteEvaluation(num_samples=int(sums["count"]), sums=pack_sums(sums))


def _told_with_noise(agreed: AgreedRun, version: int, budget: Budget, measure: Callable[[], State]) -> SiteEvaluation:
    before = agreed.home.told_evaluation()
    if before is not None and before[0] == version:
        return before[1]  # other noise on the same counts would tell more
    if before is not None and before[0] > version:
        raise WorkRefused(f"version {before[0]} was evaluated after {version}: earlier ones are not told any more")
    if agreed.job.problem.kind == TOKENS:
        raise WorkRefused("a sequence has many positions, whose counts are not told with noise")
    if agreed.job.personal:
        raise WorkRefused(
            "the model is this client's own, made of its samples without noise: noise on counts would not hide them"
        )
    told = _noised(agreed.job.measures, agreed.floors, budget, measure(), version)
    agreed.home.save_evaluation(version, told)
    return told


def _noised(measures: Measures, floors: Floors, budget: Budget, sums: State, version: int) -> SiteEvaluation:
    """Return counts with noise, after it is charged to the budget."""
    counts, moves = measures.countable(sums)
    epsilon = floors.evaluation_epsilon
    if not counts or epsilon is None:
        raise WorkRefused(f"none of the metrics {', '.join(measures.metrics)} is made of counts: noise hides no sample")
    multiplier = noise_multiplier(epsilon)

    def cost(times: int) -> Cost:
        import dp_accounting as dp

        event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(multiplier), times)
        return Cost(attempts=version + 1, done=times, unit="sample", delta=DELTA, event=as_plain(event))

    budget.charge(version, cost, floors.max_epsilon)
    noisy: State = {}
    for name, value in counts.items():
        noise_N = discrete_gaussian(fresh_secret(), multiplier * REPLACED * moves, value.numel())
        noisy[name] = value + torch.from_numpy(noise_N).view(value.shape)
    return SiteEvaluation(sums=pack_sums(noisy), epsilon=epsilon)


@lru_cache(maxsize=8)
def noise_multiplier(epsilon: float) -> float:
    """Return the least ratio of noise to sensitivity, to 0.1 %, that costs at most epsilon, at DELTA.

    >>> 4.5 < noise_multiplier(1.0) < 5.5
    True
    """
    import dp_accounting as dp

    low, high = 1e-2, WIDEST_NOISE
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        if rdp_epsilon(dp.GaussianDpEvent(middle), DELTA) <= epsilon:
            high = middle
        else:
            low = middle
    return high
