"""Which clients are approved, which of them are online and may be asked for work, and which have offended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from atoll.core.eligibility import ANYBODY
from atoll.core.messages import Task
from atoll.core.plan import Plan
from atoll.network.server.auth import Authenticator
from atoll.network.server.monitoring import log
from atoll.network.server.runs import Run, WaitingRun, built_runs
from atoll.network.server.tables import NOBODY, ClientRow, Stage, Status, TaskRow
from atoll.network.server.writer import Transaction

ONLINE_SECONDS = 90.0
"""Seconds after its last request until a client counts as offline."""
CLAIM_FACTOR = 2
"""A number of samples to which the operator has not agreed counts up to this multiple of the median."""
MAX_OFFENCES = 3
"""Offences after which a client is excluded until the operator approves it again."""
REFUSED = "refused: "
"""Prefix of the reason of a task that its client refused."""


class LastPoll(NamedTuple):
    """The last poll of a client."""

    time: float
    """When it was last heard, by the monotonic clock."""
    attributes: dict[str, bool | float]
    evaluates: bool = False
    """Whether the client measures versions on its own samples."""
    in_secret: bool = False
    """Whether it adds what it measures to secret sums only."""


class Presence:
    """The approved clients by number, and when they were last heard."""

    def __init__(self, known: list[ClientRow], now: Callable[[], float]) -> None:
        self._now, self._started = now, now()
        self.clients: dict[int, ClientRow] = {}
        self.last_polls: dict[int, LastPoll] = {}
        self.agreed_samples: dict[int, int] = {}
        """Number of samples to which the operator agreed, where it did."""
        self.set_clients(known, {})

    def set_clients(self, known: list[ClientRow], agreed: Mapping[str, int]) -> None:
        """Set the approved clients, and the samples to which the operator agreed, by client id."""
        self.clients = {c.number: c for c in known if c.status is Status.APPROVED and c.number is not None}
        self.agreed_samples = {number: agreed[c.id] for number, c in self.clients.items() if c.id in agreed}

    def note_poll(
        self, number: int, attributes: dict[str, bool | float], *, evaluates: bool = False, in_secret: bool = False
    ) -> None:
        """Note a poll of a client."""
        self.last_polls[number] = LastPoll(self._now(), attributes, evaluates or in_secret, in_secret)

    def note_request(self, number: int | None) -> None:
        """Note another request of a client that has polled, such as for a chunk of a large model."""
        seen = self.last_polls.get(number) if number is not None else None
        if number is not None and seen is not None:
            self.last_polls[number] = seen._replace(time=self._now())

    def seconds_since(self, number: int | None) -> float | None:
        """Return the seconds since a client was heard; None if it never was."""
        seen = self.last_polls.get(number) if number is not None else None
        return None if seen is None else self._now() - seen.time

    @property
    def is_new(self) -> bool:
        """Return whether the server began so lately that clients may not have polled yet."""
        return self._now() < self._started + ONLINE_SECONDS

    def online(self) -> set[int]:
        """Return the clients that are online."""
        lately = self._now() - ONLINE_SECONDS
        return {number for number, seen in list(self.last_polls.items()) if seen.time > lately}

    def evaluators(self, run: Run) -> set[int]:
        """Return the clients whose evaluations a run waits for; a new server waits a while for all to come back."""
        fresh, online = self.is_new, self.online()

        def answers(client: int) -> bool:
            seen = self.last_polls.get(client)
            return fresh if seen is None else seen.evaluates and client in online

        may = [client for client in self.clients if client not in run.state.quarantined and run.may_ask(client)]
        return {client for client in may if answers(client)}

    def secret_evaluators(self, run: Run) -> set[int]:
        """Return those of them that may add their sums in secret; in a run with secure aggregation all may."""
        seen = {client: self.last_polls.get(client) for client in self.evaluators(run)}
        alike = run.parts.job.secure is not None
        return {client for client, poll in seen.items() if alike or poll is None or poll.in_secret}

    def stated_samples(self, number: int) -> int:
        """Return the maximum number of samples of a client: what it stated, and the operator agreed to."""
        stated = self.clients[number].num_samples
        return min(stated, self.agreed_samples.get(number, stated))

    def names(self) -> dict[int, str]:
        """Return the names of clients."""
        return {number: client.name for number, client in self.clients.items()}

    def keys(self) -> dict[int, bytes]:
        """Return the public keys of clients."""
        return {number: client.key for number, client in self.clients.items()}

    def sizes(self, plan: Plan, known: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the number of samples of each client: the sizes that a run of the plan knows, then of new clients.

        New clients get what `credited_samples` allows; but in a private run what they state, as its accounting must
        not underestimate a client. There only the weight is bounded.
        """
        stated = {number: max(1, client.num_samples) for number, client in self.clients.items()}
        if plan.split is not None and plan.split.parties:  # the first clients, whose rows are the same
            return (*known, *(stated.get(number, 1) for number in range(len(known), len(plan.split.parties))))
        num = max([len(known) - 1, *self.clients]) + 1
        credited = stated if plan.privacy is not None else credited_samples(stated, self.agreed_samples)
        return (*known, *(credited.get(number, 1) for number in range(len(known), num)))

    def capped_samples(self, known: Sequence[int] = ()) -> dict[int, tuple[int, int]]:
        """Return what clients state whose sizes are not known yet, and what counts, where that is less."""
        new = {number: each.num_samples for number, each in self.clients.items() if number >= len(known)}
        counts = credited_samples(
            {number: max(1, each.num_samples) for number, each in self.clients.items()}, self.agreed_samples
        )
        return {number: (said, counts[number]) for number, said in new.items() if counts[number] < said}

    def max_samples(self, run: Run, number: int) -> int:
        """Return the number of samples by which a client's updates weigh at most in a run."""
        return credited_samples(dict(enumerate(run.sizes)), self.agreed_samples)[number]

    def may_be_asked(self, run: Run) -> Callable[[int], bool]:
        """Return which clients may be asked: with a deadline, or if all are needed, those that are online, else all."""
        rule, split = run.plan.eligibility, run.plan.split
        needs_all = split is not None and bool(split.parties)
        asks_online = needs_all or run.parts.coordinator.policy.deadline is not None
        shut_out, online = set(run.state.quarantined), self.online()

        def may(client: int) -> bool:
            if client in shut_out or client not in self.clients or not run.may_ask(client):
                return False
            if asks_online and client not in online:
                return False
            seen = self.last_polls.get(client)
            return rule == ANYBODY or (seen is not None and rule.why_not(seen.attributes) is None)

        return may


