"""What every attack must satisfy. Shapes: C clients, D parameters, B samples of a batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.core.aggregator import as_rows, rows_of
from atoll.core.attack import Attack, Knowledge
from atoll.core.messages import Broadcast, State, Task, Update
from atoll.engine.inline import inline
from atoll.testing.law import Member, law, must, must_be_equal
from atoll.testing.runs import must_agree, small_plan
from atoll.train.build import build_job
from atoll.train.seeded import seeded

CONTRACT = Attack
C, D, B, NUM_CLASSES = 10, 8, 12, 10
BAD_C = torch.tensor([client in (2, 5, 6) for client in range(C)])
ATTACKERS = (1, 4, 9)


def _knowledge(seed: int = 4) -> Knowledge:
    return Knowledge(
        torch.zeros(D), NUM_CLASSES, 1, np.random.default_rng(seed), lambda updates: updates.delta_D.mean(0)
    )


def _cohort(dtype: torch.dtype = torch.float32) -> Update:
    rng = torch.Generator().manual_seed(0)
    delta_CD = (torch.randn(C, D, generator=rng) + 0.3).to(dtype)
    weight_C = torch.randint(1, 20, (C,), generator=rng).to(dtype)
    return Update(delta_CD, weight_C, {"extra": torch.randn(C, 3, generator=rng).to(dtype)})


def _batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.rand(B, 1, 8, 8, generator=rng), torch.arange(B) % NUM_CLASSES


def _sent(attack: Attack, cohort: Update, bad_C: Tensor = BAD_C) -> Update:
    """Return what the server gets of a cohort: attackers change their own updates, then all of them together."""
    if attack.update is not None:
        rows = (
            cohort.delta_D.clone(),
            cohort.weight.clone(),
            {name: value.clone() for name, value in cohort.aux.items()},
        )
        for client in bad_C.nonzero()[:, 0].tolist():
            one = attack.update(cohort.rows(client), _knowledge(client))
            must(
                one.delta_D.shape == cohort.delta_D[0].shape and one.aux.keys() == cohort.aux.keys(),
                f"update returns {tuple(one.delta_D.shape)} parameters with extras {sorted(one.aux)}: keep the layout",
            )
            must(one.delta_D.dtype == cohort.delta_D.dtype, f"update returns {one.delta_D.dtype}: keep the type")
            rows[0][client], rows[1][client] = one.delta_D, one.weight
            for name, value in one.aux.items():
                rows[2][name][client] = value
        cohort = Update(*rows)
    return attack.collude(cohort, bad_C, _knowledge()) if attack.collude is not None else cohort


@law()
def it_fills_a_slot_and_says_what_it_knows(member: Member) -> None:
    """Look at the slots: an attack without one does nothing, and a trigger needs a class to bring about."""
    attack: Attack = member.build()
    filled = [slot for slot in (attack.data, attack.update, attack.collude) if slot is not None]
    must(bool(filled), "it does nothing: fill data, update or collude")
    must(bool(attack.knows), 'it does not say what an attacker must know: set knows, e.g. to "its own update"')
    must((attack.trigger is None) == (attack.target is None), "trigger and target go together: set both, or neither")


@law()
def only_the_attackers_change(member: Member) -> None:
    """Let three of ten clients attack, all and none: what honest clients sent arrives to the bit."""
    attack: Attack = member.build()
    for bad_C in (BAD_C, ~BAD_C, torch.ones_like(BAD_C), torch.zeros_like(BAD_C)):
        cohort = _cohort()
        sent = _sent(attack, cohort, bad_C)
        why = "updates of honest clients are changed: write to the rows of the mask alone"
        must_be_equal(as_rows(sent.rows(~bad_C)), as_rows(_cohort().rows(~bad_C)), why)
        must_be_equal(as_rows(cohort), as_rows(_cohort()), "what comes in is written to: work on a copy")
    if attack.data is None:
        changed, honest = as_rows(_sent(attack, _cohort()).rows(BAD_C)), as_rows(_cohort().rows(BAD_C))
        must(any(not torch.equal(changed[name], honest[name]) for name in honest), "attackers send what honest ones do")


@law()
def it_depends_on_its_arguments_alone(member: Member) -> None:
    """Attack twice with the same generator, and with other states of the generators of torch, NumPy and Python."""
    results: list[State] = []
    for seed in (1, 2):
        attack: Attack = member.build()
        with seeded(seed):
            results.append(as_rows(_sent(attack, _cohort())))
            if attack.data is not None:
                x, y = attack.data(*_batch(), _knowledge())
                results[-1] |= {"x": x, "y": y}
    must_be_equal(results[1], results[0], "the same attack ends in two ways: draw from known.rng, and remember nothing")


@law(when="finite")
def it_sends_numbers(member: Member) -> None:
    """Look for NaN and infinity in updates, weights and extras, in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        sent = as_rows(_sent(member.build(), _cohort(dtype)))
        finite = all(bool(value.isfinite().all()) for value in sent.values())
        must(finite, "it sends NaN or infinity: say finite=False if that is what it is for")
        must(sent["delta"].dtype == dtype, f"updates in {dtype} become {sent['delta'].dtype}: convert back")


