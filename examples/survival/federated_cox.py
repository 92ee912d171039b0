"""Cox regression over institutions, equal to the fit of all patients together.

    python examples/survival/federated_cox.py

A Cox model compares each patient who dies with all who are still at risk, at every institution, so that averaging
local fits is another (stratified) model. Here each institution sends sums instead: for each day, over its patients of
that day, of exp(risk), and of exp(risk) times the features and their products. Added up they give the gradient and the
Hessian of the pooled partial likelihood, with Efron's handling of ties, and the server takes a Newton step (Lu et al.
2015, "WebDISCO", doi:10.1093/jamia/ocv083). The sums can be added in secret: set secagg = {}.

Shapes: N patients, P features, T days, Q sums a day.
"""

from __future__ import annotations

import numpy as np
import torch

import atoll
from atoll.core.algorithm import Algorithm


def num_sums(features: int) -> int:
    """Deaths and their features, then exp(risk) and its first and second moments: of all, and of the deaths."""
    return 1 + features + 2 * (1 + features + features * features)


def sums_by_day(beta: np.ndarray, x: np.ndarray, y: np.ndarray, days: int) -> np.ndarray:
    """Return what an institution sends, (T, Q)."""
    day, dead, risk = y[:, 0].round().astype(int), y[:, 1], np.exp(x @ beta)
    moments = np.concatenate([np.ones((len(x), 1)), x, (x[:, :, None] * x[:, None]).reshape(len(x), -1)], axis=1)
    own = np.concatenate(
        [dead[:, None], dead[:, None] * x, risk[:, None] * moments, (dead * risk)[:, None] * moments], 1
    )
    table = np.zeros((days, own.shape[1]))
    np.add.at(table, day, own)
    return table


def newton_step(table: np.ndarray, features: int) -> np.ndarray:
    """Return by how much beta moves, from the sums of all institutions."""
    deaths, dead_x, rest = table[:, 0], table[:, 1 : 1 + features], table[:, 1 + features :]
    half = rest.shape[1] // 2
    at_risk, of_dead = np.cumsum(rest[::-1, :half], axis=0)[::-1], rest[:, half:]
    gradient, hessian = np.zeros(features), np.zeros((features, features))
    for day in np.nonzero(deaths > 0.5)[0]:
        gradient += dead_x[day]
        for tie in range(round(deaths[day])):
            left = at_risk[day] - tie / round(deaths[day]) * of_dead[day]
            mean = left[1 : 1 + features] / left[0]
            gradient -= mean
            hessian += left[1 + features :].reshape(features, features) / left[0] - np.outer(mean, mean)
    return np.linalg.solve(hessian, gradient)


def cox_sums(days: int = 1100):
    """Let institutions send sums by day; times are days, and `days` is more than the last."""

    def first(dataset):
        features = dataset.input_shape[0]
        return {"beta": np.zeros(features), "sums": np.zeros((days, num_sums(features)))}

    def train(arrays, task, memory):
        table = sums_by_day(arrays["beta"], task.x.astype(float), task.y, days)
        return {"beta": arrays["beta"], "sums": table}, 1, {}  # everybody weighs the same: sums are added

    def evaluate(arrays, task):
        return {}

    return atoll.array_work(first=first, train=train, evaluate=evaluate)


def newton(days: int = 1100):
    """Take Newton steps of the pooled partial likelihood."""

    def server_step(params_D, aggregate, server, task):
        features = next(p for p in range(1, 1000) if p + days * num_sums(p) == len(params_D))
        table = (aggregate.delta_D[features:] + params_D[features:]).view(days, -1) * aggregate.num_clients
        new_D = params_D.clone()  # of the arrays that are sent, beta alone changes
        new_D[:features] += torch.from_numpy(newton_step(table.numpy(), features))
        return new_D, server

    return Algorithm(server_step=server_step)


def fit(data="lung", rounds: int = 8, **settings):
    """Return the coefficients after some Newton steps."""
    plan = atoll.Plan(
        data=data,
        partition="natural",
        work=cox_sums,
        algorithm=newton,
        rounds=rounds,
        evaluation={"every": 0},
        engine="inline",
        **settings,
    )
    return atoll.run(plan).model.get_parameter("beta").detach().numpy()


if __name__ == "__main__":
    from atoll.data.catalog.lung import FEATURES

    for name, value in zip(FEATURES, fit(), strict=True):
        print(f"{name:10} {value:+.4f} (log hazard ratio for one standard deviation)")
