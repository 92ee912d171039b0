"""The server's side of a commit: from what clients did to the next version. Shapes: C clients, D parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atoll.commit.client_states import as_client_states
from atoll.commit.contribution import Before, shares_of, with_shares
from atoll.commit.detection import detection_row, judged
from atoll.commit.guard import Guard
from atoll.commit.run_state import RunState
from atoll.commit.secure_sum import Added
from atoll.commit.server_step import aggregated, server_task, stepped
from atoll.core.aggregator import as_rows, merge_rows, rows_of
from atoll.core.contribution import Contribution
from atoll.core.coordinator import Committed, Coordinator
from atoll.core.detection import Comparison, Detector, RoundView
from atoll.core.downlink import DecodedBroadcast
from atoll.core.errors import TrainingError
from atoll.core.messages import SERVER, STATISTICS, Aggregate, Payload, State, Task, Update, stack
from atoll.core.seeds import generator
from atoll.core.transform import Encoding
from atoll.core.wire import packed_size
from atoll.train.exchange import Report, Work, finite
from atoll.train.job import broadcast_of
from atoll.train.trainer import Trainer

STANDS_OUT = 1e3
"""Whose update alone moves the model so many times as far as the median client's may have made a version overflow."""
Fold = Callable[[Collection[int]], State]
"""Folds the updates of some clients of a round again."""


class Given(NamedTuple):
    """What a commit is made of beside the clients' work."""

    own: Update | None
    """The server's own update, where the rule compares with it."""
    gap_D: Tensor | None = None
    """What is added to the mean where the model is mixed with a client's."""
    num_clients: int | None = None
    """Of how many clients the rows are, where a row stands for several."""
    share: float = 1.0
    """How far statistics move towards the clients' own, where the model is mixed with a client's."""


