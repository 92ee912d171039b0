"""Federated softmax regression in JAX: gradients by jax.grad, everything else by Atoll.

pip install jax
python examples/own_loops/jax_softmax.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import atoll


def loss_of(params, x, y):
    """Mean cross entropy of a linear model."""
    scores = x @ params["weights"] + params["bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1).mean()


gradient = jax.jit(jax.value_and_grad(loss_of))


def softmax():
    """Take a step of gradient descent for each batch of the plan."""

    def first(dataset):
        features = int(np.prod(dataset.input_shape))
        return {"weights": np.zeros((features, dataset.num_classes)), "bias": np.zeros(dataset.num_classes)}

    def train(arrays, task, memory):
        params, losses = {name: jnp.asarray(value) for name, value in arrays.items()}, []
        x = task.x.reshape(len(task.x), -1)
        for batch in task.batches():
            loss, slope = gradient(params, x[batch], task.y[batch])
            params = jax.tree_util.tree_map(lambda value, g: value - task.lr * g, params, slope)
            losses.append(float(loss))
        return {name: np.asarray(value) for name, value in params.items()}, len(x), {"loss": float(np.mean(losses))}

    def evaluate(arrays, task):
        scores = task.x.reshape(len(task.x), -1) @ arrays["weights"] + arrays["bias"]
        return {"right": (scores.argmax(1) == task.y).sum()}

    return atoll.array_work(first=first, train=train, evaluate=evaluate)


def main() -> float:
    """Run ten rounds and return the accuracy on the test set."""
    plan = atoll.Plan(
        work=softmax,
        partition={"name": "dirichlet", "num_clients": 10, "alpha": 1.0},
        local={"lr": 0.2, "batch_size": 10},
        rounds=10,
        engine="inline",
    )
    return atoll.run(plan).accuracy


if __name__ == "__main__":
    print(f"accuracy {100 * main():.2f} %")
