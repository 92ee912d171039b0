"""What every aggregator must satisfy. Shapes: C clients, D parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from atoll.core.aggregator import Aggregator
from atoll.core.errors import PlanError
from atoll.core.messages import Aggregate, State, Update
from atoll.core.parts import Part
from atoll.testing.law import (
    LawError,
    Member,
    crossed,
    law,
    must,
    must_be_close,
    must_be_equal,
    must_be_state,
    written,
)
from atoll.testing.runs import NUM_CLIENTS, must_repeat, small_plan

CONTRACT = Aggregator
D, TRIES = 7, 20
NUM = 11
"""The least number of clients in a made-up cohort; more where a rule needs more."""
SIZES = (1e3, 1e10, 1e20, 3e38)
REACH = 4.0
"""How far one update may move a bounded rule, where honest ones have a norm of about sqrt(7)."""


def _updates(seed: int, num: int, dtype: torch.dtype = torch.float32) -> Update:
    """Return the stacked updates of a made-up cohort, with an extra vector and an extra number."""
    rng = torch.Generator().manual_seed(seed)
    weight_C = torch.randint(1, 20, (num,), generator=rng).to(dtype)
    extra = {"extra": torch.randn(num, 3, generator=rng), "number": torch.randn(num, generator=rng)}
    delta_CD = torch.randn(num, D, generator=rng).to(dtype)
    return Update(delta_CD, weight_C, {name: value.to(dtype) for name, value in extra.items()})


def _cohorts(rule: Aggregator) -> Iterator[tuple[int, Update]]:
    """Draw cohorts of different sizes, each with its seed."""
    for seed in range(TRIES):
        yield seed, _updates(seed, max(NUM, rule.min_updates) + seed % 6)


def _own(like: Update) -> Update:
    """Return the server's own update, for rules that compare with it."""
    delta_D = torch.linspace(-1, 2, like.delta_D.shape[1], dtype=like.delta_D.dtype)
    return Update(delta_D, delta_D.new_tensor(1.0), {"extra": delta_D.new_ones(3), "number": delta_D.new_tensor(1.0)})


def _finished(rule: Aggregator, acc: State, like: Update, memory: State | None = None) -> tuple[Aggregate, State]:
    acc = rule.add_server_update(acc, _own(like)) if rule.add_server_update is not None else acc
    return rule.finish(acc, rule.init() if memory is None else memory)


def _aggregated(rule: Aggregator, cohort: Update) -> Aggregate:
    return _finished(rule, rule.add(rule.zero(), cohort), cohort)[0]


def _named(aggregate: Aggregate) -> State:
    return {"delta": aggregate.delta_D, **aggregate.aux}


def _must_be_about(found: Aggregate, expected: Aggregate, why: str) -> None:
    must((found.num_clients, found.aux.keys()) == (expected.num_clients, expected.aux.keys()), why)
    must(abs(found.weight - expected.weight) <= 1e-4 * expected.weight, f"{why}: weight")
    for name, value in _named(expected).items():
        must_be_close(_named(found)[name], value, f"{why}: {name}", atol=1e-5, rtol=1e-4)


@law()
def folding_in_parts_equals_folding_at_once(member: Member) -> None:
    """Fold a cohort in two parts, one by one, and with parts of nobody; the result is about the same."""
    rule: Aggregator = member.build()
    for seed, cohort in _cohorts(rule):
        whole = _aggregated(rule, cohort)
        num, cut = len(cohort.weight), 1 + seed % 3
        nobody = cohort.rows(torch.arange(0))
        one_by_one = nobody_first = rule.add(rule.zero(), nobody)
        for row in range(num):
            one_by_one = rule.add(one_by_one, cohort.rows(torch.tensor([row])))
        parts = [rule.add(rule.zero(), cohort.rows(rows)) for rows in (torch.arange(cut), torch.arange(cut, num))]
        merged = rule.merge(rule.merge(nobody_first, parts[0]), rule.merge(rule.zero(), parts[1]))
        why = (
            "the result depends on how the cohort was cut: let merge(add(zero, a), add(zero, b)) be add(zero, a and b)"
        )
        _must_be_about(_finished(rule, merged, cohort)[0], whole, why)
        _must_be_about(_finished(rule, one_by_one, cohort)[0], whole, why)
        must(whole.num_clients == num, f"num_clients is {whole.num_clients}, but {num} clients were added")
        total = float(cohort.weight.sum())
        must(abs(whole.weight - total) <= 1e-4 * total, f"weight is {whole.weight}, but clients weigh {total} together")


