"""A model of half a gigabyte, for the tests of what large models take."""

from __future__ import annotations

from dataclasses import replace

from network import apps
from torch import nn

from atoll.network.client.app import ClientApp

NAME = "network.large_model:model"


def model(width: int, num_classes: int) -> nn.Module:
    """Square layers on small images; with tanh every parameter moves in every step, so that updates hardly compress."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def client() -> ClientApp:
    """A client that knows the model by the name that the plan calls it."""
    return replace(apps.client(), models={NAME: model})
