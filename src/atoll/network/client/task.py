"""One run on the client: receiving broadcasts, training updates.

Shapes: V, the packed vector of a broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from atoll.core.eligibility import ANYBODY
from atoll.core.errors import AtollError, TrainingError
from atoll.core.messages import Broadcast, Payload, State, Task, Update, stack
from atoll.core.plan import Plan
from atoll.core.wire import packed_size, pieces, unpack_parts
from atoll.network.client.app import ClientApp
from atoll.network.client.budget import cost_of
from atoll.network.client.home import RunHome
from atoll.network.protocol.agreement import Floors
from atoll.network.protocol.layers import name_in
from atoll.network.protocol.messages import Delivery, EvaluationOrder, Order, Ref, update_text
from atoll.network.protocol.objects import Manifest, ObjectError, manifest_of
from atoll.split.columns import VerticalParties
from atoll.split.parties import Parties
from atoll.train.devices import PLAIN, Place
from atoll.train.exchange import acceptable, decoded, encoded, protected, sent_by
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.trainer import Trainer

Fetch = Callable[[Ref], Iterable[bytes]]
"""Downloads an object, chunk by chunk."""
SLACK = 1 << 20
"""Bytes by which a broadcast may exceed twice the plain vector: tables, and codecs that do not pay."""

ROUNDED = 2e-3
"""Share of the first model's norm by which a version may be off for rounding, of machines and of `half`."""


class WorkRefused(AtollError):
    """Work that this client refuses; the server receives the reason."""


class TrainedUpdate(NamedTuple):
    """A trained update with its metadata, and the client's state if it counts."""

    data: list[bytes | memoryview]
    """The payload in parts; under secure aggregation, before it is masked."""
    num_samples: int
    loss: float | None
    """None if the work has none."""
    weight: float
    state: State