@law()
def extras_go_the_same_way(member: Member) -> None:
    """Make one of each extra, with the shape of a client's."""
    rule: Aggregator = member.build()
    cohort = _updates(1, max(NUM, rule.min_updates))
    shapes = {name: value.shape for name, value in _aggregated(rule, cohort).aux.items()}
    expected = {name: rows.shape[1:] for name, rows in cohort.aux.items()}
    must(
        shapes == expected,
        f"extras come out as {shapes} instead of {expected}: apply the rule to each, as stacked does",
    )


@law(unless="order_sensitive")
def a_permutation_changes_nothing(member: Member) -> None:
    """Hand in the same clients in another order."""
    rule: Aggregator = member.build()
    for seed, cohort in _cohorts(rule):
        order_C = torch.randperm(len(cohort.weight), generator=torch.Generator().manual_seed(seed))
        why = "the order of clients changes the result: say order_sensitive=True if it deals them out by their places"
        _must_be_about(_aggregated(rule, cohort.rows(order_C)), _aggregated(rule, cohort), why)


@law(unless="weighted")
def a_client_that_claims_more_samples_gains_nothing(member: Member) -> None:
    """Multiply one weight by a million; not a bit of the result changes."""
    rule: Aggregator = member.build()
    cohort = _updates(4, max(NUM, rule.min_updates))
    liar = cohort._replace(weight=cohort.weight * torch.tensor([1e6] + [1.0] * (len(cohort.weight) - 1)))
    why = "weights change the result: say weighted=True if clients are to count by them"
    must_be_equal(_named(_aggregated(rule, liar)), _named(_aggregated(rule, cohort)), why)


@law(when="weighted")
def weights_are_shares(member: Member) -> None:
    """Double all weights, which changes nothing; and put a client in twice, which is as good as double its weight."""
    rule: Aggregator = member.build()
    for _, cohort in _cohorts(rule):
        result = _aggregated(rule, cohort)
        doubled = _aggregated(rule, cohort._replace(weight=2 * cohort.weight))
        must_be_close(doubled.delta_D, result.delta_D, "weights have a unit: divide by their sum", atol=1e-5, rtol=1e-4)
        num = len(cohort.weight)
        twice = _aggregated(rule, cohort.rows(torch.tensor([0, *range(num)])))
        heavy = cohort._replace(weight=cohort.weight * torch.tensor([2.0] + [1.0] * (num - 1)))
        why = "a client of double weight is not worth two"
        must_be_close(_aggregated(rule, heavy).delta_D, twice.delta_D, why, atol=1e-5, rtol=1e-4)


@law()
def as_few_updates_as_it_says_are_enough_and_fewer_are_refused(member: Member) -> None:
    """Aggregate `min_updates` updates, and let one less be refused with what to do."""
    rule: Aggregator = member.build()
    least = rule.min_updates
    few = _aggregated(rule, _updates(2, least))
    must(bool(few.delta_D.isfinite().all()), f"{least} updates, which min_updates allows, give no finite result")
    if least == 1:
        return
    try:
        _aggregated(rule, _updates(2, least - 1))
    except PlanError as error:
        says = str(least) in rule.needs and rule.needs in str(error) and f"got {least - 1}" in str(error)
        must(says, f"the refusal does not say that {least} updates are needed and {least - 1} came: {error}")
    else:
        raise LawError(f"{least - 1} updates were aggregated, though min_updates is {least}: raise PlanError")


