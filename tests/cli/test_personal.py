"""Personal methods beside training alone: real runs of digits, and every number of the table computed again."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import problem_data
import pytest
import torch
from helpers import Normed

import atoll
from atoll.commit.coordinator import build_coordinator
from atoll.commit.run_state import read_fields
from atoll.core.errors import PlanError
from atoll.core.events import TasksSent
from atoll.core.plan import Plan
from atoll.held_out import measurable
from atoll.personal.budget import cohorts, loads_of, rehearse_step
from atoll.personal.compare import compare_personal, personal_members
from atoll.personal.measure import FILE
from atoll.report.personal import PersonalTable, problems_text, table_text
from atoll.train.build import build_job

PLAN = Plan(
    rounds=2,
    partition={"name": "dirichlet", "num_clients": 6, "alpha": 0.5, "min_samples": 20},
    model={"name": "mlp_2nn", "hidden": 8},
    local={"lr": 0.3, "steps": 10},
    evaluation={"holdout": 0.3, "validation": 0.1},
    engine="inline",
)
METHODS = ["fedper", "ditto:lam=0.5", "fine_tuning:steps=9", "fine_tuning", "fedbn", "interpolation:grid=3"]
REFUSED = ("fine_tuning", "fedbn")
"""Methods that PLAN does not allow: 20 steps of tuning are all that there are, and the model has no norms."""


def without_seconds(table: PersonalTable) -> PersonalTable:
    return replace(table, runs=tuple(replace(run, seconds=0.0) for run in table.runs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("personal") / "table"


@pytest.fixture(scope="module")
def table(folder: Path) -> PersonalTable:
    return atoll.compare_personal(PLAN, out=folder, methods=METHODS, seeds=2, workers=2)


def test_the_plan_must_hold_out_samples_and_train(tmp_path: Path) -> None:
    for settings, message in (
        ({"evaluation.holdout": 0.0}, "set evaluation.holdout, e.g. to 0.2"),
        ({"rounds": 0}, "set rounds"),
        ({"work": "consensus"}, "leave work out"),
    ):
        with pytest.raises(PlanError, match=message):
            compare_personal(PLAN.replace(settings), out=tmp_path / "no")
    with pytest.raises(PlanError, match="did you mean 'ditto'"):
        compare_personal(PLAN, out=tmp_path / "no", methods=["dito"])
    with pytest.raises(PlanError, match="name one twice"):
        compare_personal(PLAN, out=tmp_path / "no", methods=["ditto", "ditto"])
    with pytest.raises(PlanError, match="each once"):
        compare_personal(PLAN, out=tmp_path / "no", seeds=[1, 1])
    with pytest.raises(PlanError, match="seeds must be at least 1"):
        compare_personal(PLAN, out=tmp_path / "no", seeds=0)
    assert not (tmp_path / "no").exists()


def held_out_accuracies(result: atoll.Result, models: Callable[[int], Any]) -> list[float]:
    """Measure models by plain torch on the samples that their clients neither train on nor choose by."""
    federation, found = build_job(result.plan).federation, []
    for client in range(federation.num_clients):
        indices = federation.evaluation_indices(client)
        assert not set(indices) & set(federation.train_indices(client))
        x = torch.from_numpy(federation.dataset.train_x[indices]).float() * federation.dataset.scale
        answers = models(client)(x).argmax(1).numpy()
        found.append(float((answers == federation.dataset.train_y[indices]).mean()))
    return found


def test_every_number_is_that_of_the_final_models(table: PersonalTable) -> None:
    own: dict[tuple[str, int], list[float]] = {}
    for run in table.runs:
        if run.method in REFUSED:
            continue
        name, _, option = run.method.partition(":")
        key, _, value = option.partition("=")
        rounds = 1 if name == "fine_tuning" else 2
        settings: dict[str, object] = {"algorithm": name, "seed": run.seed, "rounds": rounds}
        settings |= {f"algorithm.{key}": json.loads(value)} if option else {}
        result = atoll.run(PLAN.replace(settings))
        shared = held_out_accuracies(result, lambda _, result=result: result.model) if result.shared else None
        mine = held_out_accuracies(result, result.models.__getitem__) if result.models else shared
        assert mine is not None
        assert run.own == pytest.approx(mine, abs=1e-12), run.method
        assert (run.shared is None) == (shared is None or name == "local")
        assert run.shared is None or run.shared == pytest.approx(shared, abs=1e-12)
        own[run.method, run.seed] = mine
    assert {method for method, _ in own} == {"local", "fedavg", *METHODS} - set(REFUSED)
    for method in {method for method, _ in own}:
        each = [own[method, seed] for seed in (0, 1)]
        row = table.row(method)
        assert row is not None
        means, worsts = [float(np.mean(values)) for values in each], [min(values) for values in each]
        assert row.mean == pytest.approx((np.mean(means), np.std(means, ddof=1)))
        gains = [mean - float(np.mean(own["local", seed])) for seed, mean in zip((0, 1), means, strict=True)]
        assert row.gain == pytest.approx((np.mean(gains), np.std(gains, ddof=1)))
        assert row.worst == pytest.approx((np.mean(worsts), np.std(worsts, ddof=1)))
        better = [
            np.mean([a > b for a, b in zip(own[method, seed], own["local", seed], strict=True)]) for seed in (0, 1)
        ]
        assert row.better == pytest.approx((np.mean(better), np.std(better, ddof=1)))
    assert table.row("local").better == (0.0, 0.0)  # type: ignore[union-attr]


def test_costs_are_counted_and_nobody_works_more_than_alone(table: PersonalTable, folder: Path) -> None:
    rows = {method: table.row(method) for method in table.ranked()}
    whole, head = 8 * 64 + 8 + 8 * 8 + 8 + 10 * 8 + 10, 10 * 8 + 10
    expected = {  # values that travel and are kept, rounds, steps, gradients a step
        "local": (0, whole, 2, 20, 1),
        "fedavg": (whole, 0, 2, 20, 1),
        "fedper": (whole - head, head, 2, 20, 1),
        "ditto:lam=0.5": (whole, whole, 2, 20, 2),
        "interpolation:grid=3": (whole, whole, 2, 20, 2),
        "fine_tuning:steps=9": (whole, 0, 1, 19, 1),
    }
    assert set(rows) == set(expected)
    for method, numbers in expected.items():
        row = rows[method]
        assert row is not None
        assert [n.mean for n in (row.travels, row.kept, row.rounds, row.steps, row.gradients)] == list(numbers)
        assert row.seconds.mean > 0
        [first, *_] = table.done(method)
        lines = (folder / first.directory / "metrics.jsonl").read_text().splitlines()
        assert first.exact and first.bytes_up * 6 * len(lines) == (
            0 if method == "local" else json.loads(lines[-1])["bytes_up"]
        )


def test_what_is_refused_is_listed_with_its_reason(table: PersonalTable, folder: Path) -> None:
    texts = [problems_text(table), (folder / "personal.html").read_text(), (folder / "personal.json").read_text()]
    for text in texts:
        assert "matches nothing of the model" in text and "20 steps of adaptation leave no round of training" in text
    assert [run.status for run in table.runs if run.method in REFUSED] == ["refused"] * 4
    assert texts[0].count("\n") == 1  # one line for both seeds
    assert table.ranked()[:2] == ["local", "fedavg"]


def test_files_hold_the_table(table: PersonalTable, folder: Path) -> None:
    written = json.loads((folder / "personal.json").read_text())
    assert written["methods"]["ditto:lam=0.5"]["mean"]["mean"] == table.row("ditto:lam=0.5").mean.mean  # type: ignore[union-attr]
    assert written["clients"]["0"]["measured"] == list(range(6)) and written["metric"] == "accuracy"
    page = (folder / "personal.html").read_text()
    assert page.count("<img ") == 1 and "http-equiv" in page and "{{" not in page and 'src="http' not in page
    text = table_text(table)
    assert text.splitlines()[0].split("  ")[0] == "method" and " % " in text.splitlines()[1]
    assert "no guarantee" not in text


def test_a_second_call_measures_what_is_missing_and_runs_nothing_again(table: PersonalTable, folder: Path) -> None:
    models = {path: path.read_bytes() for path in folder.glob("cells/*/metrics.jsonl")}
    lost = next(folder.glob("cells/ditto*_s1_*")) / FILE
    before = lost.read_bytes()
    lost.unlink()
    again = compare_personal(PLAN, out=folder, methods=METHODS, seeds=[0, 1], workers=1)
    assert without_seconds(again) == without_seconds(table)
    assert json.loads(lost.read_bytes())["own"] == json.loads(before)["own"]
    assert models == {path: path.read_bytes() for path in folder.glob("cells/*/metrics.jsonl")}


def test_a_stopped_table_goes_on_to_the_same_end(tmp_path: Path) -> None:
    plan = PLAN.replace({"rounds": 30, "policy": {"size": 4}, "local.steps": 2})
    asked: dict[str, Any] = {"methods": ["ditto"], "seeds": 1}
    over = threading.Event()

    def stop_when_begun() -> None:
        while not any(path.stat().st_size for path in tmp_path.glob("stopped/cells/*/metrics.jsonl")):
            if over.wait(0.005):
                return
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=stop_when_begun)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            compare_personal(plan, out=tmp_path / "stopped", workers=2, **asked)
    finally:
        signal.signal(signal.SIGINT, before)
        over.set()
        watcher.join()
    assert not (tmp_path / "stopped/personal.json").exists()
    logs = [path.read_text() for path in tmp_path.glob("stopped/cells/*/log.txt")]
    assert any("interrupted" in log for log in logs)
    resumed = compare_personal(plan, out=tmp_path / "stopped", **asked)
    assert without_seconds(resumed) == without_seconds(compare_personal(plan, out=tmp_path / "whole", **asked))


GRADIENTS = {
    "fedavg": 1, "local": 1, "fedper": 1, "fedrep": 1, "ifca": 1, "mean_regularised": 1, "ditto": 2, "apfl": 2,
    "interpolation": 2, "pfedme": 6, "pfedme:steps=2": 3, "per_fedavg": 3, "per_fedavg:way=hessian_free": 5,
}  # fmt: skip


@pytest.mark.parametrize("method", GRADIENTS)
def test_gradients_of_a_step_are_counted_in_the_loop(method: str) -> None:
    name, *options = method.split(":")
    pairs = dict(option.split("=") for option in options)
    settings = {f"algorithm.{key}": int(value) if value.isdigit() else value for key, value in pairs.items()}
    step = rehearse_step(build_job(PLAN.replace({"algorithm": name, **settings})))
    assert step.gradients == GRADIENTS[method]


def test_personal_members_are_found_by_what_they_do() -> None:
    assert {name.partition(":")[0] for name in personal_members()} == {
        "apfl", "ditto", "fedbn", "fedmd", "fedper", "fedrep", "fine_tuning", "ifca", "interpolation", "lg_fedavg",
        "local", "mean_regularised", "per_fedavg", "pfedme",
    }  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": {"size": 2}},
        {"policy": {"size": 3}, "sampler": "round_robin", "local": {"epochs": 2, "batch_size": 16}},
        {"policy": {"name": "buffered", "size": 2, "concurrency": 4}},
        {"sampler": {"name": "poisson"}, "policy": {"size": 3}},
    ],
)
def test_cohorts_are_known_before_a_run(settings: dict[str, Any], tmp_path: Path) -> None:
    plan, asked = PLAN.replace({"rounds": 5, **settings}), list[int]()

    def listen(event: object) -> None:
        asked.extend(event.clients if isinstance(event, TasksSent) else ())

    atoll.run(plan, out=tmp_path / "run", watch=[listen], report=False)
    job = build_job(plan)
    loads = loads_of(job, cohorts(build_coordinator(plan, job.federation)))
    assert sum(load.samples for load in loads) == read_fields(tmp_path / "run/checkpoint.safetensors")["samples"]
    if settings["policy"].get("name") != "buffered":  # the last that are asked there are not waited for
        assert sorted(load.client for load in loads) == sorted(asked)
        assert all(load.steps == job.num_steps(load.client) for load in loads)


def test_batches_of_other_work_are_steps_of_the_same_budget(tmp_path: Path) -> None:
    """FedMD learns from public samples too, which would be more work than training alone."""
    plan = PLAN.replace({"public": {"name": "held_out", "fraction": 0.1}, "rounds": 4})
    table = compare_personal(plan, out=tmp_path, methods=["fedmd:samples=50"], seeds=1, workers=2)
    row, alone = table.row("fedmd:samples=50"), table.row("local")
    assert row is not None and alone is not None
    assert row.rounds.mean == 3 and alone.rounds.mean == 4
    assert 30 < row.steps.mean <= alone.steps.mean == 40
    assert all(run.exact for run in table.runs)


def test_clients_that_never_took_part_are_left_out_and_counted(tmp_path: Path) -> None:
    plan = PLAN.replace({"policy": {"size": 2}, "rounds": 3, "model": "logistic"})
    table = compare_personal(plan, out=tmp_path, methods=["ditto", "fine_tuning:steps=3"], seeds=[3])
    rounds = cohorts(build_coordinator(plan.replace({"seed": 3}), build_job(plan).federation))
    took_part = {task.client for tasks in rounds for task in tasks}
    clients = table.clients[3]
    assert set(clients.measured) == took_part and 2 <= len(took_part) < 6
    assert clients.others == {"never took part": 6 - len(took_part)}
    assert f"others: never took part {6 - len(took_part)}." in table_text(table)
    rows = {method: table.row(method) for method in table.ranked()}
    steps = {method: row.steps.mean for method, row in rows.items() if row is not None}
    assert steps["local"] == steps["ditto"] == 3 * 2 * 10 / len(took_part)
    assert steps["fine_tuning:steps=3"] <= steps["local"]


def test_only_honest_clients_that_hold_out_samples_are_measured() -> None:
    plan = PLAN.replace({"evaluation.holdout": 0.01, "evaluation.max_clients": 2, "attack": "zero", "attackers.num": 1})
    job = build_job(plan)
    able = [
        client for client in range(6) if client not in job.attackers and job.federation.partition.size(client) >= 100
    ]
    found = measurable(job, 2)
    assert 2 < len(able) < 5 and len(found.clients) == 2 and set(found.clients) < set(able)
    assert found.others == {
        "attackers": 1, "without a held-out sample": 5 - len(able), "beyond evaluation.max_clients": len(able) - 2,
    }  # fmt: skip


PARTIAL = PLAN.replace({"policy": {"size": 3}, "rounds": 4})
"""Some clients begin after the shared model has moved."""


def alone(table: PersonalTable) -> dict[int, float | None]:
    return dict(zip(table.clients[0].measured, table.done("local")[0].own, strict=True))


@pytest.fixture(scope="module")
def plainly_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float | None]:
    return alone(compare_personal(PARTIAL, out=tmp_path_factory.mktemp("alone"), methods=[], seeds=1, workers=2))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"privacy": {"name": "local", "clip": 0.5, "sigma": 1.0, "delta": 1e-5}}, "privacy"),
        ({"secagg": {}}, "secure aggregation"),
        ({"attack": {"name": "gaussian", "sigma": 9.0}, "attackers.clients": [0]}, ""),
    ],
)
def test_alone_is_alone_whatever_happens_to_what_is_shared(
    plainly_alone: dict[int, float | None], settings: dict[str, Any], word: str, tmp_path: Path
) -> None:
    shown = compare_personal(PARTIAL.replace(settings), out=tmp_path, methods=[], seeds=1, workers=2)
    assert len(alone(shown)) > 3 and alone(shown).items() <= plainly_alone.items()
    assert shown.protection == word
    assert (f"The plan has {word}" in table_text(shown)) == bool(word)
    assert shown.clients[0].others.get("attackers", 0) == ("attack" in settings)


def test_alone_keeps_its_batch_norm_statistics(tmp_path: Path) -> None:
    plan = PLAN.replace({"model": "helpers:normed", "partition.num_clients": 3})
    table = compare_personal(plan, out=tmp_path, methods=["fedbn"], seeds=1, workers=2)
    result = atoll.resume(tmp_path / table.done("local")[0].directory)
    models = [result.models[client] for client in range(3)]
    assert all(isinstance(model, Normed) for model in models)
    means = [model.get_buffer("norm.running_mean") for model in models]
    assert not torch.equal(means[0], means[1]) and not torch.equal(means[0], torch.zeros(4))
    assert table.row("fedbn") is not None


def test_smaller_is_better_for_a_regression(tmp_path: Path) -> None:
    plan = Plan(
        rounds=3,
        data=problem_data.diabetes,
        partition={"name": "iid", "num_clients": 5},
        local={"lr": 0.05, "steps": 5},
        evaluation={"holdout": 0.3},
        engine="inline",
    )
    table = compare_personal(plan, out=tmp_path, methods=["mean_regularised"], seeds=1)
    assert table.metric == "rmse" and not table.larger_is_better
    alone, shared = table.done("local")[0].own, table.done("fedavg")[0].own
    row = table.row("fedavg")
    assert row is not None
    assert row.better.mean == np.mean([b < a for a, b in zip(alone, shared, strict=True)])  # type: ignore[operator]
    assert row.worst.mean == max(shared)  # type: ignore[type-var]
    assert row.gain.mean == pytest.approx(np.mean(alone) - np.mean(shared))  # type: ignore[arg-type]
    assert "a smaller root mean squared error is better" in table_text(table)


def test_a_method_that_diverges_has_no_numbers(tmp_path: Path) -> None:
    table = compare_personal(PLAN, out=tmp_path, methods=["pfedme:lr=1e30"], seeds=1, workers=2)
    assert table.row("pfedme:lr=1e30") is None
    [problem] = table.problems
    assert problem.status == "failed" and "hold NaN or Inf" in problem.why
    assert table.ranked() == ["local", "fedavg"]


def test_the_command_prints_the_table(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN.to_toml())
    said = cli(
        "personal", "plan.toml", "--methods", "fedper,fedbn", "--seeds", "1", "--out", "p", "--workers", "2", "-q"
    )
    assert said.code == 0, said.err
    assert [line.split()[0] for line in said.out.splitlines()[:4]] == ["method", "local", "fedavg", "fedper"]
    assert "refused: fedbn: fedbn lets clients keep" in said.out and "page p/personal.html" in said.out
    assert (tmp_path / "p/personal.json").exists()
    refused = cli("personal", "plan.toml", "--set", "evaluation.holdout=0", "--out", "q")
    assert refused.code == 2 and "evaluation.holdout" in refused.err
    assert cli("personal", "plan.toml", "--seeds", "x").code == 2


def test_cohorts_that_privacy_hides_are_told_from_expected_ones(tmp_path: Path) -> None:
    privacy = {"name": "central", "clip": 0.5, "sigma": 1.0, "delta": 1e-5, "test_noise": True}
    plan = PLAN.replace({"sampler": "poisson", "policy": {"size": 3}, "privacy": privacy, "rounds": 4})
    table = compare_personal(plan, out=tmp_path, methods=["ditto"], seeds=1, workers=2)
    [ditto], [alone] = table.done("ditto"), table.done("local")
    assert alone.exact and not ditto.exact  # drawn from the run's secret
    cells = next(line for line in table_text(table).splitlines() if line.startswith("ditto"))
    assert "≈" in cells and "cohorts differ" in table_text(table)
    assert len(ditto.own) == len(alone.own) == len(table.clients[0].measured)
    assert (ditto.steps > alone.steps) == ("do not compare it" in table_text(table))
