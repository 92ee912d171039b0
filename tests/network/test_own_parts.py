"""Parts of one's own in a real federation: the operator's at the server, a client's at the client; none travels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import rows
from network.federation import RUN, Federation, federation, simulated, until
from network.fork_server import ForkServer

from atoll.core.errors import DataError
from atoll.core.plan import Plan
from atoll.network.client.app import ClientApp

NUM = 2
OPERATOR = '''
"""Code of the operator. Whoever imports it leaves a file behind."""
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import atoll
from atoll.core.aggregator import stacked
from atoll.core.algorithm import Algorithm
from atoll.data.catalog.digits import digits

(Path(__file__).parent / f"imported.{os.getpid()}").touch()


def largest(scale=1.0):
    """The update that is longest."""
    return stacked(lambda updates_CD, weight_C: scale * updates_CD[updates_CD.norm(dim=1).argmax()])


def half_steps():
    """A server that goes half of the way; clients do what they do in FedAvg."""
    return Algorithm(server_step=lambda params_D, mean, server, task: (params_D + 0.5 * mean.delta_D, server))


def fewer():
    """Digits, of which only a few are tested."""
    data = digits()
    return replace(data, test_x=data.test_x[:50], test_y=data.test_y[:50])


def our_net(num_classes, width=5):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, num_classes))


def pulled(mu=0.5):
    """FedProx by another name; its server goes further."""
    return Algorithm(
        local_grad=lambda grad_D, params_D, task: grad_D + mu * (params_D - task.broadcast.params_D),
        server_step=lambda params_D, mean, server, task: (params_D + 1.5 * mean.delta_D, server),
    )


def squared(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 10)).square().sum(1)


def regression(lr, tells=False):
    """One step of linear regression onto the classes; a client remembers how often it took part, and goes further."""

    def first(dataset):
        return {"weights": np.zeros((64, 10))}

    def train(arrays, task, memory):
        x, y = task.x, task.y
        flat, times = x.reshape(len(x), -1), memory.get("times", np.zeros(1)) + 1
        memory["times"] = times
        errors = flat @ arrays["weights"] - np.eye(10)[y]
        loss = {"loss": np.square(errors).mean()} if tells else {}
        new = {"weights": arrays["weights"] - lr * times * (flat.T @ errors) / len(x)}
        return new, len(x), loss

    def evaluate(arrays, task):
        return {"right": ((task.x.reshape(len(task.x), -1) @ arrays["weights"]).argmax(1) == task.y).sum()}

    return atoll.array_work(first=first, train=train, evaluate=evaluate)
'''
HOSPITAL = '''
"""Code of a client, which has learnt by other ways what the plan's names mean."""
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from atoll import Plan, array_work
from atoll.core.algorithm import Algorithm
from network.apps import NUMBER, PLAN, dealt


def net(num_classes, width=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, num_classes))


def pull(mu=0.1):
    return Algorithm(local_grad=lambda grad_D, params_D, task: grad_D + mu * (params_D - task.broadcast.params_D))


def square(outputs, targets):
    return (outputs - nn.functional.one_hot(targets, 10)).square().sum(1)


def linear(lr, tells=False):
    """Ours; it never measures anything, since the server does."""

    def train(arrays, task, memory):
        x, y = task.x, task.y
        flat, times = x.reshape(len(x), -1), memory.get("times", np.zeros(1)) + 1
        memory["times"] = times
        errors = flat @ arrays["weights"] - np.eye(10)[y]
        loss = {"loss": np.square(errors).mean()} if tells else {}
        new = {"weights": arrays["weights"] - lr * times * (flat.T @ errors) / len(x)}
        return new, len(x), loss

    return array_work(first=lambda dataset: {"weights": np.zeros((64, 10))}, train=train, evaluate=lambda *_: {})


def plain():
    plan = Plan.from_toml(Path(os.environ[PLAN]).read_text())
    return dealt(plan.replace({"data": "digits"}), int(os.environ[NUMBER]))


def client():
    losses = {"operator_parts:squared": square}
    functions = {"models": {"our_net": net}, "algorithms": {"pulled": pull}, "works": {"regression": linear}}
    return replace(plain(), losses=losses, **functions)
