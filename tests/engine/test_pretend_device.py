"""Every member of every family runs a round on a device, with the bits of the processor.

The device is a pretend one (`pretend_device`): its numbers are the processor's, and operations refuse tensors that lie
in both places. Members are found by listing their folders, with the EXAMPLES beside them; what a plan needs around a
member is read from its traits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pretend_device
import pytest
import torch
from helpers import timeless
from laws.random_plans import OPTIONS, needs_file, personal_plan, random_plan
from torch import Tensor, nn

from atoll import Plan, run
from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Algorithm
from atoll.core.errors import DataError, PlanError
from atoll.core.parts import Part, examples, find, members
from atoll.train.build import build_job
from atoll.train.losses import cross_entropy

HERE: tuple[dict[str, Any], ...] = ({"name": "inline"}, {"name": "vectorised", "stack": 3})
DATA = {
    "classification": {"data": "digits", "model": {"name": "mlp_2nn", "hidden": 6}},
    "binary": {"data": "problem_data:cancer", "model": "logistic"},
    "multi_label": {"data": "problem_data:labels", "model": "logistic"},
    "regression": {"data": "problem_data:diabetes", "model": "logistic"},
    "survival": {"data": "problem_data:lifetimes", "model": "logistic"},
    "tokens": {"data": "problem_data:sequences", "model": {"name": "char_lstm", "hidden": 6, "layers": 1}},
}
NOISE = {"clip": 0.5, "sigma": 2.0, "delta": 1e-5, "test_noise": True}
OTHERWISE = {"char_lstm", "helpers:recurrent", "helpers:grouped"}
"""Models for which torch takes other operations on a device than on the processor: recurrence by cells, and group norm
of images in another layout."""
ENDS_THE_PROCESS = "helpers:grouped"
"""torch itself ends the process where a gradient of group norm is mapped over clients on a Python backend, as in
`vmap(grad(group_norm))`, so that algorithms that take gradients of their own train it one by one here."""
FAST = {"fedavg", "scaffold", "adam", "cross_entropy", "confusion", "top_k", "sample", "krum", "backdoor", "logistic"}
"""One or two members of each family, which show in a few seconds that the path holds."""


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pretend_device.known():
        yield
    torch.set_num_threads(threads)


def plan_of(**changes: Any) -> Plan:
    settings: dict[str, Any] = {
        "partition": {"num_clients": 7},
        "policy": {"size": 5},
        "local": {"lr": 0.05, "batch_size": 8, "steps": 2},
        "rounds": 1,
        **DATA["classification"],
    }
    return Plan(**{**settings, **changes})


def must_agree(plan: Plan, engines: tuple[dict[str, Any], ...] = HERE, within: float = 1e-5) -> None:
    """Run a plan here and on the device, one by one and stacked, and compare all bits and figures.

    Where torch itself computes otherwise on a device, numbers may be apart, `within` rounding.
    """
    for engine in engines:
        here = run(plan.replace({"engine": engine}))
        there = run(plan.replace({"engine": {**engine, "device": "pretend"}}))
        assert there.engine["device"] == "pretend"
        assert {**there.engine, "device": 0} == {**here.engine, "device": 0}
        assert type(there.params_D) is Tensor
        assert [row.keys() for row in there.history] == [row.keys() for row in here.history]
        if plan.model.name in OTHERWISE:
            assert (there.params_D - here.params_D).abs().max() < within
            continue
        assert torch.equal(here.params_D, there.params_D), (plan.to_toml(), engine)
        assert repr(timeless(here.history)) == repr(timeless(there.history)), (plan.to_toml(), engine)
        assert here.models.keys() == there.models.keys()
        for client in list(here.models)[:2]:
            pairs = zip(
                here.models[client].state_dict().values(), there.models[client].state_dict().values(), strict=True
            )
            assert all(torch.equal(*pair) for pair in pairs)


def one_must_agree(plans: list[Plan]) -> None:
    """Compare those of some plans that are not refused, of which there must be one."""
    accepted = 0
    for plan in plans:
        try:
            run(plan.replace({"engine": "inline"}))
        except PlanError:
            continue  # the member is not for this place, by a rule of its own
        accepted += 1
        must_agree(plan, HERE[:1])
    assert accepted


def parameters(family: str) -> list[Any]:
    """List the members of a family with each of their settings; all but a few are slow."""
    found = []
    for name in members(family):
        if needs_file(family, name):
            continue
        for number, settings in enumerate(OPTIONS.get((family, name)) or examples(family, name)):
            marks = () if name in FAST and number == 0 else pytest.mark.slow
            found.append(pytest.param(name, settings, marks=marks, id=f"{name}-{number}"))
    return found


@pytest.mark.parametrize(("name", "settings"), parameters("algorithms"))
def test_an_algorithm(name: str, settings: dict[str, Any]) -> None:
    part = Part(name, **settings)
    algorithm: Algorithm = part.build("algorithms")
    local = {"lr": 0.05, "batch_size": 8, "steps": 2}
    around: dict[str, Any] = {"local": {key: value for key, value in local.items() if key not in algorithm.local}}
    if "epochs" in algorithm.local:
        around["local"].pop("steps", None)
    if algorithm.needs_public:
        around["public"] = {"name": "held_out", "fraction": 0.1}
    if algorithm.keep is not None:
        around["model"] = "helpers:normalised"
    if algorithm.prepare is not None:
        around["model"] = {"name": "lora_mlp", "hidden": 8}
    if algorithm.needs_validation:
        around["evaluation"] = {"validation": 0.1}
    must_agree(plan_of(algorithm=part, rounds=2, **around))


@pytest.mark.parametrize(("name", "settings"), parameters("train.optimizers"))
def test_an_optimiser(name: str, settings: dict[str, Any]) -> None:
    must_agree(plan_of(local={"lr": 0.01, "batch_size": 8, "steps": 3, "optimizer": {"name": name, **settings}}))


@pytest.mark.parametrize(("name", "settings"), parameters("train.schedules"))
def test_a_schedule(name: str, settings: dict[str, Any]) -> None:
    must_agree(plan_of(local={"steps": 2, "schedule": {"name": name, **settings}}))


@pytest.mark.parametrize(("name", "settings"), parameters("train.losses"))
def test_a_loss(name: str, settings: dict[str, Any]) -> None:
    fits = __import__(find("train.losses", name).__module__, fromlist=["FITS"]).FITS
    for kind in fits:
        padding = {"ignore": True} if kind == "tokens" else {}
        must_agree(plan_of(loss={"name": name, **settings, **padding}, **DATA[kind]))


def test_the_weights_of_classes_go_with_the_outputs() -> None:
    must_agree(plan_of(loss={"name": "cross_entropy", "weights": [1.0 + k for k in range(10)], "label_smoothing": 0.1}))


@pytest.mark.parametrize(("name", "settings"), parameters("metrics"))
def test_a_metric(name: str, settings: dict[str, Any]) -> None:
    """Measure the problems that a metric fits, one of which there must be."""
    ask = {"metrics": [{"name": name, **settings}], "clients_every": 1}
    one_must_agree([plan_of(evaluation=ask, **DATA[kind]) for kind in DATA])


@pytest.mark.parametrize(("name", "settings"), parameters("models"))
def test_a_model(name: str, settings: dict[str, Any]) -> None:
    around = {"data": "helpers:phrases"} if name == "char_lstm" else {"data": "digits"}
    try:
        run(plan_of(model={"name": name, **settings}, **around).replace({"engine": "inline"}))
    except PlanError as refusal:
        pytest.skip(f"not for digits: {refusal}")
    must_agree(plan_of(model={"name": name, **settings}, **around))


@pytest.mark.parametrize("name", ["normed", "dropped", "convolutions", "grouped", "normalised", "recurrent"])
def test_a_model_of_many_layers(name: str) -> None:
    must_agree(plan_of(model=f"helpers:{name}", rounds=2))


@pytest.mark.parametrize(("name", "settings"), parameters("transforms"))
def test_a_transform(name: str, settings: dict[str, Any]) -> None:
    part = {"name": name, **settings}
    ways: list[dict[str, Any]] = [{"uplink": [part]}, {"downlink": ["delta", part]}, {"downlink": [part]}]
    one_must_agree([plan_of(rounds=2, **way) for way in ways])


@pytest.mark.parametrize(("name", "settings"), parameters("privacy.mechanisms"))
def test_a_mechanism(name: str, settings: dict[str, Any]) -> None:
    part = {"name": name, **settings}
    split = plan_of(privacy=part, split={"cut": "2"}, local={"buffers": "local"}, engine={"name": "inline"})
    if name == "activations":  # of split learning, which stays on the processor
        with pytest.raises(PlanError) as refused:
            run(split.replace({"engine.device": "pretend"}))
        assert refused.value.rule.startswith(("split-", "activations-"))  # whichever of its rules comes first
        return
    one_must_agree([plan_of(privacy=part, sampler=sampler) for sampler in ("uniform", "poisson", "round_robin")])


@pytest.mark.parametrize("model", ["mlp_2nn", "helpers:normalised", "helpers:dropped"])
def test_private_steps_by_layers_and_by_samples(model: str) -> None:
    must_agree(plan_of(privacy={"name": "sample", **NOISE}, model=model))


@pytest.mark.parametrize(("name", "settings"), parameters("aggregators"))
def test_a_rule(name: str, settings: dict[str, Any]) -> None:
    rule: Aggregator = Part(name, **settings).build("aggregators", seed=0)
    server = {"lr": 0.1} if rule.unit_steps else {}
    if rule.add_server_update is not None:
        server["samples"] = 50
    enough = {"partition": {"num_clients": 11}, "policy": {"size": 11}}
    must_agree(plan_of(aggregator={"name": name, **settings}, server=server, **enough))


@pytest.mark.parametrize(("name", "settings"), parameters("attacks"))
def test_an_attack(name: str, settings: dict[str, Any]) -> None:
    must_agree(plan_of(attack={"name": name, **settings}, attackers={"num": 2}, policy={"size": 7}))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"personal": number} for number in range(30)] + [{"plan": n} for n in range(80)])
def test_a_random_plan(settings: dict[str, int]) -> None:
    """Parts beside each other agree, or are refused in both places."""
    [(kind, seed)] = settings.items()
    plan = personal_plan(seed) if kind == "personal" else random_plan(seed)
    try:
        run(Plan(**plan, engine="inline"))
        build_job(Plan(**plan, engine={"name": "inline", "device": "pretend"}))
    except (PlanError, DataError):
        return  # with a reason, as the law of composition sees to
    drawn = Plan(**plan)
    own_gradients = "grad_at" in inspect.getsource(find("algorithms", drawn.algorithm.name))
    engines = HERE[:1] if own_gradients and drawn.model.name == ENDS_THE_PROCESS else HERE
    must_agree(drawn, engines, within=1e9)  # codecs and votes turn a rounding into a jump


def planted(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with a tensor that stays on the processor."""
    return cross_entropy.plain_cross_entropy(outputs, targets) * torch.ones(len(outputs))


class Planted(nn.Module):
    """A model with a tensor that is no buffer, so that it stays on the processor."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(64, num_classes), torch.zeros(num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Add what lies elsewhere."""
        found: Tensor = self.layer(x.flatten(1)) + self.shift
        return found


@pytest.mark.parametrize("engine", HERE, ids=["inline", "vectorised"])
@pytest.mark.parametrize("part", [{"loss": planted}, {"model": lambda num_classes: Planted(num_classes)}])
def test_a_planted_tensor_of_the_processor_is_refused_before_training(engine: Any, part: dict[str, Any]) -> None:
    plan = plan_of(engine={**engine, "device": "pretend"}, **part)
    run(plan.replace({"engine.device": "cpu"}))
    with pytest.raises(PlanError, match=r"does not run on pretend.*same device.*register_buffer"):
        run(plan)
