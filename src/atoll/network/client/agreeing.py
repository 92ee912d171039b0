"""Whether a client takes part in a run: its plan against the floors, and all that is built of it once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from atoll.commit.coordinator import build_coordinator
from atoll.commit.privacy_plan import last_round
from atoll.core.algorithm import Algorithm
from atoll.core.client_work import ClientWork
from atoll.core.coordinator import Coordinator
from atoll.core.errors import PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.privacy import Mechanism
from atoll.data.dataset import Dataset
from atoll.data.index import drawn
from atoll.network.client.app import ClientApp
from atoll.network.client.budget import cost_of
from atoll.network.client.home import RunHome
from atoll.network.client.party import party_dataset, rows_commitment
from atoll.network.client.task import AgreedRun, WorkRefused
from atoll.network.protocol.agreement import Floors, read_plan, refusal_reason
from atoll.network.protocol.bases import names_for_paths
from atoll.network.protocol.messages import RunInfo
from atoll.privacy.accounting import spent
from atoll.split.rehearsal import rehearse_cut
from atoll.train.build import build_job
from atoll.train.devices import PLAIN, WITHOUT_DOUBLE, Place
from atoll.train.federation import Federation, with_problem
from atoll.train.job import Job
from atoll.train.vertical import vertical_model


def agree(
    app: ClientApp,
    floors: Floors,
    info: RunInfo,
    number: int,
    home: RunHome,
    secret: bytes,
    *,
    name: str,
    keys_known: bool = False,
) -> AgreedRun:
    """Check a run against the floors, and build it for client `number`, called `name`; WorkRefused if it is weaker.

    What is compared follows from the plan wherever possible, since a malicious server could state anything.
    """
    parts = app.own_parts
    plan = read_plan(info.plan, parts)
    holds_columns = plan.split is not None and bool(plan.split.parties)
    dataset = with_problem(plan, party_dataset(app, plan, info, number, name) if holds_columns else _own_samples(app))
    with names_for_paths(parts.bases):
        info = msgspec.structs.replace(info, num_bytes=max(info.num_bytes, _model_bytes(plan, dataset)))
    if info.num_bytes > floors.max_model_bytes:  # before it is built
        raise WorkRefused(refusal_reason(floors, info, plan, None, 0, number=number) or "the model is too large")
    indices = np.arange(dataset.num_train)
    partition = drawn(max(info.num_clients, number + 1), dataset.num_train, lambda client: indices)
    ask = plan.evaluation
    federation = Federation(dataset, partition, seed=plan.seed, holdout=ask.holdout, validation=ask.validation or 0.0)
    with names_for_paths(parts.bases):
        job = build_job(plan, federation, secret=secret, loss=parts.loss(plan.loss))
    coordinator = build_coordinator(plan, federation)
    min_cohort = _min_cohort(coordinator, job.mechanism)
    info = msgspec.structs.replace(info, cohort=min(info.cohort, min_cohort))
    info = _within_floors(floors, info, plan, job, number, home, keys_known=keys_known)
    parties = None if plan.split is None else rehearse_cut(plan, job)
    home.save_info(info)
    return AgreedRun(
        plan=plan,
        job=job,
        floors=floors,
        number=number,
        home=home,
        min_cohort=min_cohort,
        place=_place(app, job),
        keys_known=keys_known,
        parties=parties,
        rows=rows_commitment(app, plan) if holds_columns else b"",
    )


def _within_floors(
    floors: Floors, info: RunInfo, plan: Plan, job: Job, number: int, home: RunHome, *, keys_known: bool
) -> RunInfo:
    """Refuse work that is weaker than the floors, or that costs more epsilon than this client has left.

    Returns what is known of the run, with the epsilon that follows from the plan if it is above the stated one.
    """
    if floors.max_change is not None and job.spec.num_held:
        raise WorkRefused(
            f"algorithm '{plan.algorithm.name}' sends values beside the parameters that floors.max_change does not "
            "measure: use fedit or ffa_lora, or leave the floor out"
        )
    if floors.max_epsilon is not None and job.mechanism is not None and info.epsilon is not None:
        own = _epsilon(job, max(1, plan.rounds))
        budget = job.mechanism.epsilon
        info = msgspec.structs.replace(info, epsilon=max(info.epsilon, own if budget is None else min(own, budget)))
    num_steps = max(job.num_steps(number), 0 if job.algorithm.adapt is None else job.algorithm.adapt.steps)
    reason = refusal_reason(floors, info, plan, job.mechanism, num_steps, number=number, keys_known=keys_known)
    if reason is not None:
        raise WorkRefused(reason)
    if job.mechanism is not None and job.exposure is not None and floors.max_epsilon is not None:
        rounds = last_round(job.mechanism, job.exposure, max(1, plan.rounds))
        home.budget.check_affordable(cost_of(job, rounds), floors.max_epsilon)
    return info


def _own_samples(app: ClientApp) -> Dataset:
    """Return the app's samples for a plan whose clients have labels; WorkRefused if it has none."""
    if app.train_y is None:
        raise WorkRefused("this plan trains on labelled samples, and the app has no labels: give it train_y")
    return app.dataset()


def _place(app: ClientApp, job: Job) -> Place:
    """Return where this client trains a job; WorkRefused if its device cannot."""
    place = app.place()
    if job.work.first is not None or place.on_cpu:
        return PLAIN  # functions on arrays use a device themselves, or not
    if place.torch_device.type in WITHOUT_DOUBLE and (job.private is not None or job.spec.dtype == torch.float64):
        raise WorkRefused(
            f"this plan needs float64, which {place.device} has not: join with --device cpu, or leave the app's device "
            "out"
        )
    return place


def _min_cohort(coordinator: Coordinator, mechanism: Mechanism | None) -> int:
    """Return the minimum number of clients behind a version."""
    policy = coordinator.policy
    if mechanism is None or mechanism.min_reports is None:
        return max(1, policy.min_reports)
    return max(1, mechanism.min_reports(policy.goal(coordinator.num_clients)))


def _epsilon(job: Job, attempts: int) -> float:
    """Return the epsilon that attempts cost this client."""
    assert job.mechanism is not None and job.exposure is not None
    return spent(job.mechanism, job.exposure._replace(attempts=attempts)).epsilon


class _WithoutValues(TorchFunctionMode):
    """Skips the initialisation of parameters without values, for which torch would import its compiler."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _model_bytes(plan: Plan, dataset: Dataset) -> int:
    """Return the bytes of the models that travel without allocating them, as options could fill the memory.

    They include what the algorithm adds. A model of the client's own is not counted, nor is the base of a language
    model, of which no weights are read.
    """
    if plan.model.call is not None:
        return 0
    algorithm: Algorithm = plan.algorithm.build("algorithms")
    work: ClientWork = (plan.work or algorithm.work or Part("sgd")).build("train.works")
    with torch.device("meta"), _WithoutValues():
        if plan.split is not None and plan.split.parties:
            model = vertical_model(plan.split, plan.model, dataset)
        else:
            model = plan.model.build("models", input_shape=dataset.input_shape, num_classes=dataset.num_outputs)
        if not isinstance(model, nn.Module):
            raise PlanError(
                f"model '{plan.model.name}' gave {type(model).__name__}: a factory must return an nn.Module"
            )
        if algorithm.prepare is not None:
            algorithm.prepare(model)
    state = model.state_dict()
    tensors = (each for each in (*model.named_parameters(), *model.named_buffers()) if each[0] in state)
    return (work.copies or 1) * sum(tensor.nbytes for _, tensor in tensors)
