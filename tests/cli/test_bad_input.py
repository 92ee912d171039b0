"""Rubbish in: one clear line out, an exit code that is not 0, and nothing left lying about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import Plan, run

Cli = Callable[..., Any]

PLAN, DATA, TRAINING, RUN = 2, 3, 4, 5

WRONG = [
    # the plan itself
    (["nowhere.toml"], PLAN, "there is no plan nowhere.toml: name a TOML file, or a function"),
    (["."], PLAN, "there is no plan .: name a TOML file"),
    (["typo.toml"], PLAN, "unknown key 'algoritm' in the plan: did you mean 'algorithm'?"),
    (["broken.toml"], PLAN, "the plan is not valid TOML"),
    (["binary.toml"], PLAN, "binary.toml is not a text file: a plan is written in TOML"),
    (["no_such_module:plan"], PLAN, "cannot import 'no_such_module'"),
    (["broken_module:plan"], PLAN, "cannot import 'broken_module' for 'broken_module:plan': ZeroDivisionError"),
    (["cli.rubbish:no_such_plan"], PLAN, "'cli.rubbish' has no 'no_such_plan': did you mean 'no_plan'?"),
    (["cli.rubbish:raising_plan"], PLAN, "cli.rubbish:raising_plan raised KeyError: 'learning_rate'"),
    (["cli.rubbish:plan_with_arguments"], PLAN, "must return an atoll.Plan and need no arguments"),
    (["cli.rubbish:no_plan"], PLAN, "returned dict: it must return an atoll.Plan"),
    (["cli.rubbish:wrong_plan"], PLAN, "local.lr must be above 0, got -1"),
    # settings
    (["--set", "rounds"], PLAN, "--set must be KEY=VALUE, e.g. --set local.lr=0.05, got 'rounds'"),
    (["--set", "=3"], PLAN, "--set must be KEY=VALUE"),
    (["--set", "secagg=rot13"], PLAN, "'secagg' is a table: write [secagg] and its keys, got 'rot13'"),
    (["--set", "secagg.scheme=rot13"], PLAN, "there is no 'rot13' in secagg.schemes: Known: additive, ckks, pairwise"),
    (
        ["--set", "secagg.groups=4"],
        PLAN,
        "leaves 2 of 10 clients in a group, and no sum of fewer than 3 is opened: lower secagg.groups",
    ),
    (["--set", "local.lr=fast"], PLAN, "local.lr must be a number above 0, got the text 'fast'"),
    (["--set", "local.lr=nan"], PLAN, "local.lr must be a finite number above 0, got nan"),
    (["--set", "algorithm=fedpox"], PLAN, "there is no 'fedpox' in algorithms: did you mean 'fedprox'?"),
    (["--set", "algorithm.mu=0.1"], PLAN, "algorithm fedavg has no option 'mu': there are none"),
    (["--set", "partition.num_clients=0"], PLAN, "iid: partition.num_clients must be in [1, 1000000000], got 0"),
    (["--set", "policy.size=11"], PLAN, "policy.size is 11 but the federation has 10 clients: set policy.size"),
    (["--set", "policy.fraction=1.5"], PLAN, "policy.fraction must be in [0, 1], got 1.5; 0 means one client"),
    (["--rounds", "-1"], PLAN, "rounds must be 0 or more, got -1"),
    (["--seed", "-1"], PLAN, "seed must be 0 or more, got -1"),
    (["--engine", "warp"], PLAN, "there is no 'warp' in engine: Known: auto, inline, processes, ray, vectorised"),
    (["--engine", "processes", "--workers", "0"], PLAN, "processes: engine.workers must be in [1, 1024], got 0"),
    (
        ["--engine", "inline", "--workers", "2"],
        PLAN,
        "engine inline has no option 'workers': Known: device, precision, tf32",
    ),
    # options that are not finite, of another kind, or do not fit the data
    (["--set", "devices={name='fleet', spread=nan}"], PLAN, "fleet: devices.spread must be a finite number in [0, 20]"),
    (
        ["--set", "attack={name='backdoor', target=99}", "--set", "attackers.num=1"],
        PLAN,
        "backdoor: attack.target is 99, but classes are 0 to 9",
    ),
    (
        ["--set", "attack={name='sign_flip', scale=inf}", "--set", "attackers.num=1"],
        PLAN,
        "sign_flip: attack.scale must be a finite number, got inf",
    ),
    (["--set", "algorithm={name='fedprox', mu=nan}"], PLAN, "fedprox: algorithm.mu must be a finite number of 0 or"),
    (["--set", "local.optimizer={name='sgd', weight_decay=nan}"], PLAN, "weight_decay must be a finite number of 0"),
    (["--set", "local.lr=inf"], PLAN, "local.lr must be a finite number above 0, got inf"),
    (["--set", "uplink=[{name='quantise', bits='8'}]"], PLAN, "bits must be a whole number in [1, 16], got the text"),
    # data
    (["--set", "data=cli.rubbish:nan_in_data"], DATA, "train_x: 1 NaN and 0 Inf values, the first in row 13; drop"),
    (["--set", "data=cli.rubbish:labels_out_of_range"], DATA, "labels must be in 0..1: got 2 at index 2 (6 such)"),
    (["--set", "data=cli.rubbish:float_labels"], DATA, "labels are whole numbers, got float64; use .astype"),
    (["--set", "data=cli.rubbish:more_labels_than_samples"], DATA, "20 samples but 21 labels"),
    (["--set", "data=cli.rubbish:no_file"], PLAN, "failed with FileNotFoundError"),
    (["--set", "partition=cli.rubbish:an_empty_client"], DATA, "client 1 has no samples, and 1 of 3 are empty: use"),
    # models and losses
    (["--set", "model=cli.rubbish:not_a_model"], PLAN, "gave int: a factory must return an nn.Module"),
    (["--set", "model=cli.rubbish:no_parameters"], PLAN, "has no parameters: there is nothing to train"),
    (["--set", "model=cli.rubbish:misfit"], PLAN, "does not fit samples of shape (1, 8, 8) with 10 classes: mat1"),
    (["--set", "model=cli.rubbish:three_outputs"], PLAN, "the model has 3 outputs for 10 classes: pass num_classes"),
    (["--set", "model.depth=3"], PLAN, "logistic has no option 'depth'"),
    (["--set", "loss=cli.rubbish:one_number"], PLAN, "must give one number a sample, shape (2,), but gave (): red"),
    (["--set", "loss=cli.rubbish:number_of_python"], PLAN, "must give one number a sample, shape (2,), but gave float"),
    (["--set", "loss=cli.rubbish:failing_loss"], PLAN, "model 'logistic' with loss 'cli.rubbish:failing_loss' does"),
    (["--set", "model=cli.rubbish:fails_in_training"], PLAN, "this model cannot be trained; check the model and the"),
    # where to write
    (["--resume", "nowhere"], RUN, "nowhere is not a run directory (no plan.toml in it): start one with --out"),
    (["--resume", "nowhere", "--out", "here"], RUN, "--resume names the directory: leave out --out"),
    (["--out", "typo.toml"], RUN, "cannot write to typo.toml: File exists"),
    (["--out", "typo.toml/run"], RUN, "cannot write to typo.toml/run: Not a directory"),
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "typo.toml").write_text("algoritm = 'fedavg'\n")
    (tmp_path / "broken.toml").write_text("rounds = = 3\n")
    (tmp_path / "binary.toml").write_bytes(bytes(range(128, 256)))
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(("argv", "code", "says"), WRONG, ids=[" ".join(argv) for argv, _, _ in WRONG])
def test_one_line_says_what_is_wrong(
    cli: Cli, tmp_path: Path, files: list[str], argv: list[str], code: int, says: str
) -> None:
    said = cli("run", "--rounds", "1", *argv) if "--rounds" not in argv else cli("run", *argv)
    assert said.code == code
    assert said.out == ""
    assert says in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    left = [path.name for path in tmp_path.iterdir() if path.name not in (*files, "__pycache__")]
    assert [name for name in left if name != "runs"] == []
    assert not list(tmp_path.glob("runs/*"))  # a plan that was refused leaves no run behind


TRAINS_BADLY = {
    "index out of range": ["--set", "data=cli.rubbish:token_out_of_range", "--set", "model=cli.rubbish:embedding"],
    "server.max_norm: lower local.lr (now 0.1)": ["--set", "model=cli.rubbish:all_nan"],
    "server.max_norm: lower local.lr (now 1e+38)": ["--set", "local.lr=1e38", "--set", "local.epochs=2"],
}


@pytest.mark.parametrize("engine", ["auto", "inline", "vectorised", "processes"])
@pytest.mark.parametrize("says", TRAINS_BADLY)
def test_training_that_cannot_go_on_ends_in_one_line(cli: Cli, engine: str, says: str) -> None:
    said = cli("run", "-q", "--rounds", "2", "--engine", engine, *TRAINS_BADLY[says])
    assert said.code == TRAINING
    assert said.out == ""
    assert says in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1


def test_a_corrected_plan_may_use_the_same_directory(cli: Cli) -> None:
    assert cli("run", "-q", "--out", "mine", "--rounds", "1", "--set", "policy.size=50").code == PLAN
    assert len(run(Plan(rounds=1, policy={"size": 5}), out="mine", report=False).history) == 1


def test_what_lies_in_a_directory_is_left_alone(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep me")
    assert cli("run", "-q", "--out", "mine", "--rounds", "1", "--set", "policy.size=50").code == PLAN
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        ({"partition.num_clients": 1437, "policy.size": 3}, 3),  # clients of one sample
        ({"local.batch_size": 100_000}, 1437),  # more than any client has
        ({"policy.fraction": 0.0}, 144),  # one client
        ({"evaluation.holdout": 0.99}, 20),  # two samples a client
    ],
    ids=["one sample", "large batch", "fraction 0", "holdout"],
)
@pytest.mark.parametrize("engine", ["inline", "vectorised", "processes"])
def test_extremes_that_make_sense_run(engine: str, settings: dict[str, Any], samples: int) -> None:
    result = run(Plan(rounds=2, engine=engine).replace(settings))
    assert result.history[1]["samples"] == samples


def test_stopped_before_the_first_round(cli: Cli, tmp_path: Path) -> None:
    said = cli("run", "--set", "model=cli.rubbish:interrupted_model", "--out", "run")
    assert (said.code, said.out) == (130, "stopped; no round was done: start again\n")
    assert "Traceback" not in said.err
    assert not (tmp_path / "run").exists()


def test_mistaken_options_point_to_help(cli: Cli) -> None:
    for argv in (["run", "--rounds", "many"], ["runn"], ["run", "--quick"], ["report"]):
        said = cli(*argv)
        assert said.code == 2
        assert "--help" in said.err
        assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["report", "nowhere"], RUN, "nowhere does not exist; a run directory holds plan.toml"),
        (["report", "typo.toml"], RUN, "typo.toml is a file: name the directory that holds it"),
        (["report", "."], RUN, ". is not a run directory: there is no plan.toml"),
        (["data", "show", "--set", "data=mnits"], PLAN, "there is no 'mnits' in data.catalog: did you mean 'mnist'?"),
        (["data", "fetch", "mnits"], PLAN, "did you mean 'mnist'?"),
        (["data", "show", "--set", "partition=natural"], PLAN, "natural needs the owner of each sample, and digits"),
    ],
    ids=["report nowhere", "report file", "report no run", "show", "fetch", "show natural"],
)
def test_other_commands_refuse_in_one_line(cli: Cli, files: list[str], argv: list[str], code: int, says: str) -> None:
    said = cli(*argv)
    assert said.code == code
    assert says in said.err
    assert said.err.count("\n") == 1