@law()
def clients_that_agree_are_followed(member: Member) -> None:
    """Let all clients, one or many, send the same: the result points there, and is that if the rule moves with it."""
    rule: Aggregator = member.build()
    for seed in range(TRIES):
        one = _updates(seed, 1)
        agreed_D = _own(one).delta_D if rule.add_server_update is not None else one.delta_D[0]
        for num in (rule.min_updates, rule.min_updates + NUM):
            same = one.rows(torch.zeros(num, dtype=torch.long))._replace(delta_D=agreed_D.expand(num, -1).clone())
            found_D = _aggregated(rule, same).delta_D
            expected_D = agreed_D.sign() if rule.unit_steps else agreed_D
            if not rule.translation_equivariant and not rule.unit_steps:
                expected_D = expected_D * (found_D.norm() / agreed_D.norm())
            why = f"{num} clients that send the same are not followed"
            must(bool(found_D.any()), why)
            must_be_close(found_D, expected_D, why, atol=1e-5, rtol=1e-4)


@law(when="translation_equivariant")
def moving_all_updates_moves_the_result_as_far(member: Member) -> None:
    """Add one vector to all updates."""
    rule: Aggregator = member.build()
    for seed, cohort in _cohorts(rule):
        by_D = (10.0 * seed - 100.0) * torch.linspace(-1, 1, D)
        moved_D = _aggregated(rule, cohort._replace(delta_D=cohort.delta_D + by_D)).delta_D
        why = "it is said to be translation_equivariant, but does not move as far as the updates"
        must_be_close(moved_D, _aggregated(rule, cohort).delta_D + by_D, why, atol=1e-3, rtol=1e-4)


@law(when="rotation_equivariant")
def turning_all_updates_turns_the_result(member: Member) -> None:
    """Multiply all updates by a random rotation; no vector may be remembered that would have to turn too."""
    rule: Aggregator = member.build()
    for seed, cohort in _cohorts(rule):
        turn_DD = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(seed))).Q
        turned_D = _aggregated(rule, cohort._replace(delta_D=cohort.delta_D @ turn_DD)).delta_D
        result, memory = _finished(rule, rule.add(rule.zero(), cohort), cohort)
        why = "it is said to be rotation_equivariant, but does not turn with the updates"
        must_be_close(turned_D, result.delta_D @ turn_DD, why, atol=1e-4, rtol=1e-4)
        must(all(value.dim() == 0 for value in memory.values()), f"{why}: it remembers {sorted(memory)}")


@law(when="bounded")
def one_update_however_large_moves_the_result_by_a_bounded_amount(member: Member) -> None:
    """Replace one update by one of length up to 3e38."""
    rule: Aggregator = member.build()
    before_D = _aggregated(rule, _updates(5, max(NUM, rule.min_updates))).delta_D
    for size in SIZES:
        cohort = _updates(5, max(NUM, rule.min_updates))
        cohort.delta_D[4] = size * torch.linspace(-1, 1, D)
        cohort.aux["extra"][4] = size
        after = _aggregated(rule, cohort)
        far = float((after.delta_D - before_D).norm())
        must(far < REACH, f"it is said to be bounded, but one update of length {size:g} moves it by {far:g}")
        must(bool(after.aux["extra"].isfinite().all()), f"one extra of length {size:g} makes the result not finite")


@law(when="unit_steps")
def the_size_of_updates_does_not_matter(member: Member) -> None:
    """Multiply all updates by 1000."""
    rule: Aggregator = member.build()
    cohort = _updates(6, max(NUM, rule.min_updates))
    longer_D = _aggregated(rule, cohort._replace(delta_D=1000 * cohort.delta_D)).delta_D
    must_be_close(longer_D, _aggregated(rule, cohort).delta_D, "it is said to take unit_steps, but goes farther")


