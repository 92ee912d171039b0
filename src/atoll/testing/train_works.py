"""What every client work must satisfy. Shapes: D values of what travels."""

from __future__ import annotations

import torch

from atoll.core.algorithm import Algorithm
from atoll.core.client_work import ClientWork, Samples, Trained
from atoll.core.messages import SERVER, Broadcast, State, Task
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.testing.law import Member, law, must, must_be_close, must_be_equal, must_be_state, written
from atoll.testing.runs import final, must_agree, must_ignore_order, must_repeat, must_resume, small_plan
from atoll.train.build import build_job
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.seeded import seeded

CONTRACT = ClientWork
CLIENT = 3
FEW = 40
"""Samples that are enough to see whether sums add up."""


def averaging(work: Part) -> Algorithm:
    """Add the mean of what clients send, whatever they do: for work that only an algorithm may bring along."""
    return Algorithm(work=work, needs_public=not work.build("train.works").sends_models)


def _plan(member: Member) -> Plan:
    """Return a small plan with this work, public samples, and several models where clients keep their own."""
    work: ClientWork = member.build()
    brought = {"work": member.part} if work.layout is None else {"algorithm": Part(averaging, work=member.part)}
    models = {"models": ["logistic", {"name": "mlp_2nn", "hidden": 16}]} if not work.sends_models else {}
    return small_plan(public={"name": "held_out", "fraction": 0.1}, policy={"size": 5}, **brought, **models)


def _sent(job: Job) -> Broadcast:
    return broadcast_of(job, job.first_D, first_server(job, job.first_D))


def _trained(job: Job, memory: State, attempt: int = 0) -> Trained:
    """Let one client do one task."""
    samples = job.federation.client_samples(CLIENT)
    return job.work.open(job).train(Task(CLIENT, attempt, attempt), _sent(job), memory, samples)


def _named(trained: Trained) -> State:
    return {"delta": trained.update.delta_D, "weight": trained.update.weight, **trained.update.aux}


@law(when="stackable")
def every_engine_gives_the_same_run(member: Member) -> None:
    """Run a small plan in every engine."""
    must_agree(_plan(member))


@law(unless="stackable")
def every_engine_gives_the_same_bits(member: Member) -> None:
    """Run a small plan in every engine; clients are trained one by one in all of them."""
    plan = _plan(member)
    must_be_close(final(plan), must_repeat(plan), "engines end elsewhere: let a worker remember nothing between tasks")


@law()
def the_order_of_clients_changes_nothing(member: Member) -> None:
    """Train a cohort forwards and backwards to the same bits."""
    must_ignore_order(build_job(_plan(member)))


@law()
def a_resumed_run_ends_the_same(member: Member) -> None:
    """Stop a run after two of four rounds, and go on from its directory to the same bits."""
    must_resume(_plan(member))


@law()
def an_update_has_the_layout_of_what_travels(member: Member) -> None:
    """Let a client train twice: each update fits what was sent, is finite and has a weight."""
    job = build_job(_plan(member))
    memory: State = {}
    for attempt in range(2):
        trained = _trained(job, memory, attempt)
        update, sent_D = trained.update, _sent(job).params_D
        must(
            (update.delta_D.shape, update.delta_D.dtype) == (sent_D.shape, sent_D.dtype),
            f"train sends {tuple(update.delta_D.shape)} values of {update.delta_D.dtype}, and {tuple(sent_D.shape)} of "
            f"{sent_D.dtype} were sent: return as many as the layout says",
        )
        must(bool(update.delta_D.isfinite().all()), "train sends NaN or infinity")
        must(bool(update.weight.isfinite()) and float(update.weight) > 0, f"an update weighs {float(update.weight)}")
        must_be_state(trained.state, "the memory that train returns")
        memory = trained.state


@law()
def training_depends_on_its_arguments_alone(member: Member) -> None:
    """Train the same task in two workers, with other states of global generators, from a memory that was saved."""
    job = build_job(_plan(member))
    memory = _trained(job, {}).state
    saved, model_D = written(memory), job.first_D.clone()
    with seeded(1):
        first = _trained(job, memory, 1)
    with seeded(2):
        second = _trained(job, saved, 1)
    why = "the same task ends in two ways: keep what a client remembers in its memory, and draw from derived seeds"
    must_be_equal(_named(second), _named(first), why)
    must_be_equal(second.state, first.state, why)
    must_be_equal(memory, saved, "train writes to the memory that it was given: return a new one")
    must_be_close(job.first_D, model_D, "train writes to what was sent: work on a copy")


@law()
def sums_of_an_evaluation_add_up(member: Member) -> None:
    """Evaluate some samples at once and in two parts: every named sum is that of the parts together."""
    job = build_job(_plan(member))
    memory, worker = _trained(job, {}).state, job.work.open(job)
    x, y = (tensor[:FEW] for tensor in job.federation.client_samples(CLIENT).load())
    num, cut = len(y), len(y) // 3
    client = CLIENT if job.work.personal else SERVER

    def sums(start: int, stop: int) -> State:
        part = Samples(client, stop - start, lambda: (x[start:stop], y[start:stop]))
        found = worker.evaluate(job.first_D, memory, part)
        must_be_state(found, "what evaluate returns")
        return found

    whole, one, other = sums(0, num), sums(0, cut), sums(cut, num)
    must("count" in whole and int(whole["count"]) == num, f"evaluate counts {whole.get('count')} of {num} samples")
    for name, value in whole.items():
        both = (one[name] + other[name]).double()
        must_be_close(
            both, value.double(), f"{name} of two parts is not that of both: return sums", atol=1e-4, rtol=1e-4
        )
    must_be_equal(sums(0, num), whole, "evaluating twice gives two results")
    must(bool(torch.stack([value.double().sum() for value in whole.values()]).isfinite().all()), "sums are not finite")