@dataclass(frozen=True, kw_only=True)
class AgreedRun:
    """A run to which this client agreed, built."""

    plan: Plan
    job: Job
    floors: Floors
    number: int
    """The client's number in plans."""
    home: RunHome
    min_cohort: int = 1
    """Minimum number of clients behind a version, by the plan."""
    place: Place = PLAIN
    """Where the client trains."""
    keys_known: bool = False
    """Whether the owner gave the other clients' keys, so that the server's are not used."""
    parties: Parties | VerticalParties | None = None
    """What its sessions need, where the model is cut."""
    rows: bytes = b""
    """Commitment to the rows in their order, where parties hold columns."""

    @cached_property
    def trainer(self) -> Trainer:
        """Return the trainer of the inline engine, as in a simulation."""
        return Trainer(self.job, place=self.place)

    @cached_property
    def layout(self) -> Broadcast:
        """Return a broadcast with the shape of all broadcasts of this run."""
        first_M = self.job.first_D
        return broadcast_of(self.job, first_M, first_server(self.job, first_M))

    @property
    def own_parties(self) -> Parties:
        """Return the cut between this client and the server, of a model that is cut."""
        assert self.parties is not None
        return self.parties.of(self.number)

    @property
    def max_bytes(self) -> int:
        """Return the maximum size of a broadcast."""
        return 2 * packed_size(self.layout.plain()) + SLACK

    def task(self, order: Order) -> Task:
        """Return the task of an order."""
        return Task(
            client=self.number,
            version=order.version,
            attempt=order.attempt,
            share=order.share,
            work=order.work,
            clip=order.clip,
        )

    def charge_privacy(self, order: Order) -> None:
        """Charge an attempt to the privacy budget; refuse one that the floors do not allow."""
        if self.job.mechanism is not None and not self.job.mechanism.test_noise:
            cost = partial(cost_of, self.job, order.attempt + 1)
            self.home.budget.charge(order.attempt, cost, self.floors.max_epsilon)

    def receive_broadcast(self, order: Order | EvaluationOrder, fetch: Fetch) -> Broadcast:
        """Return the broadcast named by the order's `model`: from differences, decoded, or complete."""
        sent = self._from_news(order, fetch)
        if sent is None and order.encoded is not None:
            sent = _if_named(order.model, self._decode(self._payload(order.encoded, fetch), encoded=True))
        if sent is None:
            sent = self._decode(self._payload(order.model, fetch), encoded=False)
        self.check_change(order.version, sent.params_D, self.layout.params_D)
        if self.job.downlink.by_difference or self.floors.max_change is not None:
            self.home.save_broadcast(order.version, sent.vector())
        return sent

    def check_change(self, version: int, sent_D: Tensor, first_D: Tensor) -> None:
        """Refuse a model that is farther from the last one seen than the floors allow for the versions since.

        Before any was seen, that is the first model that the plan's own seed gives: a server that plants a model which
        makes samples leak (`probes/trap_weights.py`) must take it from far away, and is noticed before training.
        """
        if self.floors.max_change is None:
            return
        known = self.home.last_broadcast()
        before, seen_D = (0, first_D) if known is None else (known[0], known[1][: first_D.numel()].view_as(first_D))
        apart = float((sent_D.double() - seen_D.double()).norm())
        most = max(0, version - before) * self.floors.max_change
        if not apart <= most + ROUNDED * float(first_D.double().norm()):
            origin = "the first model of the plan's own seed" if known is None else f"version {before}"
            raise WorkRefused(
                f"version {version} is {apart:.3g} away from {origin}, this client allows {most:.3g} by "
                "floors.max_change: ask the operator who changed the model; for a run that starts from a given model, "
                "or codes what it sends down, leave the floor out"
            )

    def final_params(self, ref: Ref, fetch: Fetch) -> Tensor:
        """Download the final parameters of the run, or of the layers that clients have."""
        params_D = self._payload(ref, fetch).carrier
        due_D = self.job.first_D if self.parties is None else self.own_parties.cut.client.take(self.job.first_D)
        if params_D.shape != due_D.shape or params_D.dtype != due_D.dtype:
            raise WorkRefused(
                f"the last model has {tuple(params_D.shape)} values of {params_D.dtype}: tell the operator"
            )
        return params_D

    def layers_name(self, ref: Ref, fetch: Fetch) -> str:
        """Return the name of this client's layers where the model is cut, of a version that is named by `ref`."""
        if isinstance(self.parties, VerticalParties):
            return name_in(self._payload(ref, fetch), self.number)
        return ref.name

    def train(self, order: Order, sent: Broadcast) -> TrainedUpdate:
        """Train for an order, and encode the update."""
        job, task = self.job, self.task(order)
        _, before = self.home.state()
        trained = self.trainer.train_one(task, sent, before)
        update = protected(job, [task], trained.update.alone())
        if not self._is_usable(task, update, trained.loss):
            raise TrainingError(
                "the update holds NaN or Inf, or is longer than server.max_norm: lower local.lr, or check this "
                "client's data"
            )
        payload, memory = encoded(job, task, update.rows(0), before)
        if job.secure is not None:
            payload = self._secure_addend(task, update.rows(0), payload)
        samples, loss = job.federation.num_samples(self.number), None if math.isnan(trained.loss) else trained.loss
        if job.mechanism is not None:  # nothing but the update is protected
            samples, loss = samples if job.mechanism.at_client is None else 1, 0.0
        return TrainedUpdate(
            data=pieces(payload, compress=True),
            num_samples=samples,
            loss=loss,
            weight=float(update.weight[0]),
            state=trained.state | memory,
        )

    def measure(self, sent: Broadcast) -> State:
        """Return the condensed sums of the plan's metrics of a version on this client's evaluation samples."""
        _, state = self.home.state()
        if not (self.job.shares_model or state):
            raise WorkRefused("this client has no model of its own yet: it has not been counted in a version")
        sums = self.job.measures.condense(self.trainer.measure_client(self.job.model_of(sent), self.number, state))
        if not all(bool(value.isfinite().all()) for value in sums.values()):
            raise WorkRefused("the model gives NaN or Inf on this client's samples: check the model, or the data")
        return sums

    def _is_usable(self, task: Task, update: Update, loss: float) -> bool:
        """Return whether an update may be sent; under privacy a decision by values would reveal them."""
        mechanism = self.job.mechanism
        if mechanism is None:
            sound = math.isfinite(loss) or (math.isnan(loss) and not self.job.work.always_has_loss)
            return sound and bool(acceptable(self.job, [task], update).all())
        counts_as_none = self.job.secure is not None and mechanism.on_grid is not None  # see _secure_addend
        return counts_as_none or bool(acceptable(self.job, [task], update).all())

    def _secure_addend(self, task: Task, update: Update, payload: Payload) -> Payload:
        """Return an update as decoded at the uplink's other end, with this client's share of noise if it adds one."""
        addend = stack([decoded(self.job, update, payload)])
        mechanism = self.job.mechanism
        if mechanism is not None and mechanism.on_grid is not None:
            addend = mechanism.on_grid(addend, sent_by(self.job, [task]))
        return addend.rows(0).plain()

    def _from_news(self, order: Order | EvaluationOrder, fetch: Fetch) -> Broadcast | None:
        """Return the saved broadcast plus the differences since; None if some are missing, or exceed the model."""
        known = self.home.last_broadcast() if self.job.downlink.by_difference else None
        if known is None:
            return None
        version, vector_V = known
        news = [each for each in order.news if each.version > version]
        complete = [each.version for each in news] == list(range(version + 1, order.version + 1))
        if not complete or sum(each.object.num_bytes for each in news) > order.model.num_bytes:
            return None
        if not news and self.layout.exact():  # only the vector is saved
            return None
        exact: State = {}
        for each in news:
            change = self._decode(self._payload(each.object, fetch), encoded=True)
            vector_V, exact = vector_V + change.vector(), change.exact()
        return _if_named(order.model, self.layout.rebuilt(vector_V, exact))

    def _payload(self, ref: Ref, fetch: Fetch) -> Payload:
        if ref.num_bytes > self.max_bytes:
            raise WorkRefused(f"a broadcast of {ref.num_bytes:,} bytes, at most {self.max_bytes:,} are due in this run")
        return unpack_parts(fetch(ref), ref.num_bytes, max_bytes=self.max_bytes)

    def _decode(self, payload: Payload, *, encoded: bool) -> Broadcast:
        try:
            payload, exact = payload.split(self.layout.exact())
            vector_V = self.job.downlink.chain.decode(payload) if encoded else payload.carrier
        except Exception as error:
            raise ObjectError(f"the broadcast cannot be decoded ({type(error).__name__}: {error})") from error
        own_V = self.layout.vector()
        if vector_V.shape != own_V.shape or vector_V.dtype != own_V.dtype:
            raise WorkRefused(
                f"the model that was sent has {tuple(vector_V.shape)} values of {vector_V.dtype}, the plan's on this "
                f"client's samples has {tuple(own_V.shape)} of {own_V.dtype}: compare the samples' shape and classes"
            )
        return self.layout.rebuilt(vector_V, exact)


def why_not_trained(agreed: AgreedRun, app: ClientApp) -> str | None:
    """Return why a run's tasks are not done now; None if they are."""
    if not agreed.plan.rounds:
        return "this run has no rounds: this client agreed to evaluate, not to train"
    rule = agreed.plan.eligibility
    reason = None if rule == ANYBODY else rule.why_not(app.current_attributes())
    return None if reason is None else f"this device may not be asked now: {reason}"


def _if_named(ref: Ref, sent: Broadcast) -> Broadcast | None:
    """Return a broadcast if it has this name: machines may decode to other last bits than the server."""
    return sent if manifest_of(*pieces(sent.plain())).name() == ref.name else None


def signed_delivery(key: Ed25519PrivateKey, order: Order, manifest: Manifest, trained: TrainedUpdate) -> Delivery:
    """Return the metadata of an update, signed by the client's key."""
    delivery = Delivery(
        manifest=msgspec.msgpack.encode(manifest),
        num_samples=trained.num_samples,
        loss=trained.loss,
        weight=trained.weight,
        signature=bytes(64),
        broadcast=order.model.name,
    )
    text = update_text(order.run, order.attempt, order.version, manifest.name(), delivery)
    return msgspec.structs.replace(delivery, signature=key.sign(text))