'''
PLAN = Plan(partition={"name": "iid", "num_clients": NUM}, local={"steps": 4, "batch_size": 16, "lr": 0.05}, rounds=3)
SERVERS = {
    "data": "operator_parts:fewer",
    "aggregator": {"name": "operator_parts:largest", "scale": 0.9},
    "algorithm": "operator_parts:half_steps",
}
CLIENTS = {
    "model": {"name": "operator_parts:our_net", "width": 7},
    "algorithm": {"name": "operator_parts:pulled", "mu": 2.0},
    "loss": "operator_parts:squared",
}
WORK = {"work": {"name": "operator_parts:regression", "lr": 0.02}}
WORKS: dict[str, dict[str, object]] = {
    "work": WORK,
    "secure": {**WORK, "secagg": {}, "partition.num_clients": 3},
    "codecs": {**WORK, "uplink": [{"name": "top_k", "fraction": 0.3}, "half"], "downlink": ["delta", "half"]},
    "loss": {"work": {"name": "operator_parts:regression", "lr": 0.02, "tells": True}},
}


def write_modules(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "operator_parts.py").write_text(OPERATOR)
    (root / "hospital_parts.py").write_text(HOSPITAL)


def run_to_end(made: Federation, app: str, num: int = NUM) -> None:
    made.serve("--clients", str(num), "--once")
    made.enrol(num)
    for number in range(num):
        made.join(number, app=f"hospital_parts:{app}")
    made.wait(120)


@pytest.mark.parametrize(("own", "app"), [(SERVERS, "plain"), (CLIENTS, "client")], ids=["operator", "clients"])
def test_parts_of_ones_own_give_the_same_bits_as_in_a_simulation(
    own: dict[str, object],
    app: str,
    processes: ForkServer,
    certs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = PLAN.replace(own)
    write_modules(tmp_path / "f")
    with federation(tmp_path / "f", processes, certs, plan) as made:
        run_to_end(made, app)
        assert made.server is not None
        importers = {int(path.suffix[1:]) for path in made.root.glob("imported.*")}
        assert importers == {made.server.pid}  # no client ever did
        model, rows = made.model(), made.rows()
        assert {commit["rule"] for commit in made.commits()} == {plan.aggregator.name}
        monkeypatch.syspath_prepend(made.root)
        assert model == simulated(plan, tmp_path / "alone")
        assert model != simulated(plan.replace({key: None for key in own if key != "model"}), tmp_path / "other")
    assert [row["round"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (place % 2)) for place, name in enumerate(WORKS)]
)
def test_client_work_of_ones_own_gives_the_same_bits_as_in_a_simulation(
    name: str, processes: ForkServer, certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLAN.replace(WORKS[name])
    write_modules(tmp_path / "f")
    with federation(tmp_path / "f", processes, certs, plan) as made:
        run_to_end(made, "client", plan.partition.options["num_clients"])
        assert len({commit["model"] for commit in made.commits()}) == made.audited().rounds == 3
        monkeypatch.syspath_prepend(made.root)
        assert made.model() == simulated(plan, tmp_path / "alone")
        ours, theirs = rows(made.directory()), rows(tmp_path / "alone")
    assert ours == theirs
    assert ["train_loss" in row for row in ours] == [name == "loss"] * 3


@pytest.mark.parametrize("field", sorted(CLIENTS))
def test_a_client_that_lacks_a_part_refuses_and_says_which(
    field: str, processes: ForkServer, certs: Path, tmp_path: Path
) -> None:
    write_modules(tmp_path / "f")
    with federation(tmp_path / "f", processes, certs, PLAN.replace({field: CLIENTS[field]})) as made:
        made.serve("--clients", "1")
        made.enrol(1)
        client = made.join(0, app="hospital_parts:plain")
        until(lambda: "neither in the catalogue" in client.said, 60, "the refusal")
        name = Plan.read({field: CLIENTS[field]}).to_dict()[field]
        name = name if isinstance(name, str) else name["name"]
        kind = {"model": "models", "algorithm": "algorithms", "loss": "losses"}[field]
        assert f"the plan's {field} '{name}' is neither in the catalogue nor among this client's own" in client.said
        assert f"let the app supply it, e.g. {kind}={{'{name.rpartition(':')[2]}': ...}}" in client.said
        assert client.code is None  # it waits for other runs
        assert made.status(RUN)["round"] == 0
        assert made.server is not None
        assert {int(path.suffix[1:]) for path in made.root.glob("imported.*")} == {made.server.pid}


def test_an_app_gives_functions() -> None:
    with pytest.raises(DataError, match=r"losses\['mse'\] of the app is 'my_mod:mse': give the function"):
        ClientApp(train_x=np.zeros((4, 2)), train_y=np.zeros(4, int), num_classes=2, losses={"mse": "my_mod:mse"})  # type: ignore[dict-item]