class Versions:
    """Makes versions; the state is an argument and a result."""

    def __init__(self, coordinator: Coordinator, trainer: Trainer, guard: Guard | None) -> None:
        self.job, self.coordinator, self.trainer, self.guard = trainer.job, coordinator, trainer, guard

    def own_update(self, state: RunState) -> Update | None:
        """What the server's own samples make of the current version, where the rule compares with it."""
        if self.job.aggregator.add_server_update is None:
            return None
        machine = state.coordinator
        sent = state.sent.get(machine.version)  # what clients heard
        if sent is None:
            sent = broadcast_of(self.job, state.params_D, state.server)
        own = self.trainer.own_update(Task(SERVER, machine.version, machine.attempt), sent)
        if not bool(finite(stack([own]))[0]):
            raise TrainingError(
                f"round {machine.version + 1}: the server's own update holds NaN or Inf: lower local.lr, "
                "or take other server.samples"
            )
        return own

    def broadcast(self, state: RunState) -> tuple[RunState, DecodedBroadcast]:
        """Send the newest version: what clients hear of it."""
        job, machine = self.job, state.coordinator
        fresh = broadcast_of(job, state.params_D, state.server)
        encoding = None
        if job.downlink.chain.transforms:
            rng = generator(job.seed, "downlink", machine.attempt)
            encoding = Encoding(job.spec.without_buffers, machine.attempt, rng)
        found, memory = job.downlink.send(fresh, state.downlink, encoding)
        state = state._replace(
            sent={**state.sent, machine.version: found.broadcast},
            downlink=memory,
            news=state.news + found.num_bytes,
            last_news=found.num_bytes,
        )
        return state, found

    def count_down(self, state: RunState, clients: Sequence[int]) -> tuple[RunState, list[int]]:
        """Count the bytes that the newest version takes on the way to these clients; return those of each.

        A client that was sent earlier versions, where differences are sent, is sent what it missed, or the whole model.
        """
        costs = [state.last_news] * len(clients)
        if self.job.downlink.by_difference:
            whole, heard = packed_size(Payload(state.downlink["known"])), state.heard
            costs = [min(whole, state.news - heard[client]) if client in heard else whole for client in clients]
            state = state._replace(heard={**heard, **dict.fromkeys(clients, state.news)})
        return state._replace(bytes_down=state.bytes_down + sum(costs)), costs

    def late_rows(self, state: RunState, updates: Iterable[tuple[Task, Update]]) -> State:
        """Updates of several versions as rows, each counted by how late it is; nothing if there are none."""
        pairs = list(updates)
        if not pairs:
            return {}
        stacked, aux = stack([update for _, update in pairs]), {}
        counts = torch.tensor([self._counts(state, task) for task, _ in pairs])
        if num := self.job.spec.num_statistics:  # how far each client's are from those of today, late or not
            now_S = state.params_D[self.job.spec.num_trainable :][:num]
            sent_CS = torch.stack([state.sent[task.version].aux[STATISTICS][:num] for task, _ in pairs])
            aux = {STATISTICS: sent_CS + stacked.aux[STATISTICS] - now_S}
        return as_rows(stacked._replace(delta_D=stacked.delta_D * counts[:, None], aux=stacked.aux | aux))

    def settle(
        self,
        state: RunState,
        tasks: Sequence[Task],
        work: Work,
        own: Update | None,
        added: Added | None = None,
        fold: Fold | None = None,
    ) -> tuple[RunState, dict[str, Any], Committed, frozenset[int]]:
        """Make a version of what clients did if it is enough.

        Return the state, what the metrics say of the version, what the coordinator is told, and whose work is in it.

        `added` is what is known of a sum that was made in secret: `work` then has a row for each group. `fold` folds
        the updates of some of the clients again, where they are not kept one by one: whoever makes a version overflow
        is looked for, and left out.
        """
        policy, valid = self.coordinator.policy, valid_of(work)
        told: dict[str, Any] = {} if added is None else {"secagg": added.row}
        state = self._counted_up(state, tasks, work, added)
        if added is not None and added.folded is None:
            return state, {}, Committed(0, len(work.reports)), frozenset()
        if len(valid) >= policy.min_reports:
            gap_D, share = None, 1.0
            if policy.interpolates:
                [task] = tasks
                share = self._counts(state, task)
                gap_D = share * (state.sent[task.version].params_D - self.job.trainable(state.params_D))
            stands_for_many = added is not None and "weight" in work.folded
            given = Given(own, gap_D, len(valid) if stands_for_many else None, share)
            state, work, more = self.next(state, work, given, fold if added is None else None)
            valid, told = valid_of(work), told | more
        samples, loss = self._seen(valid) if added is None else (added.samples, added.loss)
        row: dict[str, Any] = {
            "clients": len(valid),
            "samples": samples,
            "train_loss": loss,
            "bytes_up": state.bytes_up,
            "bytes_down": state.bytes_down,
            "samples_trained": state.samples,
            **told,
        }
        if math.isnan(loss) and not self.job.work.always_has_loss:
            del row["train_loss"]
        wanted = self.coordinator.sampler.score
        scores = {report.client: float(getattr(report, wanted)) for report in valid} if wanted else {}
        scores = {client: score for client, score in scores.items() if not math.isnan(score)}
        committed = Committed(len(valid), len(work.reports) - len(valid), scores)
        return state, row, committed, frozenset(report.client for report in valid)

    def _seen(self, reports: Sequence[Report]) -> tuple[int, float]:
        """Return how many samples some clients have, and the mean by samples of the training losses that there are."""
        samples = sum(report.num_samples for report in reports)
        if not self.job.work.always_has_loss:
            reports = [report for report in reports if not math.isnan(report.loss)]
            if not reports:
                return samples, math.nan
        weighed = sum(report.num_samples for report in reports)
        return samples, sum(report.loss * report.num_samples for report in reports) / max(1, weighed)

    def _counted_up(self, state: RunState, tasks: Sequence[Task], work: Work, added: Added | None) -> RunState:
        """Add what a round took to what was taken before."""
        sent = [report.bytes_up for report in work.reports]
        passes = sum(self.job.num_passes(task, first=task.client not in state.clients) for task in tasks)
        state = state._replace(
            bytes_up=state.bytes_up + (sum(sent) if added is None else added.bytes_up),
            bytes_down=state.bytes_down + (0 if added is None else added.bytes_down),
            samples=state.samples + passes,
        )
        if self.guard is not None:  # how much one client sends must not decide whether another comes in time
            return state
        largest = max(sent, default=0) if added is None else added.upload
        return state._replace(upload=max(state.upload if state.coordinator.version else 0, largest))

    def _counts(self, state: RunState, task: Task) -> float:
        """How much a task's update counts that is late by some versions."""
        return self.coordinator.policy.staleness(state.coordinator.version - task.version)

    def next(
        self, state: RunState, work: Work, given: Given, fold: Fold | None = None
    ) -> tuple[RunState, Work, dict[str, Any]]:
        """The next version, whose work counts now, and what the metrics say of both.

        A version that is not sound is refused: it is made again without the clients whose updates made it so, who are
        quarantined. If nobody stands out, clients and server have diverged together, and it stays what it is.
        """
        after, done, told = self._next(state, work, given)
        if self._is_sound(state, after, work):
            return after, done, told
        culprits = self._culprits(state, work, fold)
        valid = [report.client for report in valid_of(work)]
        kept = [client for client in valid if client not in culprits]
        folded = self._folded(work, kept, fold) if culprits else None
        if folded is None:
            return after, done, told
        reports = [report._replace(valid=report.valid and report.client not in culprits) for report in work.reports]
        states = {client: value for client, value in work.states.items() if client not in culprits}
        rest = Work(folded, reports, states)
        left = state._replace(quarantined=tuple(sorted({*state.quarantined, *culprits})))
        named = {"overflowed": sorted(culprits)}
        if len(kept) < self.coordinator.policy.min_reports:
            return left, rest, named
        again, others, more = self._next(left, rest, given, charged=True)
        return (again, others, {**more, **named}) if self._is_sound(state, again, rest) else (after, done, told)

    def _is_sound(self, before: RunState, after: RunState, work: Work) -> bool:
        """Whether a version is finite, and so is its loss on the test set where an update was much longer than most.

        A model can be finite and of no use: its outputs overflow, and no client can train it.
        """
        if not _is_finite(before, after):
            return False
        norms = sorted(math.inf if math.isnan(report.norm) else report.norm for report in valid_of(work))
        if not norms or norms[-1] <= STANDS_OUT * norms[(len(norms) - 1) // 2]:
            return True
        if not (self.job.shares_model and self.job.federation.dataset.num_test):
            return True
        sums = self.trainer.evaluate(after.params_D, 0)
        return "loss" not in sums or math.isfinite(float(sums["loss"]))

    def _culprits(self, state: RunState, work: Work, fold: Fold | None) -> set[int]:
        """Whose update alone moves model and memory much farther than those of most others."""
        reach: dict[int, float] = {}
        for report in valid_of(work):
            alone = self._folded(work, [report.client], fold)
            if alone is None:
                return set()
            reach[report.client] = self._reach(state, alone)
        usual = sorted(reach.values())[(len(reach) - 1) // 2]
        return {client for client, far in reach.items() if far > STANDS_OUT * usual}

    def _folded(self, work: Work, clients: Collection[int], fold: Fold | None) -> State | None:
        """The updates of some of a round's clients; None if they cannot be told from the others."""
        released = self.guard is not None and self.guard.mechanism.release is not None
        if fold is None or released:
            return None
        if not self._has_rows:
            return fold(clients)
        keep_C = torch.tensor([report.client in clients for report in valid_of(work)])
        return as_rows(rows_of(work.folded).rows(keep_C))

    @property
    def _has_rows(self) -> bool:
        """Whether the updates of a round are kept one by one."""
        return self.coordinator.policy.overlaps_rounds or self.trainer.fold.merge is merge_rows

    def _reach(self, state: RunState, folded: State) -> float:
        """How far one client's update alone would move the model or what the server remembers, at most."""
        job = self.job
        if self._has_rows:
            row = rows_of(folded)
            delta_D, aux = row.delta_D[0], {name: rows[0] for name, rows in row.aux.items()}
            alone = Aggregate(delta_D, aux, float(row.weight), 1, row if job.sees_updates else None)
        else:
            alone, _ = job.aggregator.finish(folded, state.rule)
        version, num_clients = state.coordinator.version, self.coordinator.num_clients
        params_D, server = stepped(job, state.params_D, alone, state.server, version, num_clients)
        old = {name: value.nan_to_num() for name, value in state.server.items()}
        moves = [params_D - state.params_D, *(value - old.get(name, 0.0) for name, value in server.items())]
        sizes = [float(move.abs().max()) for move in moves if move.numel()]
        return max((size if math.isfinite(size) else math.inf for size in sizes), default=0.0)

    def _next(
        self, state: RunState, work: Work, given: Given, *, charged: bool = False
    ) -> tuple[RunState, Work, dict[str, Any]]:
        """The next version, finite or not; `charged` says that a private attempt has been charged already."""
        job, told = self.job, dict[str, Any]()
        if charged:
            aggregate, rule = aggregated(job, work.folded, state.rule, given.own)
        else:
            aggregate, rule = self._aggregated(state, work.folded, given.own)
        if job.detector is not None:
            before = work
            state, work, told["detection"] = self._detect(state, job.detector, work, aggregate.delta_D)
            if len(work.folded["weight"]) < len(before.folded["weight"]):  # once more, without those who were found out
                aggregate, rule = aggregated(job, work.folded, state.rule, given.own)
        if job.contribution is not None:
            state, told["contribution"] = self._contribute(state, job.contribution, work, given.own)
        if given.gap_D is not None:
            aggregate = aggregate._replace(delta_D=aggregate.delta_D + given.gap_D)
        if given.num_clients is not None:
            aggregate = aggregate._replace(num_clients=given.num_clients)
        version, num_clients = state.coordinator.version, self.coordinator.num_clients
        params_D, server = stepped(job, state.params_D, aggregate, state.server, version, num_clients, given.share)
        if job.algorithm.measure is not None and job.measures_steps:
            task = server_task(job, version, num_clients)
            told["algorithm"] = dict(job.algorithm.measure(state.params_D, params_D, aggregate, task))
        clients = as_client_states(state.clients).updated(work.states) if work.states else state.clients
        return state._replace(params_D=params_D, server=server, rule=rule, clients=clients), work, told

    def _aggregated(self, state: RunState, folded: State, own: Update | None) -> tuple[Aggregate, State]:
        if self.guard is None:
            return aggregated(self.job, folded, state.rule, own)
        return self.guard.aggregated(folded, state.rule, state.coordinator.attempt, own)

    def _detect(
        self, state: RunState, detector: Detector, work: Work, aggregate_D: Tensor
    ) -> tuple[RunState, Work, dict[str, Any]]:
        """Look at a round's updates, and leave out those of clients that are quarantined now.

        As many clients stay as the rule needs, in this round and among those who can still be asked.
        """
        rows, valid, params_D = rows_of(work.folded), valid_of(work), state.params_D
        least = self.coordinator.policy.min_reports
        most = min(len(valid), self.coordinator.num_clients - len(state.quarantined)) - least

        def loss(delta_D: Tensor | None) -> float:
            if delta_D is None:
                return self.trainer.own_scores(params_D)[1]
            moved_M = params_D.clone()
            self.job.trainable(moved_M).add_(delta_D)
            return self.trainer.own_scores(moved_M)[1]

        view = RoundView(rows.delta_D, Comparison.of(rows.delta_D, aggregate_D), loss)
        clients = [report.client for report in valid]
        found = judged(detector, clients, view, state.trust, state.quarantined, most)
        keep_C = torch.tensor([client not in found.quarantined for client in clients])
        reports = [r._replace(valid=r.valid and r.client not in found.quarantined) for r in work.reports]
        state = state._replace(trust=found.trust, quarantined=found.quarantined)
        told = detection_row(found, self.job.attackers)
        return state, Work(as_rows(rows.rows(keep_C)), reports, work.states), told

    def _contribute(
        self, state: RunState, how: Contribution, work: Work, own: Update | None
    ) -> tuple[RunState, dict[str, Any]]:
        """Share out what a round gains, whose commit starts from this state, to those whose updates count."""
        version, num_clients = state.coordinator.version, self.coordinator.num_clients
        before = Before(state.params_D, state.server, state.rule, own, version, num_clients)
        clients = [report.client for report in valid_of(work)]
        found = shares_of(self.job, how, before, clients, rows_of(work.folded), self.trainer.own_scores)
        told = {str(client): share for client, share in found.clients.items()}
        state = state._replace(contribution=with_shares(state.contribution, found))
        return state, {"clients": told, "utility": how.utility, "evaluations": found.evaluations}


def _is_finite(before: RunState, after: RunState) -> bool:
    """Whether the model and what the server remembers are finite; what was not before need not be."""

    def whole(value: Tensor) -> bool:
        return bool(value.sum().isfinite()) or bool(value.isfinite().all())  # a finite sum is enough

    def kept(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bool:
        return all(whole(value) or not (name not in old or whole(old[name])) for name, value in new.items())

    return whole(after.params_D) and kept(before.server, after.server) and kept(before.rule, after.rule)


def valid_of(work: Work) -> list[Report]:
    """Whose work counts."""
    return [report for report in work.reports if report.valid]
