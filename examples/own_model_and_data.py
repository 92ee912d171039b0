"""Your own model and your own data in a plan. Run: python examples/own_model_and_data.py"""

import numpy as np
from torch import nn

import atoll


def hospitals() -> atoll.Dataset:
    """Five hospitals whose measurements differ; `owners` says which patient belongs to which."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(5), 200)
    x = rng.normal(size=(1000, 12)).astype("float32") + owners[:, None] * 0.3
    y = (x[:, :3].sum(1) + rng.normal(size=1000) > owners * 0.9).astype("int64")
    return atoll.Dataset(
        name="hospitals",
        train_x=x[::2],
        train_y=y[::2],
        test_x=x[1::2],
        test_y=y[1::2],
        num_classes=2,
        owners=owners[::2],
    )


def network(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Any nn.Module will do; a factory that names `input_shape` and `num_classes` is given them."""
    return nn.Sequential(nn.Linear(*input_shape, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, num_classes))


if __name__ == "__main__":
    plan = atoll.Plan(data=hospitals, partition="natural", model=network, rounds=30, local={"epochs": 2, "lr": 0.05})
    result = atoll.run(plan, progress=True)
    print(f"test accuracy {100 * result.accuracy:.1f} %, stopped because {result.reason}")
