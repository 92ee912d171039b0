from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.coordinator import (
    Abandon,
    Arrived,
    Begin,
    Commit,
    Committed,
    Coordinator,
    CoordinatorState,
    Deadline,
    Failed,
    Finish,
    Halt,
    Phase,
    Policy,
    Reason,
    Reject,
    Send,
)
from atoll.core.errors import AtollError, PlanError
from atoll.core.messages import Task
from atoll.core.parts import Part
from atoll.rounds.cohort import cohort
from atoll.rounds.samplers.poisson import poisson
from atoll.rounds.samplers.uniform import uniform


def machine(policy: Policy, *, num_clients: int = 20, rounds: int = 3) -> Coordinator:
    return Coordinator(policy=policy, sampler=uniform(), num_clients=num_clients, rounds=rounds, seed=1)


def test_a_round_asks_collects_and_commits() -> None:
    coordinator = machine(cohort(size=4))
    state, [sent] = coordinator.step(CoordinatorState(), Begin())
    assert isinstance(sent, Send)
    assert len({task.client for task in sent.tasks}) == 4
    state, commands = coordinator.step(state, Arrived(sent.tasks[:3]))
    assert commands == []
    state, [commit] = coordinator.step(state, Arrived(sent.tasks[3:]))
    assert commit == Commit(sent.tasks)
    state, commands = coordinator.step(state, Committed(4))
    assert (state.version, state.attempt, state.phase, commands) == (1, 1, Phase.READY, [])


def test_over_selection_takes_the_first_and_rejects_the_late() -> None:
    coordinator = machine(cohort(size=4, over_selection=1.5))
    state, [sent] = coordinator.step(CoordinatorState(), Begin())
    assert isinstance(sent, Send)
    assert len(sent.tasks) == 6
    state, commands = coordinator.step(state, Arrived(sent.tasks))
    assert commands == [*(Reject(task, Reason.LATE) for task in sent.tasks[4:]), Commit(sent.tasks[:4])]
    assert state.rejected == 2


def test_all_clients_count_if_the_sampler_draws_their_number() -> None:
    coordinator = Coordinator(policy=cohort(size=4), sampler=poisson(), num_clients=20, rounds=30, seed=1)
    state, sizes = CoordinatorState(), []
    while state.phase is not Phase.FINISHED:
        state, commands = coordinator.step(state, Begin())
        sent = commands[0]
        if isinstance(sent, Send):
            state, [commit] = coordinator.step(state, Arrived(sent.tasks))
            assert commit == Commit(sent.tasks)
            state, _ = coordinator.step(state, Committed(len(sent.tasks)))
            sizes.append(len(sent.tasks))
    assert max(sizes) > 4 > min(sizes)
    assert state.rejected == 0


def test_too_few_reports_abandon_the_attempt_and_ask_others() -> None:
    coordinator = machine(cohort(size=4, min_reports=3))
    state, [sent] = coordinator.step(CoordinatorState(), Begin())
    assert isinstance(sent, Send)
    state, _ = coordinator.step(state, Arrived(sent.tasks[:2]))
    state, commands = coordinator.step(state, Failed(sent.tasks[2:]))
    assert commands == [Abandon(0, Reason.TOO_FEW)]
    assert (state.version, state.attempt, state.abandoned, state.failed) == (0, 1, 1, 2)
    state, [again] = coordinator.step(state, Begin())
    assert isinstance(again, Send)
    assert {task.attempt for task in again.tasks} == {1}


def test_a_deadline_commits_the_updates_that_arrived() -> None:
    coordinator = machine(cohort(size=4, min_reports=2))
    state, [sent] = coordinator.step(CoordinatorState(), Begin())
    assert isinstance(sent, Send)
    state, _ = coordinator.step(state, Arrived(sent.tasks[:2]))
    same, commands = coordinator.step(state, Deadline(7))  # of another attempt
    assert (same, commands) == (state, [])
    state, commands = coordinator.step(state, Deadline(0))
    assert commands == [Commit(sent.tasks[:2])]
    state, commands = coordinator.step(state, Arrived(sent.tasks[2:3]))
    assert commands == [Reject(sent.tasks[2], Reason.LATE)]


def test_invalid_updates_can_undo_a_commit() -> None:
    coordinator = machine(cohort(size=4, min_reports=3))
    state, [sent] = coordinator.step(CoordinatorState(), Begin())
    assert isinstance(sent, Send)
    state, _ = coordinator.step(state, Arrived(sent.tasks))
    state, commands = coordinator.step(state, Committed(2, 2))
    assert commands == [Abandon(0, Reason.TOO_FEW)]
    assert (state.version, state.rejected) == (0, 2)


