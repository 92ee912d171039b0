"""Rehearse a round before the first client trains, so that a plan whose parts do not fit is refused at once.

Shapes: C clients, D parameters, M values of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from atoll.checks.table import check
from atoll.checks.views import Round
from atoll.commit.server_step import aggregated, stepped
from atoll.core.aggregator import as_rows
from atoll.core.coordinator import Coordinator
from atoll.core.errors import AtollError, PlanError
from atoll.core.messages import Payload, State, Task, Update, stack
from atoll.core.plan import ADAPT_STEPS, Plan
from atoll.core.transform import Encoding
from atoll.core.wire import pack, packed_size, unpack
from atoll.train.attributes import as_before
from atoll.train.exchange import UPLINK, decoded, encoded
from atoll.train.job import Job, broadcast_of, first_server, layout_of
from atoll.train.secure import Largest, from_sum, rounding_of, to_integers
from atoll.train.seeded import seeded
from atoll.train.trainer import Trainer, advice_on

LARGE = 20_000_000
"""Values beyond which nothing but a codec is rehearsed: whole rounds of such models would take memory and time."""
SIZES = (1.0, 1e-2, 0.0)
"""How large the values of the made-up updates are: codecs keep different numbers of them, and may get zeros."""

SENDINGS = 4
"""Versions by which clients who are sent differences of one model must have come closer to it."""


def rehearse_round(plan: Plan, job: Job, coordinator: Coordinator) -> None:
    """Send made-up updates through uplink, secure sum, rule and server step; raise PlanError for what does not fit.

    Privacy noise is left out: it is drawn for releases alone.
    """
    layout = layout_of(job)
    _try_smallest_batch(job, max(plan.evaluation.adapt_steps or ADAPT_STEPS))
    with _as_refusal("uplink", "change the order of the uplink, or leave a step out"):
        updates, bytes_up = made_up_updates(job, layout, SIZES[:1] if job.spec.num_params > LARGE else SIZES)
    least_bytes = _least_bytes(plan, job, coordinator, bytes_up)
    check(Round(plan, job.mechanism, tuple(sorted(layout.exact())), least_bytes))
    with _as_refusal("downlink", "change the order of the downlink, or leave a step out"):
        _heard(job)
        _must_come_closer(job)
    num = max(job.aggregator.min_updates, 2)
    if job.spec.num_params * num > LARGE:
        return
    rows = stack([updates[place % len(updates)] for place in range(num)])
    if job.secure is not None and job.mechanism is None:
        rows = stack([_in_secret(job, rows, num)] * num)
    with _as_refusal("aggregator", "use another aggregator, or another algorithm"):
        model_M, server = job.first_D.clone(), first_server(job, job.first_D)
        own = rows.rows(0) if job.aggregator.add_server_update is not None else None
        rule = job.aggregator
        folded = as_rows(rows) if job.wants_rows else rule.add(rule.zero(), rows)
        aggregate, _ = aggregated(job, folded, rule.init(), own)
        if not job.algorithm.needs_public:  # distilling takes long, and its options were checked
            stepped(job, model_M, aggregate, server, 0, coordinator.num_clients)


def _try_smallest_batch(job: Job, new_steps: int) -> None:
    """Run the smallest batch that a client will meet through the model in training mode.

    New clients take `new_steps` steps.
    """
    if job.private is not None or job.work.first is not None:
        return
    for kind in job.work.jobs(job):
        client, size = _smallest_batch(job, new_steps)
        x, y = kind.federation.first(size)
        x = kind.inputs(x)
        buffers = {name: buffer.clone() for name, buffer in kind.model.named_buffers()}
        try:
            with as_before(kind.model), torch.no_grad(), seeded(0):
                kind.loss(functional_call(kind.model, buffers, (x,)), y)
        except Exception as error:
            raise PlanError(
                f"the model cannot be trained on a batch of {size}, which client {client} meets: "
                f"{' '.join(str(error).split())}; {advice_on(str(error))}"
            ) from error


def rehearse_training(job: Job, client: int | None = None) -> None:
    """Let a client, the smallest unless another is named, take one step with a copy of the model, and forget it.

    An algorithm, a model and private steps may not fit each other. What the step draws is not what a run draws.
    """
    if job.work.personal or job.spec.num_params > LARGE:
        return
    client = int(job.federation.partition.sizes().argmin()) if client is None else client
    local = replace(job.local, epochs=None, steps=1)
    copied = replace(job, model=copy.deepcopy(job.model), local=local, attack=None, secret=bytes(32))
    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    Trainer(copied).train_one(Task(client, 0, 0), sent, {})


def _smallest_batch(job: Job, new_steps: int) -> tuple[int, int]:
    """A client whose smallest batch is the smallest of all, and how many samples that has."""
    federation = job.federation
    sizes_C = np.maximum(
        federation.training_sizes((federation.everybody if new_steps else federation.partition).sizes()), 1
    )
    steps_C = np.full(len(sizes_C), job.local.steps or sizes_C.max())
    steps_C[federation.num_clients :] = new_steps
    if job.local.batch_size == "all":
        least_C = sizes_C
    else:
        batch_C = np.minimum(job.batch_size, sizes_C)
        rest_C, num_C = sizes_C % batch_C, -(-sizes_C // batch_C)
        meets_rest_C = (rest_C > 0) & (num_C <= steps_C)
        least_C = np.where(meets_rest_C, rest_C, batch_C)
    client = int(least_C.argmin())
    return client, int(least_C[client])


def _least_bytes(plan: Plan, job: Job, coordinator: Coordinator, bytes_up: int) -> int:
    """Return how many bytes a round takes at least, of clients that send so many up; 0 where that is not known."""
    if job.secure is not None or plan.split is not None:
        return 0
    sure = plan.devices is None and not coordinator.sampler.draws_size
    num = coordinator.policy.goal(coordinator.num_clients) if sure else max(1, coordinator.policy.min_reports)
    sent = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    return num * (bytes_up + (0 if job.downlink.chain.transforms else packed_size(sent.plain())))


def made_up_updates(job: Job, layout: Update, sizes: tuple[float, ...]) -> tuple[list[Update], int]:
    """Return made-up updates of one client after the uplink, one round after another, and the bytes of the shortest."""
    generator = torch.Generator().manual_seed(0)
    memory: State = {}
    found, num_bytes = [], []
    for attempt, size in enumerate(sizes):

        def made_up(like: Tensor, size: float = size) -> Tensor:
            return size * torch.randn(like.shape, generator=generator, dtype=like.dtype)

        extras = {name: made_up(value) for name, value in layout.aux.items() if name not in layout.exact()}
        ones = {name: torch.ones_like(value) for name, value in layout.exact().items()}
        update = Update(made_up(layout.delta_D), torch.ones_like(layout.weight), {**extras, **ones})
        task = Task(0, 0, attempt)
        payload, memory = encoded(job, task, update, memory)
        as_it_is = job.spec.num_params > LARGE and not job.uplink.transforms  # a message of it would be two copies more
        arrived = decoded(job, update, payload if as_it_is else _over_the_wire(payload))
        if arrived.delta_D.shape != update.delta_D.shape or arrived.delta_D.dtype != update.delta_D.dtype:
            raise PlanError(
                f"the uplink makes {tuple(arrived.delta_D.shape)} values of {arrived.delta_D.dtype} out of "
                f"{tuple(update.delta_D.shape)} of {update.delta_D.dtype}"
            )
        assert all(name.startswith(UPLINK) for name in memory)
        found.append(arrived)
        num_bytes.append(packed_size(payload))
    return found, min(num_bytes)


def _heard(job: Job) -> None:
    """Send made-up broadcasts through the downlink, one version after another."""
    if not job.downlink.chain.transforms or job.spec.num_params > LARGE:
        return
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    server, memory = first_server(job, job.first_D), dict[str, Tensor]()
    for attempt, size in enumerate((0.0, *SIZES, 0.0)):  # the first is sent whole, and the last does not differ
        model_M = job.first_D + size * torch.randn(job.first_D.shape, generator=generator, dtype=job.first_D.dtype)
        encoding = Encoding(job.spec.without_buffers, attempt, rng)
        _, memory = job.downlink.send(broadcast_of(job, model_M, server), memory, encoding)


def _must_come_closer(job: Job) -> None:
    """Refuse differences whose codec errs by more than they are long: what clients know would drift away for good.

    EF21-P needs a contraction, E ||C(x) - x||^2 < ||x||^2 (Gruntkowska et al. 2023, arXiv:2209.15218, definition 1).
    """
    if not job.downlink.by_difference or job.spec.num_params > LARGE:
        return
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    first = broadcast_of(job, job.first_D, first_server(job, job.first_D))
    for size in SIZES[:2]:
        noise = size * torch.randn(first.vector().shape, generator=generator, dtype=first.vector().dtype)
        newest = first.rebuilt(first.vector() + noise, first.exact())
        memory: State = {"known": first.vector()}
        for attempt in range(1, 1 + SENDINGS):
            _, memory = job.downlink.send(newest, memory, Encoding(job.spec.without_buffers, attempt, rng))
        gap = float((newest.vector() - memory["known"]).norm())
        if gap > (1 + 1e-6) * float(noise.norm()):
            raise PlanError(
                f"downlink: the codec behind delta errs by more than a difference is long (after {SENDINGS} versions "
                f"clients are {gap / float(noise.norm()):.3g} times as far from the model as before): use top_k, or "
                "more bits"
            )


def _over_the_wire(payload: Payload) -> Payload:
    data = pack(payload)
    return unpack(data, max_bytes=len(data))


def _in_secret(job: Job, rows: Update, num: int) -> Update:
    """The mean of some updates as a secure sum gives it; masks cancel out, so that none are drawn."""
    assert job.secure is not None
    encoding, largest = job.secure.encoding(num), Largest(float(job.federation.max_samples), job.federation.max_samples)
    vectors = [
        to_integers(rows.rows(row), 1, 1.0, largest, encoding, rounding_of(job.seed, 0, row)) for row in range(num)
    ]
    found = from_sum(np.sum(vectors, axis=0, dtype=encoding.dtype), num, rows.rows(0), largest, encoding)
    if found is None:
        raise PlanError("secure aggregation cannot add this plan's updates: set secagg.modulus_bits = 64")
    return found.update


@contextmanager
def _as_refusal(what: str, way_out: str) -> Iterator[None]:
    """Turn what a part raises on a made-up update into a refusal of the plan."""
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise PlanError(f"{what} does not fit the updates of this plan ({text}): {way_out}") from error
