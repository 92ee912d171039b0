from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import PlanError
from atoll.core.parts import Part, find, members
from atoll.core.plan import Plan


@given(
    rounds=st.integers(0, 10**6),
    lr=st.floats(1e-6, 10),
    mu=st.floats(0, 10),
    batch=st.one_of(st.integers(1, 500), st.just("all")),
    name=st.text(max_size=20),
    norm=st.floats(0.01, 100),
)
def test_toml_gives_the_same_plan_back(
    rounds: int, lr: float, mu: float, batch: int | str, name: str, norm: float
) -> None:
    plan = Plan(
        name=name,
        rounds=rounds,
        algorithm={"name": "fedprox", "mu": mu},
        local={"lr": lr, "batch_size": batch, "optimizer": {"name": "sgd", "momentum": 0.9}},
        uplink=[{"name": "clip", "norm": norm}, "identity"],
        stop={"accuracy": 0.5},
    )
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert again.identity() == plan.identity()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("algoritm = 'fedavg'", "did you mean 'algorithm'"),
        ("[local]\nepocs = 1", "unknown key 'local.epocs' in the plan: did you mean 'epochs'"),
        ("rounds = 'many'", "rounds must be a whole number of 0 or more, got"),
        ("rounds = true", "rounds must be a whole number of 0 or more, got"),
        ("rounds = -1", "rounds must be 0 or more"),
        ("[local]\nepochs = 1\nsteps = 2", "leave one out"),
        ("[local]\nbatch_size = 0", "at least 1"),
        ("[local]\nbatch_size = 'some'", "batch_size"),
        ("[local]\nlr = 0.0", "local.lr must be above 0"),
        ("[local]\nbuffers = 'averge'", "did you mean 'average'"),
        ("[stop]\naccuracy = 97", "97 % is 0.97"),
        ("[attackers]\nnum = 1\nfraction = 0.1", "give one of"),
        ("local = 3", "'local' is a table"),
        ("rounds = ", "not valid TOML"),
        ("seed = -3", "seed must be 0 or more"),
        ("model = 3", "must be a name or a table"),
    ],
)
def test_a_wrong_plan_is_refused_with_a_way_out(text: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_toml(text)
    assert says in str(error.value)


def test_settings_change_one_thing() -> None:
    plan = Plan(algorithm={"name": "fedprox", "mu": 0.5})
    assert plan.replace({"algorithm.mu": 0.1}).algorithm == Part("fedprox", mu=0.1)
    assert plan.replace({"algorithm": "fedavg"}).algorithm == Part("fedavg")
    assert plan.replace({"local.optimizer.momentum": 0.9}).local.optimizer == Part("sgd", momentum=0.9)
    assert plan.replace({"algorithm": None, "attack": None}).algorithm == Part("fedavg")
    with pytest.raises(PlanError, match=r"unknown key 'local\.momentun'"):
        plan.replace({"local.momentun": 1})
    with pytest.raises(PlanError, match="not a table"):
        plan.replace({"rounds.x": 1})


def test_settings_are_read_and_not_changed() -> None:
    noise = {"name": "local", "clip": 1.0}
    plan = Plan().replace({"privacy": noise, "privacy.clip": 2.0})
    assert plan.privacy is not None and plan.privacy.options["clip"] == 2.0
    assert noise == {"name": "local", "clip": 1.0}


def test_identity_ignores_the_engine_and_how_long_to_go_on() -> None:
    plan = Plan()
    assert plan.identity() == plan.replace({"engine": "inline", "rounds": 99, "name": "x"}).identity()
    assert plan.identity() != plan.replace({"seed": 1}).identity()
    assert plan.identity() != plan.replace({"local.lr": 0.2}).identity()


def test_names_resolve_by_convention() -> None:
    assert "fedprox" in members("algorithms")
    assert find("algorithms", "fedprox").__name__ == "fedprox"
    with pytest.raises(PlanError, match="did you mean 'fedprox'"):
        find("algorithms", "fedpox")
    with pytest.raises(PlanError, match="cannot import 'no_such_module'"):
        find("algorithms", "no_such_module:thing")
    with pytest.raises(PlanError, match="has no 'pathh'"):
        find("algorithms", "os:pathh")


def test_options_are_checked_by_name() -> None:
    with pytest.raises(PlanError, match=r"has no option 'nu'.*Known: mu"):
        Part("fedprox", nu=0.1).build("algorithms")
    with pytest.raises(PlanError, match="clip: norm is missing: give it a value"):
        Part("clip").build("transforms")
    with pytest.raises(PlanError, match=r"fedprox: mu must be 0 or more, got -1\.0; 0 is fedavg"):
        Part("fedprox", mu=-1.0).build("algorithms")
