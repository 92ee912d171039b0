"""What a party's app must bring to a plan, and what a server may say of its data: refused before anything leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from network.apps import party_of
from network.in_process_server import enrolled, operated
from network.test_vertical_hostile import BAD, NAMES, NUM, PLAN, RUN, hall

from atoll.core.errors import AtollError
from atoll.network.client.agreeing import agree
from atoll.network.client.app import ClientApp
from atoll.network.client.connection import Connection
from atoll.network.client.home import RunHome
from atoll.network.client.preflight import preflight
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.messages import RunInfo
from atoll.network.server.runs import WaitingRun


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunInfo]:
    """What a server tells of the plan before it begins."""
    with operated(tmp_path_factory.mktemp("told") / "home", NUM) as operations:
        operations.add_run(RUN, PLAN)
        waiting = operations.driver.runs[RUN]
        assert isinstance(waiting, WaitingRun)
        yield waiting.preview({})


OPEN = Floors(split="labels")
Change = Callable[[ClientApp], ClientApp]
APPS: dict[str, tuple[int, str, Change, str]] = {
    "no commitment": (
        0,
        "shop",
        lambda app: replace(app, rows=None),
        "parties must train on the same rows .* atoll align",
    ),
    "a short commitment": (0, "shop", lambda app: replace(app, rows=b"x"), "has 32 bytes, the app's has 1"),
    "no aligned table": (0, "shop", lambda app: replace(app, rows="none.csv"), "none.alignment.json is not what atoll"),
    "too few columns": (
        0,
        "shop",
        lambda app: replace(app, train_x=app.train_x[:, 1:]),
        "has 20 columns, the plan's shop has 21",
    ),
    "named columns": (
        0,
        "shop",
        lambda app: replace(app, columns=("age",)),
        r"the plan's shop has the columns \['0-20'\], and the app others",
    ),
    "no labels": (
        1,
        "bank",
        lambda app: replace(app, train_y=None),
        "takes this client for bank, which holds the labels, and its app has none",
    ),
    "another party": (0, "bank", lambda app: app, "is called bank, and the plan takes client 0 for shop"),
    "another party, by case alone": (
        0,
        "Bank",
        lambda app: app,
        "is called Bank, and the plan takes client 0 for shop",
    ),
    "no party": (
        3,
        "museum",
        lambda app: app,
        "takes client 3 for no party, as its parties are shop, bank, club in this order",
    ),
    "keeps labels": (
        1,
        "bank",
        lambda app: replace(app, floors=Floors()),
        'sends them with floors.split = "labels" only',
    ),
    "sends nothing": (
        0,
        "shop",
        lambda app: replace(app, floors=Floors(split="none")),
        'which floors.split = "none" keeps here',
    ),
}


@pytest.mark.parametrize("name", APPS)
def test_an_app_that_is_not_the_partys_is_refused_before_anything_leaves(
    tmp_path: Path, info: RunInfo, name: str
) -> None:
    number, called, changes, why = APPS[name]
    app = changes(party_of(PLAN, min(number, NUM - 1)))
    with pytest.raises(AtollError, match=why):
        agree(app, app.floors, info, number, RunHome(tmp_path), bytes(32), name=called)


def test_a_party_that_has_no_labels_agrees_where_they_would_not_leave_it(tmp_path: Path, info: RunInfo) -> None:
    """Labels that an app holds are not used where the plan has them at another party."""
    app = replace(party_of(PLAN, 0), floors=Floors(), train_y=np.full(len(party_of(PLAN, 0).train_x), 7))
    agreed = agree(app, app.floors, info, 0, RunHome(tmp_path), bytes(32), name="north")
    assert not agreed.job.federation.train_y.any() and agreed.min_cohort == NUM and len(agreed.rows) == 32


TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "no shape": ({"input_shape": None}, "the server's samples have shape None"),
    "a huge shape": ({"input_shape": (1 << 40,)}, "1 to 1,048,576 features are allowed"),
    "a negative shape": ({"input_shape": (-4, -16)}, "features are allowed|shape"),
    "a smaller shape": ({"input_shape": (2,)}, "split.parties"),
    "many outputs": ({"num_outputs": 1 << 30}, "the server's targets ask for 1073741824 outputs, 1 to 4,096"),
    "no outputs": ({"num_outputs": -1}, "ask for -1 outputs"),
    "another problem": ({"problem": "magic"}, "magic"),
    "names of too few features": ({"features": ("age",)}, "feature"),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_server_that_tells_nonsense_of_its_data_is_refused(tmp_path: Path, info: RunInfo, name: str) -> None:
    changes, why = TOLD[name]
    with pytest.raises(AtollError, match=why):
        agree(
            party_of(PLAN, 0),
            OPEN,
            msgspec.structs.replace(info, **changes),
            0,
            RunHome(tmp_path),
            bytes(32),
            name="shop",
        )


def test_a_party_tries_a_plan_before_it_begins(tmp_path: Path) -> None:
    """`atoll join --check` says yes to what a party needs, and no to an app that lacks it, with the reason."""
    said, checked = list[str](), list[bool]()
    with hall(tmp_path) as made:
        made.operations.add_run(RUN, PLAN)
        for number, name in enumerate(NAMES):
            home, app = enrolled(made.operations, made.url, tmp_path / name), party_of(PLAN, number)
            app = replace(app, rows=None) if number == BAD else app
            with Connection(made.url, home.key, server_key=home.server().server_key) as connection:
                checked.append(
                    preflight(lambda app=app: app, home, connection, None, [RUN], said.append, keys_known=False)  # type: ignore[misc]
                )
        told = {each["name"]: each["ready"][RUN] for each in made.operations.clients()}
    assert checked == [True, True, False] == [told[name]["ready"] for name in NAMES]
    assert [len([text for text in said if check in text]) for check in ("one step", "evaluation")] == [2, 0]
    assert "plan, floors: parties must train on the same rows" in told["club"]["reason"]
