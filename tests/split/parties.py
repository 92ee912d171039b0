"""Plans of parties that hold columns, for the tests of vertical learning."""

from __future__ import annotations

from typing import Any

from torch import nn

from atoll import Plan

THREE: list[dict[str, Any]] = [
    {"name": "shop", "columns": ["0-20"], "width": 5},
    {"name": "bank", "columns": ["21-40"], "model": {"name": "mlp", "widths": [12]}, "width": 6},
    {"name": "club", "columns": ["41-63", 3], "model": "logistic", "width": 4},
]
LOCAL = {"steps": 4, "batch_size": 16, "lr": 0.05, "optimizer": {"name": "sgd", "momentum": 0.9}}


def normed(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


def dropped(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, num_classes))


def vertical_plan(parties: list[dict[str, Any]] | None = None, **fields: Any) -> Plan:
    """A short plan of three parties; keys that begin with `split_` are of its table."""
    own = {key.removeprefix("split_"): value for key, value in fields.items() if key.startswith("split_")}
    parties = THREE if parties is None else parties
    settings: dict[str, Any] = {
        "model": {"name": "mlp", "widths": [10]},
        "rounds": 2,
        "local": LOCAL,
        "engine": "inline",
        "split": {"way": "vertical", "parties": parties, "labels": "bank" if len(parties) > 1 else None, **own},
        **{key: value for key, value in fields.items() if not key.startswith("split_")},
    }
    return Plan(**settings)
