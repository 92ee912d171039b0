"""Federated training of scikit-learn's SGDClassifier: arrays in, arrays out.

    python examples/own_loops/sklearn_sgd.py

Forty clients hold two to four of the ten digits each; their coefficients are averaged.
"""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.linear_model import SGDClassifier

import atoll


def linear_svm(passes: int = 3, alpha: float = 1e-4):
    """Let each client continue from the averaged coefficients for some passes over its samples."""

    def first(dataset):
        features = int(np.prod(dataset.input_shape))
        return {"coef": np.zeros((dataset.num_classes, features)), "intercept": np.zeros(dataset.num_classes)}

    def train(arrays, task, memory):
        x, classes = task.x.reshape(len(task.x), -1).astype(float), np.arange(len(arrays["intercept"]))
        seed = int(task.rng.integers(2**31))
        model = SGDClassifier(loss="log_loss", alpha=alpha, learning_rate="constant", eta0=task.lr, random_state=seed)
        model.partial_fit(x[:1], task.y[:1], classes=classes)  # makes the arrays, which are replaced
        model.coef_, model.intercept_ = arrays["coef"].astype(float), arrays["intercept"].astype(float)
        for _ in range(passes):
            model.partial_fit(x, task.y)
        return {"coef": model.coef_, "intercept": model.intercept_}, len(x), {}

    def evaluate(arrays, task):
        scores = task.x.reshape(len(task.x), -1) @ arrays["coef"].T + arrays["intercept"]
        return {"right": (scores.argmax(1) == task.y).sum()}

    return atoll.array_work(first=first, train=train, evaluate=evaluate)


def main(rounds: int = 20) -> float:
    """Run some rounds and return the accuracy on the test set."""
    warnings.filterwarnings("ignore", category=UserWarning, module="sklearn")
    plan = atoll.Plan(
        work=linear_svm,
        partition={"name": "classes", "num_clients": 40, "classes_per_client": 3},
        policy={"size": 20},
        local={"lr": 0.05},
        rounds=rounds,
        engine="inline",
    )
    return atoll.run(plan).accuracy


if __name__ == "__main__":
    print(f"accuracy {100 * main():.2f} %")
