"""Build a plan into a job: its model, its parts, and what is settled between them."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
from torch import nn

from atoll.checks.table import check
from atoll.checks.views import Parts
from atoll.core.algorithm import Algorithm
from atoll.core.attack import Knowledge
from atoll.core.client_work import ClientWork
from atoll.core.defence import defences_of
from atoll.core.downlink import Downlink
from atoll.core.errors import PlanError
from atoll.core.params import ParamSpec, flatten, flatten_kept, float_buffers, kept_names, spec_of
from atoll.core.parts import Part
from atoll.core.plan import MAX_NORM, Attackers, Local, Plan
from atoll.core.privacy import Exposure
from atoll.core.problem import Loss
from atoll.core.seeds import generator
from atoll.core.transform import chain
from atoll.privacy.groups import most_exposed
from atoll.privacy.noise import derived, fresh_secret
from atoll.train.clipping import mixer_of, private_layers
from atoll.train.dropout import use_counter_dropout
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job
from atoll.train.metrics import build_measures
from atoll.train.model import ArrayModel, build_loss, build_model, build_problem, fastest_layout, mixing_loss
from atoll.train.secure import Secure


def build_job(  # long, since a job is built by keyword
    plan: Plan, federation: Federation | None = None, *, secret: bytes | None = None, loss: Loss | None = None
) -> Job:
    """Build every part of a plan; parts refuse options that cannot be right.

    `secret` is what a run that goes on used before; without it there is a fresh one. `loss` is what the plan's loss
    means to a client that has one of its own by that name; nothing is imported for it then.
    """
    federation = federation or build_federation(plan)
    problem = build_problem(plan, federation.dataset)
    loss = loss or build_loss(plan.loss or problem.loss, problem.kind)
    measures = build_measures(problem, plan.evaluation.metrics, federation.dataset.groups)
    algorithm: Algorithm = plan.algorithm.build("algorithms")
    work: ClientWork = (plan.work or algorithm.work or Part("sgd")).build("train.works")
    if work.first is None:
        model = build_model(plan, federation, loss=loss, measures=measures)
    else:
        model = ArrayModel(work.first(federation.dataset))
    if plan.keep is plan.share is None and algorithm.keep is not None:
        keep = _kept_by_default(model, plan.algorithm.name, algorithm.keep)
    else:
        keep = kept_names(model, share=plan.share, keep=plan.keep)
    spec = spec_of(model, buffers=plan.local.buffers, keep=keep)
    local = _settle(plan.local, algorithm)
    parts = _parts(plan, federation, model, spec, algorithm, work, exposed(plan, local, federation))
    if parts.mechanism is not None and parts.mechanism.steps is not None and work.first is None and not parts.mixer:
        parts = replace(parts, mixer=mixing_loss(federation, model, loss))
    check(parts)
    mechanism = parts.mechanism
    start, num = plan.attackers.start_round, plan.attackers.num_rounds
    layers = private_layers(algorithm, federation, model, spec, loss) if mechanism and mechanism.steps else ()
    if (mechanism is not None and mechanism.test_noise) or any(each.test_noise for each in parts.defences):
        secret = test_secret(plan.seed)
    job = Job(
        seed=plan.seed,
        federation=federation,
        model=model,
        spec=spec,
        first_D=flatten(model, spec),
        first_kept_K=flatten_kept(model, spec),
        problem=problem,
        loss=loss,
        measures=measures,
        algorithm=algorithm,
        work=work,
        local=local,
        optimizer=local.optimizer.build("train.optimizers"),
        schedule=local.schedule.build("train.schedules"),
        uplink=parts.uplink,
        downlink=parts.downlink,
        aggregator=parts.aggregator,
        server_lr=algorithm.server_lr if plan.server.lr is None else plan.server.lr,
        max_norm=MAX_NORM if plan.server.max_norm is None else plan.server.max_norm,
        keeps_rows=parts.policy.overlaps_rounds,
        attack=parts.attack,
        attackers=_attackers(plan.attackers, federation, plan.seed) if plan.attack else frozenset(),
        attack_rounds=range(start, sys.maxsize if num is None else start + num),
        detector=parts.detector,
        secure=Secure(plan.secagg, parts.scheme) if plan.secagg is not None and parts.scheme is not None else None,
        contribution=parts.contribution,
        mechanism=mechanism,
        secret=secret or fresh_secret(),
        layers=layers,
        dropout_seeds=use_counter_dropout(model),
        local_buffers=[n for n, _ in float_buffers(model) if plan.local.buffers == "local" or n in keep],
        layout=fastest_layout(model, federation.dataset.input_shape),
        exposure=None if mechanism is None else parts.exposure,
    )
    _try_attack(job)
    return job if work.layout is None else _laid_out(job, plan)


def _kept_by_default(model: nn.Module, name: str, keep: tuple[str, ...]) -> frozenset[str]:
    """Return what clients of an algorithm keep where the plan does not say."""
    try:
        return kept_names(model, share=None, keep=keep)
    except PlanError as error:
        raise PlanError(
            f"{name} lets clients keep {' and '.join(map(repr, keep))} of the model, and {error}; or say in keep what "
            "else they keep"
        ) from error


def _parts(
    plan: Plan,
    federation: Federation,
    model: nn.Module,
    spec: ParamSpec,
    algorithm: Algorithm,
    work: ClientWork,
    every_round: Exposure,
) -> Parts:
    """Build the parts that rules compare."""
    return Parts(
        plan=plan,
        algorithm=algorithm,
        work=work,
        aggregator=plan.aggregator.build("aggregators", seed=plan.seed),
        policy=plan.policy.build("rounds"),
        sampler=plan.sampler.build("rounds.samplers"),
        uplink=chain(*(part.build("transforms") for part in plan.uplink)),
        downlink=Downlink(chain(*(part.build("transforms", error_feedback=False) for part in plan.downlink))),
        attack=plan.attack.build("attacks") if plan.attack else None,
        detector=plan.detection.build("detection") if plan.detection else None,
        contribution=plan.contribution.build("contribution") if plan.contribution else None,
        scheme=plan.secagg.scheme.build("secagg.schemes") if plan.secagg else None,
        mechanism=plan.privacy.build("privacy.mechanisms", exposure=every_round) if plan.privacy else None,
        every_round=every_round,
        num_clients=federation.num_clients,
        public=federation.public,
        mixer=mixer_of(model),
        kind=federation.dataset.problem,
        classes=federation.dataset.has_classes,
        spec=spec,
        tokens=federation.dataset.tokens,
        outputs=federation.dataset.num_outputs,
        defences=defences_of(plan),
    )


def exposed(plan: Plan, local: Local, federation: Federation) -> Exposure:
    """What a whole plan exposes of a sample, by the clients where that is most, if every round asks every client."""
    size_C = federation.training_sizes(federation.partition.sizes())
    batch_C = np.minimum(local.batch_size, size_C) if isinstance(local.batch_size, int) else size_C
    steps_C = np.full_like(size_C, local.steps) if local.steps else (local.epochs or 1) * -(-size_C // batch_C)
    groups = most_exposed(batch_C / size_C, steps_C)
    return Exposure(
        scheme="every round",
        rate=1.0,
        attempts=max(1, plan.rounds),
        sample_rate=groups[0].rate,
        steps=groups[0].steps,
        num_clients=federation.num_clients,
        num_samples=int(size_C.sum()),
        groups=groups,
    )


def _laid_out(job: Job, plan: Plan) -> Job:
    """Build a job for each of the plan's models, and let something else than a model travel."""
    architectures, copies = [], job.work.copies
    wanted = [(part, 0) for part in plan.models or (plan.model,)] if copies is None else []
    wanted += [(plan.model, draw) for draw in range(copies or 0)]
    for model in [build_model(plan, job.federation, part, draw=draw) for part, draw in wanted]:
        spec = spec_of(model, buffers="average" if copies is None else "local")
        architectures.append(
            replace(
                job,
                model=model,
                spec=spec,
                first_D=flatten(model, spec),
                algorithm=Algorithm(),
                dropout_seeds=use_counter_dropout(model),
                local_buffers=[] if copies is None else [name for name, _ in float_buffers(model)],
                layout=fastest_layout(model, job.federation.dataset.input_shape),
            )
        )
    job = replace(job, architectures=tuple(architectures))
    assert job.work.layout is not None
    layout = job.work.layout(job)
    return replace(job, spec=layout.spec, first_D=layout.first_D, extras=layout.extras)


