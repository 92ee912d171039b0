"""A training loop of one's own in PyTorch, with gradient accumulation, in place of Atoll's.

    python examples/own_loops/torch_loop.py

With `accumulate=1` it takes the steps of the native loop, to the same bits.
"""

from __future__ import annotations

import torch
from torch import nn

import atoll


def accumulated(accumulate: int = 4, hidden: int = 32):
    """Add up the gradients of some batches before each step."""

    def model_for(features: int, classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def first(dataset):
        torch.manual_seed(0)
        model = model_for(dataset.train_x[0].size, dataset.num_classes)
        return {name.replace(".", "_"): value.detach().numpy() for name, value in model.named_parameters()}

    def loaded(arrays):
        model = model_for(arrays["0_weight"].shape[1], len(arrays["2_bias"]))
        model.load_state_dict({name.replace("_", ".", 1): torch.from_numpy(value) for name, value in arrays.items()})
        return model

    def train(arrays, task, memory):
        model = loaded(arrays)
        x, y = torch.from_numpy(task.x).flatten(1), torch.from_numpy(task.y)
        optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
        total, batches = 0.0, task.batches()
        for number, batch in enumerate(batches, 1):
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch]) / accumulate
            loss.backward()
            total += float(loss.detach()) * accumulate
            if number % accumulate == 0 or number == len(batches):
                optimizer.step()
                optimizer.zero_grad()
        new = {name.replace(".", "_"): value.detach().numpy() for name, value in model.named_parameters()}
        return new, len(y), {"loss": total / len(batches)}

    def evaluate(arrays, task):
        with torch.no_grad():
            scores, y = loaded(arrays)(torch.from_numpy(task.x).flatten(1)), torch.from_numpy(task.y)
        return {"right": (scores.argmax(1) == y).sum(), "loss": nn.functional.cross_entropy(scores, y, reduction="sum")}

    return atoll.array_work(first=first, train=train, evaluate=evaluate)


def main() -> float:
    """Run ten rounds and return the accuracy on the test set."""
    plan = atoll.Plan(
        work=accumulated,
        partition={"name": "dirichlet", "num_clients": 10, "alpha": 1.0},
        local={"lr": 0.2, "batch_size": 10, "epochs": 3},
        rounds=10,
        engine="inline",
    )
    return atoll.run(plan).accuracy


if __name__ == "__main__":
    print(f"accuracy {100 * main():.2f} %")
