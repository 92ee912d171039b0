"""Comparison of personal methods: every method and seed is an ordinary run, and the results are one table and one page.

What is compared is the same by construction: one base plan and seed give the same partition, held-out samples, first
model, cohorts and batches, and no method gets more local steps than training alone.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atoll.core.algorithm import Algorithm
from atoll.core.client_work import ClientWork
from atoll.core.coordinator import FAILURES, Reason
from atoll.core.errors import AtollError, PlanError
from atoll.core.options import read_value
from atoll.core.parts import Part, examples, find, members
from atoll.core.plan import Plan
from atoll.engine.base import Workers, worker_count
from atoll.farm import Cell, Failures, cell_directory, run_grid, seeds_of, with_engine
from atoll.held_out import Measurable, measurable
from atoll.matrix import part_of
from atoll.personal.budget import Rounds, Step, cohorts, loads_of, rehearse_step, rounds_within
from atoll.personal.measure import FILE, Measured, measure, read_measured
from atoll.report.figures import write_whole
from atoll.report.personal import ALONE, GLOBAL, Clients, MethodRun, PersonalTable, Status
from atoll.report.personal_page import personal_page
from atoll.simulation.dry_run import dry_run
from atoll.train.federation import build_federation
from atoll.train.job import Job

UNPROTECTED: dict[str, object] = {
    **dict.fromkeys(("privacy", "secagg", "uplink", "downlink", "aggregator", "server", "detection", "contribution")),
    "local.buffers": "local",
}
"""Settings of training alone: nothing that changes what is shared may reach a client's model."""
EVALUATION: dict[str, object] = {"evaluation.every": 0, "evaluation.clients_every": 0, "stop": {}}
"""Settings of all runs: models are measured once they have ended, and all end after the same rounds."""
TESTED = 10
"""Clients whose models a run measures on the central test set, which the table does not show."""


class Seeded(NamedTuple):
    """What all runs of one seed have in common."""

    rounds: Rounds
    """The tasks of each round."""
    clients: Measurable
    budget: int
    """Steps of the measured clients that train alone, in all rounds."""
    metric: str
    larger_is_better: bool
    num_clients: int


class Prepared(NamedTuple):
    """One method with one seed, before its run."""

    method: str
    seed: int
    plan: Plan | None = None
    """The plan, or None if it was refused."""
    why: str = ""
    directory: str = ""
    step: Step | None = None
    steps: Mapping[int, int] = {}
    """Expected steps of each client's training."""
    samples: int = 0
    """Expected number of samples that clients train on."""
    num_tasks: int = 0
    adaptation: int = 0
    """Steps of adaptation after training."""


def compare_personal(
    plan: Plan,
    *,
    out: str | Path,
    methods: Sequence[str] | None = None,
    seeds: int | Sequence[int] = 3,
    workers: int | None = None,
    progress: bool = False,
) -> PersonalTable:
    """Compare personal methods with training alone and with one model for all, on what each client holds out.

    `methods` are algorithms with options, such as "ditto:lam=0.5"; all personal ones unless given. `local` and `fedavg`
    are always among them. `seeds` is their number, from the plan's on, or a list. Each run lies in `out/cells`, and
    `workers` of them run at once. Call the function again to continue after a stop. A method whose plan is refused, or
    that fails, keeps its reason, and the others continue. At the end `out` holds personal.json and personal.html. The
    plan's own algorithm, seed and stops are replaced; what it shares and keeps is used by methods that keep a part.
    """
    out, chosen_seeds = Path(out), seeds_of(plan, seeds)
    _check(plan)
    parts = {name: part_of(name, "algorithms") for name in dict.fromkeys([ALONE, GLOBAL, *_methods(methods)])}
    num_workers = worker_count(read_value(Workers | None, workers, "workers"))
    base = plan.replace({**EVALUATION, "algorithm": GLOBAL})
    unshared = base.replace({"share": None, "keep": None})
    base = base.replace({"engine": with_engine(unshared, unshared, out / "engine.json").engine.to_dict()})
    common, prepared = dict[int, Seeded](), list[Prepared]()
    for seed in chosen_seeds:
        common[seed], entries = _prepare(base.replace({"seed": seed}), parts)
        prepared += entries
    most = plan.evaluation.max_clients
    cells = [
        Cell(out / each.directory, each.plan, partial(measure, most=most), FILE)
        for each in prepared
        if each.plan is not None
    ]
    failures = run_grid(cells, num_workers, progress=progress)
    table = _table(plan, tuple(parts), common, prepared, out, failures)
    write_whole(out / "personal.json", (json.dumps(table.to_dict(), indent=1) + "\n").encode())
    write_whole(out / "personal.html", personal_page(table, base.to_toml()).encode("utf-8", "replace"))
    return table


