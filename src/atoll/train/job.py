"""Job: everything that a client's training needs, built once from a plan."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Algorithm, Scores
from atoll.core.attack import Attack, Knowledge
from atoll.core.contribution import Contribution
from atoll.core.coordinator import Policy
from atoll.core.detection import Detector
from atoll.core.downlink import Downlink
from atoll.core.errors import AtollError, PlanError
from atoll.core.messages import STATISTICS, Broadcast, State, Task
from atoll.core.optimizer import Optimizer
from atoll.core.params import ParamSpec, Slot, flatten, float_buffers, spec_of
from atoll.core.parts import Part, find
from atoll.core.plan import MAX_NORM, Attackers, Local, Plan
from atoll.core.privacy import Exposure, Mechanism, SampleSteps
from atoll.core.sampler import Sampler
from atoll.core.seeds import derive, generator
from atoll.core.transform import Chain, chain
from atoll.privacy.groups import most_exposed
from atoll.privacy.noise import derived, fresh_secret
from atoll.train.attributes import as_before
from atoll.train.clipping import Layer, private_layers
from atoll.train.distillation import check_models, check_public
from atoll.train.dropout import use_counter_dropout
from atoll.train.federation import Federation, build_federation
from atoll.train.secure import Secure, build_secure
from atoll.train.seeded import seeded

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The built parts of a plan that turn a task into an update."""

    seed: int
    federation: Federation
    model: nn.Module
    spec: ParamSpec
    first_D: Tensor
    """The parameters that the run starts from."""
    loss: Loss
    algorithm: Algorithm
    local: Local
    optimizer: Optimizer
    lr_of: Callable[[int], float]
    """Version -> the clients' learning rate."""
    uplink: Chain
    downlink: Downlink
    aggregator: Aggregator
    server_lr: float
    max_norm: float
    """The largest L2 norm of an update that counts."""
    keeps_rows: bool
    """Whether updates may be late by different amounts, so that each counts differently."""
    attack: Attack | None
    attackers: frozenset[int]
    attack_rounds: range
    detector: Detector | None
    secure: Secure | None
    contribution: Contribution | None
    mechanism: Mechanism | None
    secret: bytes
    """What privacy noise and private batches derive from."""
    layers: tuple[Layer, ...]
    """Where steps are private: the layers whose per-sample gradients need not be made; none if all must be."""
    dropout_seeds: list[str]
    local_buffers: list[str]
    """Buffers that each client keeps for itself."""
    layout: torch.memory_format = torch.contiguous_format
    """How the model gets images that are not stacked over clients."""
    exposure: Exposure | None = None
    """How clients and samples are drawn, where a mechanism protects them; of no attempt yet."""
    kinds: tuple[Job, ...] = ()
    """A job for each architecture, where clients keep models of their own; `spec` then lays out a table of scores."""

    def trainable(self, model: Tensor) -> Tensor:
        """Return the parameters of a model's flat vector, or of a stack of them, as a view."""
        return model[..., : self.spec.num_trainable] if self.spec.buffers else model

    def broadcast(self, model: Tensor, aux: State) -> Broadcast:
        """Return what is sent of a model's flat vector and of an algorithm's extras."""
        if not self.spec.buffers:
            return Broadcast(model, aux)
        return Broadcast(self.trainable(model), {**aux, STATISTICS: model[self.spec.num_trainable :]})

    def model_of(self, sent: Broadcast) -> Tensor:
        """Return the flat vector of the model that was sent, or of a stack of them."""
        return torch.cat([sent.params_D, sent.aux[STATISTICS]], dim=-1) if self.spec.buffers else sent.params_D

    def inputs(self, x: Tensor) -> Tensor:
        """Features as the model computes with them: in its dtype, and images in its layout."""
        x = x.to(self.spec.dtype) if x.dtype.is_floating_point else x
        return x.to(memory_format=self.layout) if x.dim() == 4 else x

    @property
    def private(self) -> SampleSteps | None:
        """How private steps are taken, if they are."""
        return self.mechanism.steps if self.mechanism is not None else None

    @property
    def wants_rows(self) -> bool:
        """Whether updates come back one by one, not folded: somebody must see them before the rule does."""
        colludes = self.attack is not None and self.attack.collude is not None
        seen = self.detector is not None or self.contribution is not None or self.secure is not None
        return self.keeps_rows or self.algorithm.needs_updates or colludes or seen

    @property
    def batch_size(self) -> int:
        """Samples a step; no client can fill more than the largest has."""
        wanted = self.local.batch_size
        return min(wanted, self.federation.max_samples) if isinstance(wanted, int) else self.federation.max_samples

    def num_steps(self, client: int, work: float = 1.0) -> int:
        """How many steps a client takes for a task, if it has time for this share of them."""
        steps = self.local.steps
        if steps is None:
            num_samples = self.federation.num_samples(client)
            steps = (self.local.epochs or 1) * -(-num_samples // min(self.batch_size, num_samples))
        return steps if work == 1 else max(1, round(work * steps))

    def num_passes(self, task: Task, *, first: bool = False) -> int:
        """How many samples a client trains on for a task, its first or another, every pass counted."""
        num_samples, scores = self.federation.num_samples(task.client), self.algorithm.scores
        if scores is not None and first and scores.private_epochs:
            own = max(1, round(task.work * scores.private_epochs * num_samples))
        elif self.local.steps is None:
            own = max(1, round(task.work * (self.local.epochs or 1) * num_samples))
        else:
            own = self.num_steps(task.client, task.work) * min(self.batch_size, num_samples)
        if scores is None:
            return own
        labelled = scores.public_epochs * self.num_public if first else 0
        digested = scores.epochs * self.spec.slots[0].shape[0] if task.version else 0
        return own + round(task.work * (labelled + digested))

    @property
    def num_public(self) -> int:
        """How many public samples there are."""
        return 0 if self.federation.public is None else len(self.federation.public.x)

    def attacks(self, client: int, version: int) -> bool:
        """Whether this client misbehaves in this round."""
        return self.attack is not None and client in self.attackers and version in self.attack_rounds


def build_job(
    plan: Plan, federation: Federation | None = None, *, secret: bytes | None = None, loss: Loss | None = None
) -> Job:
    """Build every part of a plan; parts refuse options that cannot be right.

    `secret` is what a run that goes on used before; without it there is a fresh one. `loss` is what the plan's loss
    means to a client that has one of its own by that name; nothing is imported for it then.
    """
    federation = federation or build_federation(plan)
    algorithm: Algorithm = plan.algorithm.build("algorithms")
    loss = loss or find("train.losses", plan.loss)
    model = build_model(plan, federation, loss=loss)
    spec = spec_of(model, buffers=plan.local.buffers)
    local = _settle(plan.local, algorithm, plan.algorithm.name)
    aggregator: Aggregator = plan.aggregator.build("aggregators", seed=plan.seed)
    uplink = _uplink(plan)
    policy: Policy = plan.policy.build("rounds")
    detector: Detector | None = plan.detection.build("detection") if plan.detection else None
    contribution: Contribution | None = plan.contribution.build("contribution") if plan.contribution else None
    _check_detection(plan, algorithm, policy, detector)
    _check_contribution(plan, algorithm, policy, contribution, federation.num_clients)
    _check_server(plan, algorithm, aggregator, detector)
    check_public(plan, algorithm, federation, policy)
    check_models(plan, algorithm, federation, aggregator, uplink)
    if aggregator.unit_steps and plan.server.lr is None:
        raise PlanError(f"{plan.aggregator.name} moves every parameter by server.lr: set it, e.g. to 0.001")
    schedule: Callable[[int], float] = local.schedule.build("train.schedules")
    mechanism: Mechanism | None = (
        plan.privacy.build("privacy.mechanisms", exposure=exposed(plan, local, federation)) if plan.privacy else None
    )
    layers = private_layers(algorithm, federation, model, spec, loss) if mechanism and mechanism.steps else ()
    if mechanism is not None and mechanism.test_noise:
        secret = derived(plan.seed.to_bytes(32, "big"), "test noise")
    job = Job(
        seed=plan.seed,
        federation=federation,
        model=model,
        spec=spec,
        first_D=flatten(model, spec),
        loss=loss,
        algorithm=algorithm,
        local=local,
        optimizer=local.optimizer.build("train.optimizers"),
        lr_of=lambda version: local.lr * schedule(version),
        uplink=uplink,
        downlink=_downlink(plan),
        aggregator=aggregator,
        server_lr=algorithm.server_lr if plan.server.lr is None else plan.server.lr,
        max_norm=MAX_NORM if plan.server.max_norm is None else plan.server.max_norm,
        keeps_rows=policy.overlaps_rounds,
        attack=plan.attack.build("attacks") if plan.attack else None,
        attackers=_attackers(plan.attackers, federation, plan.seed) if plan.attack else frozenset(),
        attack_rounds=_attack_rounds(plan),
        detector=detector,
        secure=build_secure(plan, algorithm, aggregator, uplink, policy) if plan.secagg is not None else None,
        contribution=contribution,
        mechanism=mechanism,
        secret=secret or fresh_secret(),
        layers=layers,
        dropout_seeds=use_counter_dropout(model),
        local_buffers=[name for name, _ in float_buffers(model)] if plan.local.buffers == "local" else [],
        layout=fastest_layout(model, federation.dataset.input_shape),
    )
    _try_attack(job)
    return job if algorithm.scores is None else _with_own_models(job, algorithm.scores, plan)


def exposed(plan: Plan, local: Local, federation: Federation) -> Exposure:
    """What a whole plan exposes of a sample, by the clients where that is most, if every round asks every client."""
    size_C = federation.partition.sizes()
    size_C = size_C - (plan.evaluation.holdout * size_C).astype(int)
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


def _uplink(plan: Plan) -> Chain:
    """The way up; updates are differences already."""
    found = chain(*(part.build("transforms") for part in plan.uplink))
    if any(step.against_known for step in found.transforms):
        raise PlanError("uplink: an update is a difference already: leave delta out")
    return found


def _downlink(plan: Plan) -> Downlink:
    """The way down; what codecs leave out is made up for by sending differences, not by a memory of their own."""
    for part in plan.downlink:
        if part.options.get("error_feedback"):
            raise PlanError(
                f"downlink: differences carry what {part.name} left out before, so that error_feedback would count it "
                'twice: leave it out and put "delta" first'
            )
    found = Downlink(chain(*(part.build("transforms", error_feedback=False) for part in plan.downlink)))
    found.check()
    return found


def _with_own_models(job: Job, scores: Scores, plan: Plan) -> Job:
    """Give the job its architectures, and let a table of scores on public samples take the place of parameters."""
    parts = plan.models or (plan.model,)
    kinds = []
    for model in [build_model(plan, job.federation, part) for part in parts]:
        spec = spec_of(model)
        kinds.append(
            replace(
                job,
                model=model,
                spec=spec,
                first_D=flatten(model, spec),
                algorithm=Algorithm(),
                dropout_seeds=use_counter_dropout(model),
                layout=fastest_layout(model, job.federation.dataset.input_shape),
            )
        )
    shapes = [_output_shape(kind) for kind in kinds]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            raise PlanError(
                f"model '{parts[0].name}' gives scores of shape {shapes[0]} a sample, but '{part.name}' {shape}: "
                "a mean of scores needs models with equal outputs"
            )
    shape = (min(scores.num_samples, job.num_public), *shapes[0])
    spec = ParamSpec((Slot("scores", shape, 0, math.prod(shape)),), math.prod(shape), kinds[0].spec.dtype)
    return replace(job, spec=spec, first_D=torch.zeros(spec.num_params, dtype=spec.dtype), kinds=tuple(kinds))


def _output_shape(kind: Job) -> tuple[int, ...]:
    """The shape of a model's scores for one sample."""
    x = kind.federation.features(kind.federation.train_x[:2])
    with as_before(kind.model), torch.no_grad():
        outputs = kind.model.eval()(kind.inputs(x))
    return tuple(outputs.shape[1:])


def build_model(plan: Plan, federation: Federation, part: Part | None = None, loss: Loss | None = None) -> nn.Module:
    """Make the model, or another of the plan's, with seeded first weights, and try it with the plan's loss.

    A factory gets `input_shape` and `num_classes` if it names them.
    """
    dataset, part = federation.dataset, part or (plan.models or (plan.model,))[0]
    with seeded(derive(plan.seed, "model")):
        try:
            model = part.build("models", input_shape=dataset.input_shape, num_classes=dataset.num_classes)
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
        model.train()
        loss = loss or find("train.losses", plan.loss)
        _try_model(model, part.name, plan.loss, loss, federation)  # what is lazy draws its first weights here
    return model


def _try_model(model: nn.Module, name: str, loss_name: str, loss: Loss, federation: Federation) -> None:
    """Run two samples through the model and the loss, so that misfits are named before training starts."""
    dtype = next(model.parameters()).dtype
    x = federation.features(federation.train_x[:2])
    x = x.to(dtype) if x.dtype.is_floating_point else x
    y = federation.train_y[:2]
    try:
        with as_before(model), torch.no_grad():
            outputs = model.eval()(x)
            losses = loss(outputs, y)
        model.train()
    except Exception as error:
        raise PlanError(
            f"model '{name}' with loss '{loss_name}' does not fit samples of shape "
            f"{federation.dataset.input_shape} with {federation.dataset.num_classes} classes: {error}; use a model for "
            "such samples, or other data"
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


def _settle(local: Local, algorithm: Algorithm, name: str) -> Local:
    """Fill in what the plan leaves open, and refuse what contradicts the algorithm."""
    fixed = dict(algorithm.local)
    for key, value in fixed.items():
        given = getattr(local, key)
        given = given.name if key == "optimizer" else given
        if given is not None and given != value:
            raise PlanError(f"{name} fixes local.{key} = {value!r} but the plan says {given!r}: leave it out")
    if "epochs" in fixed and local.steps is not None:
        raise PlanError(f"{name} fixes local.epochs = {fixed['epochs']}: leave local.steps out")
    if "optimizer" in fixed and local.optimizer.options:
        raise PlanError(f"{name} takes plain steps: leave out the options of local.optimizer {local.optimizer.options}")
    epochs = fixed.get("epochs", local.epochs or (None if local.steps else 1))
    batch_size = fixed.get("batch_size", local.batch_size or 10)
    return replace(local, epochs=epochs, batch_size=batch_size)  # type: ignore[arg-type]


def _check_detection(plan: Plan, algorithm: Algorithm, policy: Policy, detector: Detector | None) -> None:
    """Updates can be compared if they answer one version, and by a loss if they are parameters."""
    if plan.detection is None or detector is None:
        return
    _check_one_version(plan, policy, "detection")
    name = f"detection {plan.detection.name}"
    if detector.needs_loss and plan.server.samples is None:
        raise PlanError(f"{name} needs samples of the server's own: set server.samples, e.g. to 100")
    if detector.needs_loss and algorithm.scores is not None:
        raise PlanError(f"{name} tries parameters, but clients of {plan.algorithm.name} send scores: use distance")


def _check_one_version(plan: Plan, policy: Policy, field: str) -> None:
    if policy.overlaps_rounds:
        raise PlanError(
            f"{field} compares updates of one version, but {plan.policy.name} takes them late by different amounts: "
            f'use policy = "cohort", or leave {field} out'
        )


def _check_contribution(
    plan: Plan, algorithm: Algorithm, policy: Policy, contribution: Contribution | None, num_clients: int
) -> None:
    """Coalitions can be valued if their updates answer one version, make a model, and are not too many."""
    if plan.contribution is None or contribution is None:
        return
    _check_one_version(plan, policy, "contribution")
    if algorithm.scores is not None:
        raise PlanError(
            f"contribution values a shared model, but clients of {plan.algorithm.name} keep their own: leave it out"
        )
    if plan.server.samples is None:
        raise PlanError("contribution is measured on samples of the server's own: set server.samples, e.g. to 200")
    if contribution.max_clients is not None:
        sampler: Sampler = plan.sampler.build("rounds.samplers")
        most = num_clients if sampler.draws_size else policy.goal(num_clients)
        if most > contribution.max_clients:
            raise PlanError(
                f"{plan.contribution.name} tries every coalition of at most {contribution.max_clients} clients, but a "
                f"round may have {most}: use gtg_shapley or tmc_shapley, or lower policy.size"
            )


def _check_server(plan: Plan, algorithm: Algorithm, aggregator: Aggregator, detector: Detector | None) -> None:
    """The server has samples of its own if, and only if, its rule, its detection or contribution looks at them."""
    name, num = plan.aggregator.name, plan.server.samples
    if aggregator.add_server_update is not None and num is None:
        raise PlanError(f"{name} compares with the server's own update: set server.samples, e.g. to 100")
    if aggregator.add_server_update is not None and algorithm.scores is not None:
        raise PlanError(f"{name} compares parameters, but clients of {plan.algorithm.name} send scores: use a median")
    looked_at = plan.contribution is not None or (detector is not None and detector.needs_loss)
    if aggregator.add_server_update is None and num is not None and not looked_at:
        raise PlanError(f"server.samples is {num}, but {name} does not use them: leave it out, or use fltrust")


def _try_attack(job: Job) -> None:
    """Let the attack change two samples, so that a class or data that it does not fit are refused before training."""
    attack, federation = job.attack, job.federation
    if attack is None or attack.data is None:
        return
    x, y = federation.features(federation.train_x[:2]), federation.train_y[:2]
    known = Knowledge(job.first_D, federation.dataset.num_classes, 0, generator(job.seed, "attack rehearsal"))
    attack.data(job.inputs(x), y, known)


def _attack_rounds(plan: Plan) -> range:
    """The versions in which the bad clients attack."""
    start, num = plan.attackers.start_round, plan.attackers.num_rounds
    return range(start, sys.maxsize if num is None else start + num)


def _attackers(who: Attackers, federation: Federation, seed: int) -> frozenset[int]:
    """The bad clients: named, picked by seed, or those who joined."""
    num_clients = federation.num_clients
    for client in who.clients:
        if not 0 <= client < num_clients:
            raise PlanError(f"attackers.clients names client {client}, but there are only 0 to {num_clients - 1}")
    if who.clients:
        return frozenset(who.clients)
    if who.added is not None:
        return frozenset(federation.added)
    if who.num is None and who.fraction is None:
        raise PlanError("there is an attack but nobody attacks: set attackers.num, .fraction, .clients or .added")
    num = who.num if who.num is not None else round((who.fraction or 0.0) * num_clients)
    if num > num_clients:
        raise PlanError(f"attackers.num is {num} but the federation has {num_clients} clients: lower it")
    return frozenset(generator(seed, "attackers").choice(num_clients, size=num, replace=False).tolist())
