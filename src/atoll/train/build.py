"""Build a plan into a job: its model, its parts, and what is settled between them."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atoll.checks.table import check
from atoll.checks.views import Parts
from atoll.core.algorithm import Algorithm
from atoll.core.attack import Knowledge
from atoll.core.client_work import ClientWork
from atoll.core.defence import defences_of
from atoll.core.downlink import Downlink
from atoll.core.errors import AtollError, PlanError
from atoll.core.params import ParamSpec, flatten, flatten_kept, float_buffers, kept_names, spec_of
from atoll.core.parts import Part, find, members
from atoll.core.plan import MAX_NORM, Attackers, Local, Plan
from atoll.core.privacy import Exposure
from atoll.core.problem import Loss, Problem
from atoll.core.seeds import derive, generator
from atoll.core.transform import chain
from atoll.data.dataset import Dataset
from atoll.privacy.groups import most_exposed
from atoll.privacy.noise import derived, fresh_secret
from atoll.train.attributes import as_before
from atoll.train.clipping import mixer_of, private_layers
from atoll.train.dropout import use_counter_dropout
from atoll.train.federation import Federation, build_federation
from atoll.train.job import Job
from atoll.train.metrics import Measures, build_measures
from atoll.train.secure import Secure
from atoll.train.seeded import seeded
from atoll.train.vertical import vertical_model

MIXED = 64
"""Samples on which is tried whether a loss mixes them."""


def build_job(
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
        parts = replace(parts, mixer=_mixing_loss(federation, model, loss))
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


def final_model(plan: Plan, job: Job) -> nn.Module:
    """Return a fresh model for the parameters that a run ended with."""
    return copy.deepcopy(job.model) if job.work.first is not None else build_model(plan, job.federation)


class ArrayModel(nn.Module):
    """Named arrays in place of a model, for client work that needs none; they are trained, sent and saved as one."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        super().__init__()
        for name, values in arrays.items():
            tensor = torch.as_tensor(values)
            tensor = tensor if tensor.dtype.is_floating_point else tensor.float()
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor.clone()))


def build_problem(plan: Plan, dataset: Dataset) -> Problem:
    """Return what the plan says is learnt, or what the targets look like."""
    problem = (plan.problem or Part(dataset.problem)).build("problems")
    if not isinstance(problem, Problem):
        raise PlanError(f"problem '{plan.problem}' gave {type(problem).__name__}: return an atoll.core.problem.Problem")
    return problem


def build_loss(part: Part, kind: str) -> Loss:
    """Return a loss of the catalogue for a kind of problem; one's own function without options is the loss itself."""
    own = part.call is not None or ":" in part.name
    if own and not part.options:
        return part.call or find("train.losses", part.name)
    loss = part.build("train.losses")
    if not callable(loss):
        raise PlanError(f"loss '{part.name}' gave {type(loss).__name__}: return a function of outputs and targets")
    fits = () if own else _fits(part.name)
    if fits and kind not in fits:
        fitting = [name for name in members("train.losses") if kind in _fits(name)]
        raise PlanError(f"loss '{part.name}' is for {', '.join(fits)}, not for {kind}: use {' or '.join(fitting)}")
    return loss  # type: ignore[no-any-return]


def _fits(name: str) -> tuple[str, ...]:
    return getattr(importlib.import_module(f"atoll.train.losses.{name}"), "FITS", ())


def _mixing_loss(federation: Federation, model: nn.Module, loss: Loss) -> str | None:
    """Name a loss by which one sample's number depends on others; None if none does on the samples that are tried."""
    x, y = federation.first(MIXED)
    dtype = next(model.parameters()).dtype
    with as_before(model), torch.no_grad():
        outputs = model.eval()(x.to(dtype) if x.dtype.is_floating_point else x)
        outputs = outputs + torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        together = loss(outputs, y)
        alone = torch.cat([loss(outputs[i : i + 1], y[i : i + 1]) for i in range(len(y))])
    model.train()
    return None if torch.allclose(together, alone, rtol=1e-3, atol=1e-4, equal_nan=True) else "the loss"