def party_names(plan: Plan) -> tuple[str, ...]:
    """Return the parties that hold columns, by the numbers of their clients; none where clients have whole samples."""
    return () if plan.split is None else tuple(party.name for party in plan.split.parties or ())


def concerned(plan: Plan, clients: Mapping[int, ClientRow]) -> dict[int, ClientRow]:
    """Return the approved clients that a plan could ask: those that are its parties, if it has parties."""
    names = party_names(plan)
    return {number: client for number, client in clients.items() if not names or number < len(names)}


def why_rows_differ(plan: Plan, clients: Mapping[int, ClientRow]) -> str:
    """Return why parties cannot have the same rows, by how many they state; "" if they can."""
    names = party_names(plan)
    rows = {names[number]: client.num_samples for number, client in sorted(clients.items())} if names else {}
    if len(set(rows.values()) - {0}) < 2:  # 0 before a client has said anything
        return ""
    stated = ", ".join(f"{name} {num}" for name, num in rows.items())
    return f"the parties have different numbers of rows ({stated}): let them join by atoll align, and join again"


def why_waiting(run: Run, presence: Presence, least: int) -> str:
    """Return why a round that needs so many clients cannot begin, if that does not pass by itself; "" otherwise."""
    names = party_names(run.plan)
    if names:
        absent = [f"{name} {why}" for number, name in enumerate(names) if (why := _why_absent(run, presence, number))]
        return f"every step needs all parties, and {'; '.join(absent)}" if absent else ""
    out = {client for client, known in run.refusals.items() if known.whole_run} | set(run.state.quarantined)
    left = len(presence.clients.keys() - out)
    if left < least <= len(presence.clients):
        return f"{left} clients take part, a round needs {least}: approve others, or those who refused once more"
    return ""


def _why_absent(run: Run, presence: Presence, number: int) -> str:
    """Return why a party cannot be asked; "" if it can, or a new server has not heard of it yet."""
    if number not in presence.clients:
        return f"(client {number}) is not approved: approve it once more, or stop the run"
    if not run.may_ask(number):
        whole = run.refusals[number].whole_run
        return "refuses this run: approve it once more" if whole else "has refused a task, and is asked again later"
    return "is not online: let it join" if number not in presence.online() and not presence.is_new else ""


