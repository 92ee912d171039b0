"""The app of clients in tests: the samples that a simulation of the same plan would deal them."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

from helpers import dropped, normalised, normed
from split import parties

from atoll.core.plan import Plan
from atoll.data.places import feature_places
from atoll.network.client.app import ClientApp
from atoll.network.protocol.agreement import Floors
from atoll.train.federation import build_federation

PLAN, NUMBER = "FEDERATION_PLAN", "FEDERATION_CLIENT"


def dealt(plan: Plan, number: int) -> ClientApp:
    """What a client of this number brings."""
    federation = build_federation(plan)
    dataset, indices = federation.dataset, federation.partition.indices(number)
    return ClientApp(
        train_x=dataset.train_x[indices],
        train_y=dataset.train_y[indices],
        num_classes=dataset.num_classes,
        scale=dataset.scale,
        shift=dataset.shift,
        tokens=dataset.tokens,
        attributes=dict,
    )


def client() -> ClientApp:
    """What the environment says."""
    return dealt(Plan.from_toml(Path(os.environ[PLAN]).read_text()), int(os.environ[NUMBER]))


def halves() -> ClientApp:
    """The same, with half of each image: a client whose model has another shape."""
    whole = client()
    return replace(whole, train_x=whole.train_x[:, :, :4])


def with_own_models() -> ClientApp:
    """The same, by a client that has the code of models that are in no catalogue."""
    return replace(client(), models={"normed": normed})


def split() -> ClientApp:
    """The same, by a client that sends labels in split learning, and has the code of models that are cut."""
    models = {"normed": normed, "normalised": normalised, "dropped": dropped}
    return replace(client(), models=models, floors=Floors(split="labels"))


def party_of(plan: Plan, number: int) -> ClientApp:
    """What a party of vertical learning brings: its columns, a word on its rows, and labels if they are with it."""
    federation = build_federation(plan)
    dataset, indices, split = federation.dataset, federation.partition.indices(number), plan.split
    assert split is not None and split.parties
    places = feature_places(dataset, split.parties[number].columns, "a party")
    return ClientApp(
        train_x=dataset.train_x[indices].reshape(len(indices), -1)[:, places],
        train_y=dataset.train_y[indices] if number == split.label_holder else None,
        num_classes=dataset.num_classes,
        scale=dataset.scale,
        shift=dataset.shift,
        rows=hashlib.sha256(indices.astype("<i8").tobytes()).digest(),
        models={"normed": parties.normed, "dropped": parties.dropped},
        floors=Floors(split="labels"),
        attributes=dict,
    )


def party() -> ClientApp:
    """The same by what the environment says."""
    return party_of(Plan.from_toml(Path(os.environ[PLAN]).read_text()), int(os.environ[NUMBER]))