def test_asynchronous_policies_keep_tasks_in_flight() -> None:
    policy = Policy(lambda state, n: 6 - len(state.in_flight), lambda n: 2, overlaps_rounds=True)
    coordinator = machine(policy)
    state, [sent] = coordinator.step(CoordinatorState(), Begin())
    assert isinstance(sent, Send)
    state, [commit] = coordinator.step(state, Arrived(sent.tasks[:2]))
    assert commit == Commit(sent.tasks[:2])
    state, _ = coordinator.step(state, Arrived(sent.tasks[2:5]))  # while committing
    state, _ = coordinator.step(state, Committed(2))
    state, commands = coordinator.step(state, Begin())
    more = commands[0]
    assert isinstance(more, Send)
    assert len(more.tasks) == 5
    assert {task.version for task in more.tasks} == {1}
    assert commands[1] == Commit(sent.tasks[2:4])  # a buffer is committed at its size, and the rest waits
    assert state.arrived == sent.tasks[4:5]
    busy = {task.client for task in sent.tasks[2:]}
    assert not busy & {task.client for task in more.tasks}


def test_events_out_of_place_raise_and_change_nothing() -> None:
    coordinator = machine(cohort(size=2))
    state = CoordinatorState()
    with pytest.raises(AtollError, match="Committed is not allowed while ready"):
        coordinator.step(state, Committed(2))
    state, _ = coordinator.step(state, Begin())
    with pytest.raises(AtollError, match="Begin is not allowed while collecting"):
        coordinator.step(state, Begin())


def test_it_gives_up_after_too_many_abandoned_attempts() -> None:
    coordinator = machine(cohort(size=2)._replace(max_abandoned=3))
    state = CoordinatorState()
    for _ in range(3):
        state, [sent] = coordinator.step(state, Begin())
        assert isinstance(sent, Send)
        state, _ = coordinator.step(state, Failed(sent.tasks))
    state, commands = coordinator.step(state, Begin())
    assert commands == [Finish(Reason.GAVE_UP)]


def test_it_gives_up_when_every_replacement_is_lost() -> None:
    policy = Policy(lambda state, n: 2 - len(state.in_flight), lambda n: 2, overlaps_rounds=True, max_lost=5)
    coordinator, state = machine(policy), CoordinatorState()
    losses = 0
    while state.phase is not Phase.FINISHED:
        state, commands = coordinator.step(state, Begin())
        if losses == 3 and not state.arrived:  # one that arrives is progress: the count begins again
            state, _ = coordinator.step(state, Arrived((next(iter(state.in_flight.values())),)))
            assert state.lost_in_a_row == 0
        if state.in_flight and state.phase is Phase.COLLECTING:
            state, _ = coordinator.step(state, Failed((next(iter(state.in_flight.values())),)))
            losses += 1
    assert commands == [Finish(Reason.ALL_LOST)]
    assert (losses, state.failed, state.lost_in_a_row) == (8, 8, 5)


def test_a_state_from_before_losses_were_counted_can_be_read() -> None:
    plain = CoordinatorState(failed=3).to_plain()
    del plain["lost_in_a_row"]
    assert CoordinatorState.from_plain(plain) == CoordinatorState(failed=3)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_sequence_of_events_breaks_the_invariants(data: st.DataObject) -> None:
    """For any arrivals, failures and duplicates, no task counts twice, and only commits raise the version."""
    size = data.draw(st.integers(1, 6))
    policy = cohort(size=size, over_selection=data.draw(st.sampled_from([1.0, 1.5])), min_reports=1)
    coordinator = machine(policy, rounds=4)
    state, known, counted, commits = CoordinatorState(), [Task(99, 9, 99)], set(), 0
    for _ in range(60):
        if state.phase is Phase.FINISHED:
            break
        if state.phase is Phase.READY:
            event = Begin()
        elif state.phase is Phase.COMMITTING and data.draw(st.booleans()):
            event = Committed(len(state.committing))
            commits += 1
        else:
            tasks = tuple(data.draw(st.lists(st.sampled_from(known), max_size=4)))
            event = data.draw(st.sampled_from([Arrived(tasks), Failed(tasks), Deadline(state.attempt)]))
        before = state.version
        state, commands = coordinator.step(state, event)
        assert state.version - before == isinstance(event, Committed)
        for command in commands:
            if isinstance(command, Send):
                known.extend(command.tasks)
            if isinstance(command, Commit):
                assert 1 <= len(command.tasks) <= size
                assert not counted & set(command.tasks)
                counted |= set(command.tasks)
    assert state.version == commits


def test_halt_ends_it() -> None:
    state, commands = machine(cohort(size=2)).step(CoordinatorState(), Halt(Reason.TARGET))
    assert (state.phase, commands) == (Phase.FINISHED, [Finish(Reason.TARGET)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"size": 0}, "at least 1"),
        ({"size": 2, "fraction": 0.5}, "leave one out"),
        ({"fraction": 1.5}, r"in \[0, 1\]"),
        ({"fraction": -0.1}, r"in \[0, 1\]"),
        ({"over_selection": 0.5}, r"over_selection must be in \[1, "),
        ({"min_reports": 0}, "at least 1"),
    ],
)
def test_impossible_cohorts_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Part("cohort", **options).build("rounds")


def test_fraction_zero_means_one_client_and_size_is_bounded() -> None:
    assert cohort(fraction=0.0).goal(50) == 1
    assert cohort(fraction=0.1).goal(50) == 5
    assert cohort().goal(50) == 50
    with pytest.raises(PlanError, match="the federation has 3 clients"):
        cohort(size=4).goal(3)