def credited_samples(stated: Mapping[int, int], agreed: Mapping[int, int]) -> dict[int, int]:
    """Return the number of samples with which each client is credited.

    What the operator agreed to is an upper bound. A number that nobody confirmed counts up to CLAIM_FACTOR times the
    median, so that a lie gains little: the median is that of an honest client while most are honest, and of two
    clients it is the smaller one.

    >>> credited_samples({0: 600, 1: 500, 2: 10_000_000}, {})
    {0: 600, 1: 500, 2: 1200}
    >>> credited_samples({0: 600, 1: 500, 2: 10_000}, {2: 9_000})
    {0: 600, 1: 500, 2: 9000}
    """
    known = {number: min(size, agreed.get(number, size)) for number, size in stated.items()}
    ordered = sorted(known.values())
    median = ordered[max(0, min(len(ordered) // 2, len(ordered) - 2))] if ordered else 1
    return {number: size if number in agreed else min(size, CLAIM_FACTOR * median) for number, size in known.items()}


class Offences:
    """Counts offences and excludes clients; `fail` records that tasks failed, `wake` ends polls."""

    def __init__(
        self,
        runs: Mapping[str, WaitingRun | Run],
        presence: Presence,
        authenticator: Authenticator,
        fail: Callable[[Transaction, Run, list[Task], str], None],
        wake: Callable[[set[int]], None],
    ) -> None:
        self._runs, self._presence, self._authenticator, self._fail, self._wake = (
            runs,
            presence,
            authenticator,
            fail,
            wake,
        )

    def record_refusal(self, transaction: Transaction, run: Run, task: Task, why: str, *, whole_run: bool) -> None:
        """Record that a client refuses a task: it is not asked for a while, or never again in this run."""
        row = transaction.tables.count_refusal(run.name, task.client, whole_run=whole_run)
        transaction.after_commit(lambda: run.set_refusals([row]))
        self._fail(transaction, run, [task], REFUSED + why)

    def clear_refusals(self, transaction: Transaction, run: Run, counted: Iterable[int]) -> None:
        """Clear the refusals of clients whose updates count now; their offences remain."""
        back = [client for client in counted if client in run.refusals and not run.refusals[client].whole_run]
        for client in back:
            transaction.tables.clear_refusals(client, run.name)
        transaction.after_commit(lambda: run.clear_refusals(back))

    def count_offences(self, transaction: Transaction, numbers: Iterable[int]) -> None:
        """Count an offence of each client; exclude those with too many."""
        wanted = set(numbers)
        for client in [each for each in transaction.tables.clients() if each.number in wanted] if wanted else []:
            if transaction.tables.count_offence(client.id) >= MAX_OFFENCES and client.status is Status.APPROVED:
                log("rejected", client=client.name, why="quarantined after repeated offences")
                self.exclude(transaction, client, Status.QUARANTINED)

    def count_refusal_offences(self, transaction: Transaction, run: Run, rows: Sequence[TaskRow]) -> None:
        """Count an offence of clients that refused a task which others of the same attempt did.

        Where no client did it, such as on a model that has diverged, it was not the clients' fault. Where rounds
        overlap, an attempt may be of one client, whose refusal is no offence.
        """
        done = any(row.stage in (Stage.ARRIVED, Stage.COUNTED) for row in rows)
        if done and not run.parts.coordinator.policy.overlaps_rounds:
            leaves = {row.client for row in transaction.tables.refusals(run.name) if row.whole_run}
            refused = [row.task.client for row in rows if str(row.report.get("why", "")).startswith(REFUSED)]
            self.count_offences(transaction, [client for client in refused if client not in leaves])

    def exclude(self, transaction: Transaction, client: ClientRow, status: Status) -> None:
        """Exclude a client; its tasks are not waited for."""
        epoch = transaction.tables.revoke(client.id, status)
        for run in built_runs(self._runs):
            task = transaction.machine(run)[0].in_flight.get(client.number) if client.number is not None else None
            if task is not None:
                self._fail(transaction, run, [task], f"client {status}")
        transaction.after_commit(lambda: self._authenticator.end_session(client.id, epoch))
        self.refresh_clients(transaction)
        numbers = set() if client.number is None else {client.number}
        transaction.after_commit(lambda: self._wake(numbers))  # a waiting poll is answered now

    def approve(self, transaction: Transaction, clients: Sequence[ClientRow], samples: int | None) -> list[int]:
        """Approve clients, and set the samples to which the operator agreed; their refusals are cleared."""
        numbers = [transaction.tables.approve(client.id) for client in clients]
        if samples is not None:
            for client in clients:
                transaction.tables.set_agreed_samples(client.id, samples)
        for run in built_runs(self._runs):
            transaction.after_commit(partial(run.clear_refusals, numbers))
        self.refresh_clients(transaction)
        return numbers

    def refresh_clients(self, transaction: Transaction) -> None:
        """Reload clients from the store, since approvals have changed."""
        known, agreed = transaction.tables.clients(), transaction.tables.agreed_samples()
        transaction.after_commit(lambda: self._presence.set_clients(known, agreed))
        transaction.after_commit(self._authenticator.clear_cache)


def number_of(client: ClientRow) -> int:
    """Return the number of an approved client."""
    assert client.number is not None
    return client.number


def number_or_nobody(client: ClientRow) -> int:
    """Return the number of a client; that of nobody before it is approved."""
    return NOBODY if client.number is None else client.number
