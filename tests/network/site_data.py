"""Small tables for evaluations at sites: numbers to predict, and yes or no; without a test set if asked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from network.apps import NUMBER, PLAN, dealt

from atoll import ClientApp, Dataset, Plan

NUM, FEATURES = 150, 4


def _features() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(NUM, FEATURES)).astype(np.float32)


def numbers(tests: int = 30) -> Dataset:
    """A regression."""
    x = _features()
    y = (x @ np.array([1.0, -2.0, 0.5, 0.0], dtype=np.float32) + 3).astype(np.float32)
    return Dataset(name="numbers", train_x=x, train_y=y, test_x=x[:tests], test_y=y[:tests])


def yes_or_no() -> Dataset:
    """A binary problem."""
    x = _features()
    noise = np.random.default_rng(6).normal(size=NUM)
    y = (x[:, 0] + noise > 0).astype(np.int64)
    return Dataset(
        name="yes or no", train_x=x, train_y=y, test_x=x[:30], test_y=y[:30], num_classes=0, problem="binary"
    )


def client() -> ClientApp:
    """The samples that the plan deals a client, also where the server has no test set."""
    plan = Plan.from_toml(Path(os.environ[PLAN]).read_text())
    with_tests = {"data.tests": 30} if "tests" in plan.data.options else {}
    return dealt(plan.replace(with_tests), int(os.environ[NUMBER]))


def client_0() -> ClientApp:
    """The samples of client 0, whoever asks."""
    return dealt(Plan.from_toml(Path(os.environ[PLAN]).read_text()), 0)


def with_gaps() -> ClientApp:
    """Samples of which three values are missing."""
    x = client().train_x.astype(np.float32)
    x[0, 0, :3, 0] = np.nan
    return replace(client(), train_x=x)
