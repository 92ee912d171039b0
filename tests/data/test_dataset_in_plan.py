"""`Plan(data=dataset)`: a data set as an object, in a run, its files, and what cannot hold it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import PlanError, RunError
from atoll.core.parts import Part
from atoll.data.dataset import Dataset


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return Part("digits").build("data.catalog")


def plan_of(data: object, **settings: object) -> atoll.Plan:
    common = {"rounds": 2, "partition": {"name": "iid", "num_clients": 6}, "engine": "inline"}
    return atoll.Plan(data=data, **common | settings)


@pytest.mark.parametrize("engine", ["inline", {"name": "processes", "workers": 2}])
def test_an_object_gives_the_bits_of_the_named_data(digits, engine):
    results = [atoll.run(plan_of(data, engine=engine)) for data in (digits, "digits")]
    assert torch.equal(results[0].params_D, results[1].params_D)


def test_a_run_is_written_with_a_name_and_resumed_with_the_object(digits, tmp_path):
    plan = plan_of(digits, rounds=1)
    atoll.run(plan, out=tmp_path / "run", report=False)
    name = f"dataset:<digits {digits.fingerprint}>"
    assert atoll.Plan.from_toml((tmp_path / "run" / "plan.toml").read_text()).data.name == name
    with pytest.raises(
        RunError, match=r"the data of .*run is dataset:<digits .*>, a data set of the script that began"
    ):
        atoll.resume(tmp_path / "run")
    longer = atoll.resume(tmp_path / "run", plan.replace({"rounds": 2}))
    assert torch.equal(longer.params_D, atoll.run(plan_of(digits)).params_D)


def test_a_run_is_not_resumed_with_other_samples(digits, tmp_path):
    atoll.run(plan_of(digits, rounds=1), out=tmp_path / "run", report=False)
    other_y = np.roll(digits.train_y, 1)
    with pytest.raises(RunError, match="belongs to another plan"):
        atoll.resume(tmp_path / "run", plan_of(replace(digits, train_y=other_y)))


def test_a_plan_file_with_an_object_says_what_to_do(digits):
    plan = atoll.Plan.from_toml(plan_of(digits).to_toml())
    with pytest.raises(PlanError, match=r"is an object of the script that made this plan.*'module:function'"):
        atoll.run(plan)


def test_the_fingerprint_follows_the_samples(digits):
    assert replace(digits, name="other").fingerprint == digits.fingerprint
    assert replace(digits, train_x=digits.train_x[::-1]).fingerprint != digits.fingerprint