def build_model(
    plan: Plan,
    federation: Federation,
    part: Part | None = None,
    loss: Loss | None = None,
    measures: Measures | None = None,
    draw: int = 0,
) -> nn.Module:
    """Make the model, or another of the plan's, with seeded first weights, and try it with the plan's loss.

    Other numbers of a `draw` give other first weights, which what is lazy draws in the trial. A factory gets
    `input_shape`, and the number of outputs as `num_classes`, if it names them. Of parties that hold columns it is the
    top model, with theirs below it.
    """
    dataset, part = federation.dataset, part or (plan.models or (plan.model,))[0]
    with seeded(derive(plan.seed, "model", *([draw] if draw else []))):
        try:
            if plan.split is not None and plan.split.parties:
                model = vertical_model(plan.split, part, dataset)
            else:
                model = part.build("models", input_shape=dataset.input_shape, num_classes=dataset.num_outputs)
        except AtollError:
            raise
        except Exception as error:
            raise PlanError(
                f"model '{part.name}' cannot be made for samples of shape {dataset.input_shape}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(model, nn.Module):
            raise PlanError(f"model '{part.name}' gave {type(model).__name__}: a factory must return an nn.Module")
        if next(model.parameters(), None) is None:
            raise PlanError(f"model '{part.name}' has no parameters: there is nothing to train")
        if (prepare := plan.algorithm.build("algorithms").prepare) is not None:
            prepare(model)
        model.train()
        named = plan.loss or build_problem(plan, dataset).loss
        _try_model(model, part.name, named.name, loss or build_loss(named, dataset.problem), federation, measures)
    return model


def _try_model(
    model: nn.Module, name: str, loss_name: str, loss: Loss, federation: Federation, measures: Measures | None
) -> None:
    """Run two samples through the model, the loss and the metrics, so that misfits are named before training starts."""
    dtype = next(model.parameters()).dtype
    x, y = federation.first(2)
    x = x.to(dtype) if x.dtype.is_floating_point else x
    try:
        with as_before(model), torch.no_grad():
            outputs = model.eval()(x)
            losses = loss(outputs, y)
        model.train()
    except Exception as error:
        dataset = federation.dataset
        what = f"{dataset.num_classes} classes" if dataset.num_classes else f"{dataset.problem} targets"
        raise PlanError(
            f"model '{name}' with loss '{loss_name}' does not fit samples of shape {dataset.input_shape} with {what}: "
            f"{error}; use a model for such samples, or other data"
        ) from error
    if not isinstance(losses, Tensor) or losses.shape != (len(y),):
        gave = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise PlanError(
            f"loss '{loss_name}' must give one number a sample, shape ({len(y)},), but gave {gave}: "
            "reduce over everything but the first dimension"
        )
    classes = federation.dataset.num_classes
    if loss_name == "cross_entropy" and outputs.shape[-1] < classes:
        raise PlanError(
            f"the model has {outputs.shape[-1]} outputs for {classes} classes: pass num_classes to the model"
        )
    if measures is not None:
        _try_measures(measures, outputs, y, losses)


def _try_measures(measures: Measures, outputs: Tensor, y: Tensor, losses: Tensor) -> None:
    """Measure two samples, so that a metric that does not fit the problem is named before training starts."""
    for label, metric in measures.metrics.items():
        try:
            alone = Measures(measures.problem, {label: metric})
            alone.finish(alone.add(outputs, y, losses))
        except AtollError:
            raise
        except Exception as error:
            raise PlanError(
                f"metric '{label}' does not fit outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(y.shape)}: {type(error).__name__}: {error}; name others in evaluation.metrics"
            ) from error


def fastest_layout(model: nn.Module, input_shape: tuple[int, ...]) -> torch.memory_format:
    """Channels last where the model convolves images and takes them like that: this is faster on a processor.

    A model may ask for views that only the usual layout allows, so it is tried: on numbers that are the same for
    everybody, since all clients of a network must choose alike.
    """
    plain, last = torch.contiguous_format, torch.channels_last
    convolves = any(isinstance(module, nn.Conv2d) for module in model.modules())
    if not convolves or len(input_shape) != 3 or next(model.parameters()).dtype != torch.float32:
        return plain
    x = torch.rand((2, *input_shape), generator=torch.Generator().manual_seed(1))
    try:
        with as_before(model), torch.no_grad():
            model.eval()
            usual, other = model(x), model(x.to(memory_format=last))
            same = bool((usual - other).abs().max() <= 1e-3 * usual.abs().max())
    except (RuntimeError, TypeError):
        same = False
    return last if same else plain


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