@law()
def results_have_the_type_of_updates(member: Member) -> None:
    """Aggregate in float32 and in float64."""
    rule: Aggregator = member.build()
    for dtype in (torch.float32, torch.float64):
        types = {
            name: value.dtype
            for name, value in _named(_aggregated(rule, _updates(7, NUM + rule.min_updates, dtype))).items()
        }
        must(
            set(types.values()) == {dtype}, f"updates in {dtype} give {types}: convert back what is computed in another"
        )


@law()
def accumulators_cross_a_process(member: Member) -> None:
    """Send what was folded through a pipe, as workers do, and fold on."""
    rule: Aggregator = member.build()
    cohort = _updates(8, max(NUM, rule.min_updates))
    acc = rule.add(rule.zero(), cohort.rows(torch.arange(4)))
    must_be_state(acc, "an accumulator")
    rest = rule.add(rule.zero(), cohort.rows(torch.arange(4, len(cohort.weight))))
    here = _finished(rule, rule.merge(acc, rest), cohort)[0]
    there = _finished(rule, rule.merge(crossed(acc), crossed(rest)), cohort)[0]
    must_be_equal(_named(there), _named(here), "an accumulator is another one in another process")


@law()
def what_it_remembers_is_all_in_its_memory(member: Member) -> None:
    """Go on after two rounds from a checkpoint, with a rule that was built anew, to the same bits."""
    rule, memory = member.build(), member.build().init()
    cohorts = [_updates(seed, max(NUM, rule.min_updates)) for seed in (9, 10, 11)]
    for cohort in cohorts[:2]:
        memory = _finished(rule, rule.add(rule.zero(), cohort), cohort, memory)[1]
        must_be_state(memory, "the memory that finish returns")
    saved, again, last = written(memory), member.build(), cohorts[2]
    went_on, after = _finished(rule, rule.add(rule.zero(), last), last, memory)
    resumed, after_resumed = _finished(again, again.add(again.zero(), last), last, saved)
    why = "a resumed run differs: keep what it remembers in the memory that finish takes and returns"
    must_be_equal(_named(resumed), _named(went_on), why)
    must_be_equal(after_resumed, after, why)
    must_be_equal(memory, saved, "finish writes to the memory that it was given: return a new one")


@law()
def nothing_that_comes_in_is_written_to(member: Member) -> None:
    """Add and finish, twice each; updates and accumulators stay as they were."""
    rule: Aggregator = member.build()
    cohort = _updates(12, max(NUM, rule.min_updates))
    before = {
        name: value.clone() for name, value in {"delta": cohort.delta_D, "weight": cohort.weight, **cohort.aux}.items()
    }
    acc = rule.add(rule.zero(), cohort)
    first = _finished(rule, acc, cohort)[0]
    same = _named(_finished(rule, acc, cohort)[0])
    must_be_equal(same, _named(first), "finishing twice gives two results: do not write to the accumulator")
    after: dict[str, Tensor] = {"delta": cohort.delta_D, "weight": cohort.weight, **cohort.aux}
    must_be_equal(after, before, "updates were written to: work on a copy")


@law()
def any_number_of_workers_gives_the_same_run(member: Member) -> None:
    """Run a small plan with this rule."""
    num_clients = max(NUM_CLIENTS, member.build().min_updates)
    partition = {"name": "dirichlet", "num_clients": num_clients, "alpha": 0.5}
    must_repeat(small_plan(aggregator=member.part, **server_settings(member.part), partition=partition))


def server_settings(rule: Part) -> dict[str, Any]:
    """Return the settings of a plan that this rule asks for: a rate for unit steps, samples of the server's own."""
    built: Aggregator = rule.build("aggregators")
    rate = {"lr": 0.01} if built.unit_steps else {}
    return {"server": {**rate, **({"samples": 100} if built.add_server_update is not None else {})}}
