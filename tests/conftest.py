"""Small federations that tests share, and the choice of members that laws are run over."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch
from engine.run_farm import Farm, run_farm
from members import CHOSEN, concerns
from network.fork_server import ForkServer, fork_server

from atoll.core.errors import PlanError
from atoll.core.parts import find
from atoll.core.plan import Plan

APART = (
    "pretend_device.py",
    "pretend_models.py",
    "engine/test_places.py",
    "engine/test_pretend_device.py",
    "network/device_apps.py",
)
"""Tests on a device that torch keeps for the rest of a process: tests/engine/test_apart.py runs them in another one."""
collect_ignore = [] if "ATOLL_PRETEND" in os.environ else list(APART)
torch.set_num_threads(1)
hypothesis.settings.register_profile("any machine", deadline=None)  # a slow example is no failure: others use it too
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--member",
        action="append",
        default=[],
        metavar="FAMILY=NAME",
        help="run only the tests of this member, e.g. aggregators=krum or aggregators=my_pkg.my_mod:rule; repeatable",
    )


def pytest_configure(config: pytest.Config) -> None:
    CHOSEN.clear()
    for text in config.getoption("--member"):
        family, _, name = text.partition("=")
        try:
            find(family, name)
        except (PlanError, ImportError) as error:
            raise pytest.UsageError(f"--member is FAMILY=NAME, e.g. aggregators=krum, got {text}: {error}") from error
        CHOSEN.setdefault(family, []).append(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if CHOSEN:
        concerned = [concerns(getattr(item, "callspec", None)) for item in items]
        config.hook.pytest_deselected(items=[item for item, chosen in zip(items, concerned, strict=True) if not chosen])
        items[:] = [item for item, chosen in zip(items, concerned, strict=True) if chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    if "pretend_device" in sys.modules and "ATOLL_PRETEND" not in os.environ:
        raise pytest.UsageError(
            "a collected file imports pretend_device, which changes torch for all: list it in APART"
        )


@pytest.fixture(scope="session")
def processes() -> Iterator[ForkServer]:
    """Starts commands of Atoll as processes, quickly; none outlives the tests."""
    with fork_server() as started:
        yield started


@pytest.fixture(scope="session")
def farm() -> Iterator[Farm]:
    """Starts runs one at a time, to be killed; see `engine.run_farm`."""
    with run_farm() as started:
        yield started


@pytest.fixture
def digits_plan() -> Plan:
    return Plan(
        partition={"name": "dirichlet", "num_clients": 12, "alpha": 0.5},
        model={"name": "mlp_2nn", "hidden": 16},
        policy={"size": 5},
        local={"lr": 0.1, "batch_size": 16},
        rounds=3,
        engine="inline",
    )
