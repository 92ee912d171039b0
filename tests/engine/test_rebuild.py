"""A job that is built again from bytes is the same job, or is refused by what differs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll import Plan, run
from atoll.core.errors import PlanError, RunError
from atoll.core.messages import Task
from atoll.engine.ray import MAX_TRIES, Desk
from atoll.engine.rebuild import blueprint, pack, rebuilt_job, rebuilt_trainer, unpack
from atoll.train.build import build_job
from atoll.train.job import broadcast_of, first_server
from atoll.train.trainer import Trainer

OWN = """
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from atoll import Dataset


def model(input_shape, num_classes):
    seen = Path("seen")
    wide = 5 if seen.exists() and seen.read_text() == "wider" else 4
    layers = nn.Sequential(nn.Flatten(), nn.Linear(6, wide), nn.ReLU(), nn.Linear(wide, num_classes))
    if seen.exists() and seen.read_text() == "shifted":
        with torch.no_grad():
            layers[1].weight += 1
    return layers


def data():
    seen = Path("seen")
    rng = np.random.default_rng(1 if seen.exists() and seen.read_text() == "others" else 0)
    x, y = rng.normal(size=(60, 6)).astype("float32"), rng.integers(0, 3, 60)
    return Dataset(name="mine", train_x=x, train_y=y, test_x=x[:9], test_y=y[:9], num_classes=3)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own in the working directory, whose parts change with the file `seen`."""
    name = f"own_{os.urandom(4).hex()}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def plan_of(own: str, **changes: Any) -> Plan:
    parts = {"data": f"{own}:data", "model": f"{own}:model", "algorithm": "scaffold"}
    return Plan(**{**parts, "partition": {"num_clients": 4}, **changes})


def test_a_job_is_built_again_with_all_that_it_trains_on(own: str) -> None:
    plan = plan_of(own, keep=["3.*"], algorithm="fedavg")
    job = build_job(plan, secret=bytes(range(32)))
    trainer = Trainer(job, stack=2)
    other = rebuilt_trainer(blueprint(plan, job), stack=2)
    assert other.job.secret == job.secret and other.stack == trainer.stack == 2
    sent = {0: broadcast_of(job, job.first_D, first_server(job, job.first_D))}
    here, there = (each.train([Task(0, 0, 0), Task(3, 0, 0)], sent, {}) for each in (trainer, other))
    assert here.reports == there.reports
    assert all(torch.equal(value, there.folded[name]) for name, value in here.folded.items())
    kept = [each.states[3] for each in (here, there)]
    assert kept[0].keys() == kept[1].keys() and all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])


@pytest.mark.parametrize(
    ("seen", "words"), [("others", "the samples"), ("wider", "the model"), ("shifted", "the model")]
)
def test_what_differs_in_another_process_is_named(own: str, seen: str, words: str) -> None:
    plan = plan_of(own)
    data = blueprint(plan, build_job(plan))
    rebuilt_job(data)
    Path("seen").write_text(seen)
    with pytest.raises(RunError, match=f"what differs is {words}"):
        rebuilt_job(data)


def test_another_version_is_refused(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(own)
    data = blueprint(plan, build_job(plan))
    monkeypatch.setattr("atoll.engine.rebuild.version", lambda name: "0.0.9")
    with pytest.raises(RunError, match="the version of Atoll: install the same one everywhere"):
        rebuilt_job(data)


def test_code_that_is_nowhere_is_named(own: str, tmp_path: Path) -> None:
    plan = plan_of(own)
    data = blueprint(plan, build_job(plan))
    header, tensors = unpack(data)
    header |= {"directory": "/not/there", "path": [], "plan": header["plan"].replace(own, "nobodys")}
    with pytest.raises(RunError, match=r"cannot build the plan .*there is no /not/there here.*cannot import 'nobodys'"):
        rebuilt_job(pack(header, tensors))


@pytest.mark.parametrize("model", [lambda input_shape, num_classes: nn.Flatten(), "__main__:model"])
def test_what_has_no_name_is_refused_before_anything_is_sent(model: Any) -> None:
    plan = Plan(model=model, engine="ray")
    with pytest.raises(PlanError, match=r"model is .*put it into a module and name it"):
        blueprint(plan, build_job(Plan()))


def test_tensors_of_every_type_and_shape_arrive_in_their_order() -> None:
    kinds = (
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int64,
    )
    tensors = {f"z{place}": torch.ones(3, dtype=kind) for place, kind in enumerate(kinds)}
    tensors |= {"empty": torch.zeros(0, 4), "number": torch.tensor(np.pi), "view": torch.arange(12.0).view(3, 4).T}
    header, found = unpack(pack({"tasks": [[1, 2, 3, 0.5]], "none": None}, tensors))
    assert header == {"tasks": [[1, 2, 3, 0.5]], "none": None}
    assert list(found) == list(tensors)
    for name, value in tensors.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype
        assert not value.numel() or found[name].data_ptr() % 64 == 0  # as torch aligns its own memory


def test_the_answers_of_a_desk_keep_the_order_of_the_requests_however_workers_are_lost() -> None:
    desk, rng, said, busy = Desk(({"n": n}, {}) for n in range(50)), np.random.default_rng(0), [], []
    tries = dict.fromkeys(range(50), 0)
    while not desk.is_done:
        while len(busy) < 3 and (number := desk.take(3)) is not None:
            assert desk.request(number) == ({"n": number}, {})
            busy.append(number)
        assert len(desk._answers) <= 7  # what is held back is bounded by the workers, not by the cohort
        number = busy.pop(rng.integers(len(busy))) if busy else -1
        if busy and tries[number] < MAX_TRIES - 1 and rng.random() < 0.4:
            tries[number] += 1
            desk.give_back(number, "it was killed")
        elif number >= 0:
            desk.answer(number, ({"n": number}, {}))
        while (message := desk.pop()) is not None:
            said.append(message[0]["n"])
    assert said == list(range(50)) and sum(tries.values()) > 10


def test_a_group_that_loses_every_worker_ends_the_run() -> None:
    desk = Desk([({}, {})])
    for _ in range(MAX_TRIES - 1):
        number = desk.take(1)
        assert number == 0
        desk.give_back(number, "killed by the kernel")
    number = desk.take(1)
    with pytest.raises(RunError, match=r"3 workers were lost .*killed by the kernel.*--resume"):
        desk.give_back(number or 0, "killed by the kernel")


def test_the_plan_says_how_to_install_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    with pytest.raises(PlanError, match=r"needs Ray: pip install 'atoll\[ray\]', on every machine"):
        run(Plan(partition={"num_clients": 3}, rounds=1, engine={"name": "ray", "address": "local"}))