@law(unless="finite")
def it_sends_what_is_no_number(member: Member) -> None:
    """Look for NaN or infinity in what each attacker sends."""
    sent_CD = _sent(member.build(), _cohort()).delta_D
    must(not bool(sent_CD[BAD_C].isfinite().all(1).any()), "it is said not to be finite, but sends numbers")


@law(when="data")
def poisoned_samples_fit_the_model(member: Member) -> None:
    """Poison a batch: shapes, types and the range of labels stay, and what comes in is not written to."""
    attack: Attack = member.build()
    assert attack.data is not None  # what `when` says
    (x, y), (old_x, old_y) = _batch(), _batch()
    new_x, new_y = attack.data(x, y, _knowledge())
    must(torch.equal(x, old_x) and torch.equal(y, old_y), "samples are written to: work on a copy")
    same = (new_x.shape, new_x.dtype, new_y.shape, new_y.dtype) == (x.shape, x.dtype, y.shape, y.dtype)
    must(same, f"samples come out as {new_x.shape} of {new_x.dtype} with {new_y.dtype} labels: keep shapes and types")
    must(bool(((new_y >= 0) & (new_y < NUM_CLASSES)).all()), f"labels must be 0 to {NUM_CLASSES - 1}, got {new_y}")
    must(not (torch.equal(new_x, x) and torch.equal(new_y, y)), "samples stay as they were")


@law(when="trigger")
def a_trigger_is_painted_on_a_copy(member: Member) -> None:
    """Paint the trigger: shape and type stay, something changes, and what comes in is not written to."""
    attack: Attack = member.build()
    assert attack.trigger is not None  # what `when` says
    x, old_x = _batch()[0], _batch()[0]
    painted = attack.trigger(x)
    must(torch.equal(x, old_x), "samples are written to: work on a copy")
    must((painted.shape, painted.dtype) == (x.shape, x.dtype), f"the trigger makes {painted.shape} of {x.shape}")
    must(not torch.equal(painted, x), "the trigger does not show")


@law()
def in_a_run_only_the_attackers_change(member: Member) -> None:
    """Train a cohort with and without the attack, one by one: every honest update is the same to the bit."""
    settings = {"aggregator": "median", "attack": member.part, "attackers": {"clients": list(ATTACKERS)}}
    rows: list[State] = []
    for plan in (small_plan(aggregator="median"), small_plan(**settings)):
        job = build_job(plan)
        engine = inline(job)
        tasks = [Task(client, 0, 0) for client in range(job.federation.num_clients)]
        done = engine.train(tasks, {0: Broadcast(job.first_D, {})}, {})
        clients = [report.client for report in done.reports if report.valid]
        order = torch.tensor([clients.index(client) for client in sorted(set(clients) - set(ATTACKERS))])
        rows.append(as_rows(rows_of(done.folded).rows(order)))
        engine.close()
    must_be_equal(rows[1], rows[0], "honest clients train something else under this attack")


@law()
def every_engine_gives_the_same_run(member: Member) -> None:
    """Run a small plan under this attack in every engine."""
    must_agree(small_plan(aggregator="median", attack=member.part, attackers={"clients": list(ATTACKERS)}))