def personal_members() -> list[str]:
    """Return the algorithms that give clients models of their own, with an example's options where they need some."""
    found = []
    for name in members("algorithms"):
        needed = any(p.default is p.empty for p in inspect.signature(find("algorithms", name)).parameters.values())
        options = examples("algorithms", name)[0] if needed else {}
        algorithm: Algorithm = Part(name, **options).build("algorithms")
        work: ClientWork = (algorithm.work or Part("sgd")).build("train.works")
        slots = (algorithm.personal, algorithm.adapt, algorithm.keep, work.own_model)
        if any(slot is not None for slot in slots):
            found.append(":".join([name, *(f"{key}={json.dumps(value)}" for key, value in options.items())]))
    return found


def _methods(methods: Sequence[str] | None) -> Sequence[str]:
    if methods is None:
        return personal_members()
    if len(set(methods)) < len(methods):
        raise PlanError(f"methods name one twice: {', '.join(methods)}; leave one out")
    return methods


def _check(plan: Plan) -> None:
    """Refuse plans whose clients could only be measured on what they train on, or that have work of their own."""
    if not plan.evaluation.holdout:
        raise PlanError(
            "clients hold out no samples (evaluation.holdout = 0), so that models would be compared on what they were "
            "trained on: set evaluation.holdout, e.g. to 0.2"
        )
    if plan.work is not None:
        raise PlanError(
            f"work {plan.work.name} takes the place of the steps that personal methods change: leave work out"
        )
    if plan.split is not None:
        raise PlanError("personal methods train whole models, and the plan's is cut: leave split out")
    if not plan.rounds:
        raise PlanError("the plan has no rounds (rounds = 0), so that nobody trains: set rounds, e.g. to 20")


def _prepare(base: Plan, parts: Mapping[str, Part]) -> tuple[Seeded, list[Prepared]]:
    """Build and rehearse all methods with one seed; what a method is refused for is noted, the baselines raise."""
    federation = build_federation(base)
    alone, coordinator = dry_run(_method_plan(base, ALONE, parts[ALONE]), federation)
    rounds, clients = cohorts(coordinator), measurable(alone, base.evaluation.max_clients)
    loads, able = loads_of(alone, rounds), frozenset(clients.clients)
    counted = able & {load.client for load in loads}
    seeded = Seeded(
        rounds=rounds,
        clients=clients,
        budget=sum(load.steps for load in loads if load.client in counted),
        metric=alone.measures.main,
        larger_is_better=alone.measures.larger_is_better,
        num_clients=federation.num_clients,
    )
    prepared = []
    for method, part in parts.items():
        entry = Prepared(method, base.seed)
        try:
            plan = _method_plan(base, method, part)
            job, _ = dry_run(plan, federation)
            entry = _entry(entry, plan, job, seeded, counted)
        except AtollError as error:
            if method in (ALONE, GLOBAL):
                raise
            entry = entry._replace(why=" ".join(str(error).split()))
        prepared.append(entry)
    return seeded, prepared


def _method_plan(base: Plan, method: str, part: Part) -> Plan:
    """Return the plan of a method; what the base shares and keeps is for methods that keep a part."""
    algorithm: Algorithm = part.build("algorithms")
    settings: dict[str, object] = {"algorithm": part.to_dict(), "name": f"{method}, seed {base.seed}"}
    if algorithm.keep is None:
        settings |= {"share": None, "keep": None}
    if method == ALONE:
        settings |= UNPROTECTED
        settings |= {} if base.attack is None else {"attack": "zero"}  # nobody moves the model that others begin with
    return base.replace(settings)


def _entry(entry: Prepared, plan: Plan, job: Job, seeded: Seeded, clients: frozenset[int]) -> Prepared:
    """Give a method as many rounds as its steps, with those of adaptation, are no more than training alone takes."""
    adaptation = 0 if job.algorithm.adapt is None else job.algorithm.adapt.steps
    loads = loads_of(job, seeded.rounds)
    num = rounds_within(loads, adaptation, clients, seeded.budget)
    if not num:
        mean = seeded.budget / max(1, len(clients))
        raise PlanError(
            f"{adaptation} steps of adaptation leave no round of training within the {mean:.4g} local steps that a "
            "client takes in all: take fewer, or raise rounds"
        )
    plan, loads = plan.replace({"rounds": num}), [load for load in loads if load.round < num]
    steps = Counter[int]()
    for load in loads:
        steps[load.client] += load.steps
    most = min(TESTED, plan.evaluation.max_clients)
    return entry._replace(
        plan=plan.replace({"evaluation.max_clients": most}),
        directory=cell_directory(f"{entry.method}_s{entry.seed}", plan),
        step=rehearse_step(job),
        steps=steps,
        samples=sum(load.samples for load in loads),
        num_tasks=len(loads),
        adaptation=adaptation,
    )


