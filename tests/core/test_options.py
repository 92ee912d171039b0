"""What options may be, and how they are named when they may not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from atoll.core.errors import PlanError
from atoll.core.options import Count, Range, option_hints, read_value
from atoll.core.parts import Part, find, members
from atoll.core.plan import Local, Plan
from atoll.core.suggestions import BY_NAME, KEYS, plan_keys
from atoll.train.build import build_job

NAN, INF = float("nan"), float("inf")
FAMILIES = {
    "algorithm": "algorithms",
    "partition": "data.partition",
    "policy": "rounds",
    "privacy": "privacy.mechanisms",
    "engine": "engine",
    "local.optimizer": "train.optimizers",
}


@pytest.mark.parametrize(
    ("family", "part", "says"),
    [
        (
            "algorithms",
            Part("fedprox", mu=NAN),
            "fedprox: mu must be a finite number of 0 or more, got nan; 0 is fedavg",
        ),
        (
            "algorithms",
            Part("fedprox", mu=INF),
            "fedprox: mu must be a finite number of 0 or more, got inf; 0 is fedavg",
        ),
        (
            "algorithms",
            Part("fedprox", mu="0.1"),
            "mu must be a number of 0 or more, got the text '0.1': leave out the",
        ),
        ("algorithms", Part("fedprox", mu=True), "fedprox: mu must be a number of 0 or more, got True"),
        ("attacks", Part("sign_flip", scale=NAN), "sign_flip: scale must be a finite number, got nan"),
        ("attacks", Part("sign_flip", scale=-INF), "sign_flip: scale must be a finite number, got -inf"),
        ("train.optimizers", Part("sgd", weight_decay=NAN), "sgd: weight_decay must be a finite number of 0 or more"),
        ("train.optimizers", Part("adam", weight_decay=INF), "adam: weight_decay must be a finite number of 0 or more"),
        ("rounds.devices", Part("fleet", spread=NAN), "fleet: spread must be a finite number in [0, 20], got nan"),
        (
            "transforms",
            Part("quantise", bits="8"),
            "bits must be a whole number in [1, 16], got the text '8': leave out",
        ),
        ("transforms", Part("quantise", bits=8.0), "quantise: bits must be a whole number in [1, 16], got 8.0"),
        ("transforms", Part("clip", norm="1"), "clip: norm must be a number above 0, got the text '1': leave out"),
        ("attacks", Part("backdoor", target=-1), "backdoor: target must be 0 or more, got -1"),
        (
            "rounds",
            Part("buffered", staleness="hing"),
            "must be 'constant', 'hinge' or 'polynomial', got the text 'hing': did",
        ),
        ("rounds.samplers", Part("uniform", replacement=1), "uniform: replacement must be true or false, got 1"),
        (
            "attacks",
            Part("ipm", factor="optimized"),
            "factor must be a number or 'optimised', got the text 'optimized'",
        ),
        (
            "models",
            Part("lenet", input_shape=[1, 28]),
            "must be a list of 3, each item a whole number in [1, 65536], got",
        ),
        ("transforms", Part("layers", patterns=["a", 3]), "layers: patterns[1] must be text in quotes, got 3"),
    ],
)
def test_wrong_options_are_refused_in_plain_words(family: str, part: Part, says: str) -> None:
    with pytest.raises(PlanError) as error:
        part.build(family, **({"num_classes": 10} if family == "models" else {}))
    assert says in str(error.value)


def test_a_whole_number_is_fine_where_a_number_is_wanted() -> None:
    assert read_value(float, 1, "x") == 1.0 and isinstance(read_value(float, 1, "x"), float)
    assert read_value(Annotated[float, Range(infinite=True)], INF, "x") == INF
    with pytest.raises(PlanError, match="x must be a finite number, got nan"):
        read_value(Annotated[float, Range(infinite=True)], NAN, "x")
    with pytest.raises(PlanError, match=r"x must be a whole number below 2\^63, got 1000000000000000000000"):
        read_value(int, 10**30, "x")
    with pytest.raises(PlanError, match=r"x must be 32 or 64, got 32\.0"):
        read_value(Literal[32, 64], 32.0, "x")


def own_part(size: Count, path: "NotImported" = None, *, rate: float = 0.5) -> Any:  # type: ignore[name-defined]  # noqa: F821, UP037
    return size, path, rate


def test_parts_of_ones_own_are_checked_too() -> None:
    assert Part(own_part, size=2, path="x").build("models") == (2, "x", 0.5)
    assert list(option_hints(own_part)) == ["size", "path", "rate"]
    with pytest.raises(PlanError, match="own_part: size must be at least 1, got 0"):
        Part(own_part, size=0).build("models")
    with pytest.raises(PlanError, match="own_part: size is missing: give it a value"):
        Part(own_part).build("models")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"local.lr": NAN}, "local.lr must be a finite number above 0, got nan"),
        ({"local.lr": INF}, "local.lr must be a finite number above 0, got inf"),
        ({"local.lr": "0.1"}, "local.lr must be a number above 0, got the text '0.1': leave out the quotes"),
        ({"server.lr": INF}, "server.lr must be a finite number above 0"),
        ({"stop.seconds": NAN}, "stop.seconds must be a finite number above 0, got nan; leave it out for no limit"),
        ({"attackers.start_round": -1}, "attackers.start_round must be 0 or more, got -1"),
        ({"attackers.fraction": NAN}, "attackers.fraction must be a finite number in [0, 1], got nan"),
        ({"secagg.modulus_bits": 48}, "secagg.modulus_bits must be 32 or 64, got 48"),
        ({"seed": 2**256}, "seed must be a whole number below 2^256"),
    ],
)
def test_tables_are_checked_likewise(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan(secagg={}).replace(settings)
    assert says in str(error.value)


def test_a_table_in_python_names_its_keys_in_full() -> None:
    with pytest.raises(PlanError, match=r"local\.lr must be above 0, got -1\.0"):
        Local(lr=-1.0)
    with pytest.raises(PlanError, match=r"unknown key 'local\.learning_rate' in the plan: did you mean 'local\.lr'\?"):
        Local(learning_rate=0.1)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match=r"local\.optimizer\.momentum must be in \[0, 1\), got 1\.0"):
        build_job(Plan(local=Local(optimizer=Part("sgd", momentum=1.0))))


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(PlanError, match="not valid TOML"):
        Plan.from_toml(f"rounds = {'9' * 5000}")
    with pytest.raises(PlanError, match=r"rounds must be a whole number below 2\^63, got int that is too long"):
        Plan(rounds=10**5000)


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        ({"name": "backdoor", "target": 99}, "backdoor: attack.target is 99, but classes are 0 to 9"),
        ({"name": "label_flip", "source": 10, "target": 0}, "label_flip: attack.source is 10, but classes are 0 to 9"),
    ],
)
def test_a_class_that_the_data_lack_is_refused_when_the_job_is_built(attack: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        build_job(Plan(attack=attack, attackers={"num": 1}))


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("learning_rate", "did you mean 'local.lr'? Known: aggregator, "),
        ("lr", "did you mean 'local.lr'?"),
        ("batch_size", "did you mean 'local.batch_size'?"),
        ("epochs", "did you mean 'local.epochs'?"),
        ("workers", "did you mean 'engine.workers'?"),
        ("num_clients", "did you mean 'partition.num_clients'?"),
        ("n_clients", "did you mean 'partition.num_clients'?"),
        ("epsilon", "did you mean 'privacy.epsilon'?"),
        ("num_rounds", "did you mean 'rounds'?"),
        ("clients_per_round", "did you mean 'policy.size'?"),
        ("fraction_fit", "did you mean 'policy.fraction'?"),
        ("strategy", "did you mean 'algorithm'?"),
        ("dataset", "did you mean 'data'?"),
        ("optimizer", "did you mean 'local.optimizer'?"),
        ("holdout", "did you mean 'evaluation.holdout'?"),
        ("samples", "did you mean 'server.samples' or 'stop.samples'?"),
        ("device", "all engines compute on the processor; 'engine' says how"),
        ("rouds", "did you mean 'rounds'?"),
        ("local.rounds", "did you mean 'rounds'?"),
        ("local.momentum", "did you mean 'local.optimizer.momentum'?"),
        ("local.learning_rate", "did you mean 'local.lr'?"),
    ],
)
def test_unknown_keys_are_pointed_to_the_right_one(key: str, says: str) -> None:
    table, _, name = key.rpartition(".")
    toml = f"[{table}]\n{name} = 1" if table else f"{name} = 1"
    for plan in (
        lambda: Plan.from_toml(toml),
        lambda: Plan().replace({key: 1}),
        lambda: Plan(**({table: {name: 1}} if table else {name: 1})),
    ):
        with pytest.raises(PlanError) as error:
            plan()
        assert f"unknown key '{key}' in the plan: " in str(error.value) and says in str(error.value)


def test_every_suggestion_exists() -> None:
    assert sum(len(names.split()) for names in KEYS.values()) == len(BY_NAME)
    for key in KEYS:
        table, _, option = key.rpartition(".")
        if key not in plan_keys():
            family = FAMILIES[table]
            assert any(option in option_hints(find(family, name)) for name in members(family)), key


def test_options_are_named_by_their_keys() -> None:
    with pytest.raises(PlanError) as error:
        build_job(Plan(privacy="central"))
    assert "central: privacy.clip, privacy.sigma, privacy.delta are missing: give them a value" in str(error.value)
    assert str(error.value).endswith("e.g. --set privacy.clip=VALUE")
    with pytest.raises(PlanError, match=r"krum: aggregator\.rule\.f is missing"):
        build_job(Plan(aggregator={"name": "bucketing", "rule": "krum"}))
    with pytest.raises(PlanError, match=r"quantise: uplink\[1\]\.bits must be in \[1, 16\], got 99"):
        build_job(Plan(uplink=["identity", {"name": "quantise", "bits": 99}]))
    with pytest.raises(PlanError, match=r"dirichlet: partition\.parts\[0\]\.alpha must be above 0"):
        build_job(Plan(partition=Part("dirichlet", alpha=-1.0) | Part("rotation")))
    with pytest.raises(PlanError, match=r"algorithm fedavg has no option 'mu': there are none$"):
        build_job(Plan(algorithm={"name": "fedavg", "mu": 0.1}))
    with pytest.raises(PlanError, match=r"fedavg has no option 'learning_rate': did you mean 'local\.lr'\?$"):
        build_job(Plan(algorithm={"name": "fedavg", "learning_rate": 0.1}))
    with pytest.raises(PlanError, match="has no option 'exposure': Known: delta, epsilon, noise, test_noise"):
        build_job(Plan(privacy={"name": "proportional", "exposure": 1, "noise": 1.0, "epsilon": 1.0, "delta": 1e-5}))
    with pytest.raises(PlanError, match=r"iid has no option 'dataset'.*Known: num_clients, samples_per_client, seed"):
        build_job(Plan(partition={"name": "iid", "dataset": 1}))