def test_secret(seed: int) -> bytes:
    """Return what noise derives from that must be the same in every run of a test, and protects nobody."""
    return derived(seed.to_bytes(32, "big"), "test noise")


def _settle(local: Local, algorithm: Algorithm) -> Local:
    """Fill in what the plan leaves open, or the algorithm fixes."""
    fixed = dict(algorithm.local)
    epochs = fixed.get("epochs", local.epochs or (None if local.steps else 1))
    batch_size = fixed.get("batch_size", local.batch_size or 10)
    steps = None if "epochs" in fixed else local.steps
    return replace(local, epochs=epochs, steps=steps, batch_size=batch_size)  # type: ignore[arg-type]


def _try_attack(job: Job) -> None:
    """Let the attack change two samples, so that a class or data that it does not fit are refused before training."""
    attack, federation = job.attack, job.federation
    if attack is None or attack.data is None:
        return
    x, y = federation.first(2)
    known = Knowledge(job.first_D, federation.dataset.num_classes, 0, generator(job.seed, "attack rehearsal"))
    attack.data(job.inputs(x), y, known)


def _attackers(who: Attackers, federation: Federation, seed: int) -> frozenset[int]:
    """The bad clients: named, picked by seed, or those who joined."""
    if who.clients:
        return frozenset(who.clients)
    if who.added is not None:
        return frozenset(federation.added)
    num_clients = federation.num_clients
    num = who.num if who.num is not None else round((who.fraction or 0.0) * num_clients)
    return frozenset(generator(seed, "attackers").choice(num_clients, size=num, replace=False).tolist())