def _table(
    plan: Plan,
    methods: tuple[str, ...],
    common: Mapping[int, Seeded],
    prepared: Sequence[Prepared],
    out: Path,
    failures: Failures,
) -> PersonalTable:
    """Gather what was measured, of the clients that all methods of a seed have."""
    runs, clients = list[MethodRun](), dict[int, Clients]()
    for seed, seeded in common.items():
        entries = [each for each in prepared if each.seed == seed]
        done = {each.method: m for each in entries if (m := _measured(each, out, failures)) is not None}
        kept = _compared(done)
        if kept:
            clients[seed] = _clients(seeded, done, kept)
        for each in entries:
            measured = done.get(each.method)
            runs.append(_failed(each, out, failures) if measured is None else _run(each, measured, kept))
    first = next(iter(common.values()))
    protection = [word for word, part in (("privacy", plan.privacy), ("secure aggregation", plan.secagg)) if part]
    return PersonalTable(
        title=plan.name or f"{plan.data.name}, {plan.model.name}",
        metric=first.metric,
        larger_is_better=first.larger_is_better,
        rounds=plan.rounds,
        seeds=tuple(common),
        methods=methods,
        clients=clients,
        runs=tuple(runs),
        protection=" and ".join(protection),
    )


def _measured(entry: Prepared, out: Path, failures: Failures) -> Measured | None:
    """Return what was measured of a run, or None if it was refused, failed or diverged."""
    if entry.plan is None or out / entry.directory in failures:
        return None
    measured = read_measured(out / entry.directory)
    return None if measured.reason in FAILURES else measured


def _compared(done: Mapping[str, Measured]) -> list[int]:
    """Return the clients that took part in all runs and have a figure alone."""
    if ALONE not in done:
        return []
    alone = done[ALONE]
    clients = {client for client, own in zip(alone.clients, alone.own, strict=True) if own is not None}
    for measured in done.values():
        clients &= set(measured.clients)
    return sorted(clients)


def _clients(seeded: Seeded, done: Mapping[str, Measured], kept: Sequence[int]) -> Clients:
    """Return who is measured with a seed, and why others are not."""
    alone = done[ALONE]
    undefined = sum(own is None for own in alone.own)
    others = {
        **seeded.clients.others,
        "never took part": len(seeded.clients.clients) - len(alone.clients),
        "without a figure": undefined,
        "not in every run": len(alone.clients) - undefined - len(kept),
    }
    return Clients(tuple(kept), seeded.num_clients, {reason: num for reason, num in others.items() if num})


def _failed(entry: Prepared, out: Path, failures: Failures) -> MethodRun:
    """Return a run without numbers, with the reason."""
    refused, why = (True, entry.why) if entry.plan is None else failures.get(out / entry.directory, (False, ""))
    if not why:
        reason = Reason(read_measured(out / entry.directory).reason)
        why = f"{reason}; {FAILURES[reason]}"
    status: Status = "refused" if refused else "failed"
    return MethodRun(method=entry.method, seed=entry.seed, status=status, why=why, directory=entry.directory)


def _run(entry: Prepared, measured: Measured, kept: Sequence[int]) -> MethodRun:
    """Return the numbers of a run; where other clients were asked than expected, steps and tasks are scaled."""
    assert entry.step is not None
    places = {client: place for place, client in enumerate(measured.clients)}
    scale = measured.samples / max(1, entry.samples)
    steps = sum(entry.steps.get(client, 0) for client in kept) / max(1, len(kept))
    alone = entry.method == ALONE  # a run of it sends zeros, which nobody needs
    shared = None if alone else measured.shared
    return MethodRun(
        method=entry.method,
        seed=entry.seed,
        own=tuple(measured.own[places[client]] for client in kept),
        shared=None if shared is None else tuple(shared[places[client]] for client in kept),
        rounds=measured.rounds,
        steps=scale * steps + entry.adaptation,
        exact=measured.samples == entry.samples,
        gradients=entry.step.gradients,
        travels=0 if alone else entry.step.travels,
        kept=entry.step.kept,
        bytes_up=0.0 if alone else measured.bytes_up / max(1.0, scale * entry.num_tasks),
        seconds=measured.seconds,
        directory=entry.directory,
    )
