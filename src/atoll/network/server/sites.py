"""Evaluation at the sites: which versions clients measure, how their answers are checked, and what comes of them.

A client answers with sums of its samples, never with samples. Each answer is checked alone: its names, shapes and
counts. A plausible lie cannot be told from the truth. Of clients that add their sums in secret (`secret_evaluation.py`)
only the total is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from atoll.commit.finish import without_nan
from atoll.core.client_work import Samples
from atoll.core.errors import AtollError
from atoll.core.messages import SERVER, Payload, State
from atoll.core.metric import Figures
from atoll.core.plan import Evaluation
from atoll.core.wire import packed_size, unpack
from atoll.data.targets import TOKENS
from atoll.network.protocol.messages import EvaluationOrder, Ref, SiteEvaluation
from atoll.network.server.parts import BadUpdate, ServerParts
from atoll.network.server.secure_session import Mailbox
from atoll.train.metrics import Measures, spread

if TYPE_CHECKING:
    from atoll.network.server.runs import Run

MAX_OPEN = 2
"""Versions that are measured at a time: a client may measure one while the others have made the next."""
LAST_SECONDS = 600.0
"""Seconds for which a run waits for evaluations of its last version, unless its policy has a deadline."""
MAX_SUM = 1e30
"""Maximum sum: larger ones would overflow when they are added up."""
SLACK = 1 << 16
"""Bytes by which a packed answer may exceed its sums: names and shapes."""

MAX_TOTAL = 1 << 30
"""Maximum bytes of a total that this server has packed itself."""
LAYOUT_SAMPLES = 2
"""Samples of the server's data on which it tries which sums are due of clients."""


class SiteAnswer(msgspec.Struct, frozen=True):
    """A client's answer as it is stored."""

    told: SiteEvaluation
    rejected: str = ""
    """Why it does not count; "" if it does, or if the client told nothing."""


class SecretSum(msgspec.Struct, frozen=True):
    """The secret sum of a version as it is stored: from before its first message on, as it is never begun again."""

    clients: tuple[int, ...]
    """Clients that were ready for it."""
    survivors: tuple[int, ...] = ()
    """Clients whose sums are in it."""
    sums: bytes = b""
    """The packed total; empty if there is none."""
    reason: str = "it was cut off while it was being added, and no site adds one version twice: measure a later one"
    """Why there is no total; "" if there is one."""
    rejected: dict[int, str] = {}
    """Clients whose messages were not taken, and why."""
    refused: dict[int, str] = {}
    """Clients that left the session, and why."""


class Sites:
    """The evaluations of a run at its clients; memory changes by transactions only."""

    def __init__(self, ask: Evaluation, mailbox: Mailbox, result: dict[str, Any] | None = None) -> None:
        self._every = ask.clients_every
        self.mailbox = mailbox
        """Messages of the secret sum that is being added."""
        self.adding: tuple[int, int] | None = None
        """Version of that sum, and the maximum bytes of an answer."""
        self.leavers: dict[int, str] = {}
        """Clients that left it, and why."""
        self.secret_sums: dict[int, SecretSum] = {}
        """Secret sums of open versions that were begun."""
        self.answers: dict[int, dict[int, SiteAnswer]] = {}
        """Open versions, oldest first, and who has answered."""
        self.opened: dict[int, float] = {}
        """The monotonic time at which each open version was opened."""
        self.newest = -1
        """The newest version that was opened."""
        self.layout: State = {}
        """Names and shapes of the sums that are due."""
        self.result = result
        """What the newest version that was closed came to, as in `sites.json`."""

    def is_due(self, version: int, *, last: bool) -> bool:
        """Return whether a version is to be measured, and is not yet: every so many versions, and the last."""
        wanted = self._every > 0 and (last or (version > 0 and version % self._every == 0))
        return wanted and version > self.newest

    def open(self, version: int, now: float, answers: Mapping[int, SiteAnswer]) -> None:
        """Open a version, with the answers that are there already."""
        self.answers[version], self.opened[version], self.newest = dict(answers), now, version

    def add(self, version: int, client: int, answer: SiteAnswer) -> None:
        """Add a client's answer, if its version is open."""
        if version in self.answers:
            self.answers[version].setdefault(client, answer)

    def close(self, version: int, result: dict[str, Any]) -> None:
        """Close a version."""
        for known in (self.answers, self.opened, self.secret_sums):
            known.pop(version, None)
        if self.result is None or self.result["round"] <= version:
            self.result = result

    def next_to_close(self, expected: set[int], now: float, seconds: float) -> int | None:
        """Return an open version that all expected clients have answered, or that is too old; None if there is none.

        One whose secret sum is due waits for it.
        """
        for version, answers in self.answers.items():
            whole = version in self.secret_sums or not self.ready(version)
            if whole and (expected <= answers.keys() or self._is_late(version, now, seconds, self.newest)):
                return version
        return None

    def next_to_add(self, expected: set[int], now: float, seconds: float, next_open: int) -> int | None:
        """Return an open version whose secret sum is due: all expected clients are ready, or it is too old.

        `next_open` is the version that is opened next, or `newest`: a version that is too old then is so now.
        """
        for version, answers in self.answers.items():
            late = self._is_late(version, now, seconds, next_open)
            if version not in self.secret_sums and self.ready(version) and (late or expected <= answers.keys()):
                return version
        return None

    def ready(self, version: int) -> tuple[int, ...]:
        """Return the clients that are ready to add what they measured of an open version in secret."""
        answers = self.answers.get(version, {})
        return tuple(sorted(client for client, answer in answers.items() if answer.told.in_secret))

    def _is_late(self, version: int, now: float, seconds: float, newest: int) -> bool:
        return now > self.opened[version] + seconds or version < newest - self._every * (MAX_OPEN - 1)

    def leave(self, version: int, client: int, reason: str) -> None:
        """Note that a client leaves the secret sum that is being added, which goes on without it."""
        if self.adding is not None and self.adding[0] == version and self.mail(client) is not None:
            self.leavers[client] = reason
            self.mailbox.answer(client, b"")

    def mail(self, client: int) -> Ref | None:
        """Return the message of a secret sum that waits for a client's answer."""
        return None if self.adding is None else self.mailbox.waiting(client)


def evaluation_orders(run: Run, client: int) -> list[EvaluationOrder]:
    """Return the versions that a client is to measure and has not, or whose secret sum waits for its answer."""
    if not run.may_ask(client) or client in run.state.quarantined:
        return []
    mail, adding = run.sites.mail(client), run.sites.adding
    secure = {adding[0]: mail} if mail is not None and adding is not None else {}
    return [
        EvaluationOrder(
            run=run.name,
            version=version,
            model=run.models[version].ref,
            encoded=run.models[version].encoded,
            news=tuple(news for news in run.news if news.version <= version),
            counted=run.counted.get(client),
            secure=secure.get(version),
        )
        for version, answers in run.sites.answers.items()
        if version in run.models and (client not in answers or version in secure)
    ]


def layout_of_sums(parts: ServerParts, params_D: Tensor) -> State:
    """Return sums that have the names and shapes of those that are due of clients: of a few of the server's samples."""
    x, y = parts.job.federation.first(LAYOUT_SAMPLES)
    whole = parts.engine.trainer.worker.evaluate(params_D, {}, Samples(SERVER, len(y), lambda: (x, y)))
    return parts.job.measures.condense(whole)


def read_sums(told: SiteEvaluation, layout: State, measures: Measures, most: int) -> State:
    """Return the sums that a client told of at most `most` samples; BadUpdate if they cannot be sums of samples."""
    due = {name: value for name, value in layout.items() if told.epsilon is None or "/" in name}
    try:
        payload = unpack(told.sums, max_bytes=packed_size(Payload(torch.zeros(0), (layout,))) + SLACK)
    except AtollError as error:
        raise BadUpdate(f"the evaluation cannot be read: {error}") from error
    sums = payload.sides[0] if len(payload.sides) == 1 else {}
    complete = sums.keys() == due.keys() if told.epsilon is None else bool(sums) and sums.keys() <= due.keys()
    if not complete:
        raise BadUpdate(
            f"the evaluation has the sums {', '.join(sorted(sums))[:200]}: {', '.join(sorted(due))} are due"
        )
    for name, value in sums.items():
        if value.shape != due[name].shape or value.dtype != torch.float64:
            raise BadUpdate(
                f"{name} of the evaluation is {tuple(value.shape)} of {value.dtype}: {tuple(due[name].shape)} of "
                "torch.float64 is due"
            )
        if not bool((value.abs() <= MAX_SUM).all()):
            raise BadUpdate(f"{name} of the evaluation is not finite: check the client's data")
    if told.epsilon is not None:
        if not 0 < told.epsilon < math.inf:
            raise BadUpdate(f"the evaluation's noise has an epsilon of {told.epsilon}: it is a number above 0")
        return sums
    if not 1 <= told.num_samples <= most:
        raise BadUpdate(f"an evaluation on {told.num_samples:,} samples: this client stated {most:,}")
    if "count" in sums and float(sums["count"]) != told.num_samples:
        raise BadUpdate(f"the evaluation counts {float(sums['count']):g} samples, but says {told.num_samples:,}")
    check_plausible(sums, measures, told.num_samples)
    return sums


def check_plausible(sums: State, measures: Measures, num_samples: int) -> None:
    """Refuse sums that no samples can have; of sequences it is not known how many positions count."""
    tokens = measures.problem.kind == TOKENS
    wrong = measures.why_implausible(sums, 0 if tokens else num_samples, math.inf if tokens else num_samples)
    if wrong:
        raise BadUpdate(f"no {num_samples:,} samples have such sums of {wrong}: let the client use the plan's metrics")


def summary(
    version: int,
    answers: Mapping[int, SiteAnswer],
    names: Mapping[int, str],
    layout: State,
    measures: Measures,
    added: SecretSum | None = None,
) -> dict[str, Any]:
    """Return what the answers about a version come to: figures by site, pooled, of the worst site, and their spread.

    Sites in a secret sum have figures together; worst site and spread are those of the other sites.
    """
    rows: list[dict[str, Any]] = []
    told: list[State] = []
    in_secret = _outcomes(answers, added)
    for client, answer in sorted(answers.items()):
        if client in in_secret and not in_secret[client]:
            continue
        row: dict[str, Any] = {"client": client, "name": names.get(client, str(client)), **in_secret.get(client, {})}
        rows.append(row)
        if client in in_secret:
            continue
        if answer.rejected or answer.told.reason:
            row |= {"rejected": answer.rejected} if answer.rejected else {"reason": answer.told.reason}
            continue
        sums = read_sums(answer.told, layout, measures, answer.told.num_samples)
        noisy = answer.told.epsilon is not None
        figures = measures.finish_sums(_not_negative(sums) if noisy else sums)
        row |= {"epsilon": answer.told.epsilon} if noisy else {"samples": answer.told.num_samples}
        row["figures"] = figures
        told.append(sums)
    result: dict[str, Any] = {"round": version, "sites": rows}
    if added is not None:
        result["secret"], total = _secret_group(added, names, measures)
        told += [] if total is None else [total]
    if told:
        shared = [name for name in told[0] if all(name in each for each in told)]
        pooled = {name: torch.stack([each[name] for each in told]).sum(0) for name in shared}
        result["pooled"] = measures.finish_sums(_not_negative(pooled) if "count" not in pooled else pooled)
    plain: dict[str, Any] = without_nan(result | _compared(rows, better=measures.larger_is_better))
    return plain


def _compared(rows: Sequence[dict[str, Any]], *, better: bool) -> dict[str, Any]:
    """Return the worst of the sites that have figures, and their spread; nothing if none has."""
    counted = [row for row in rows if "figures" in row]
    if not counted:
        return {}
    main_C = np.array([_main(row["figures"]) for row in counted])
    loss_C = np.array([row["figures"]["loss"] for row in counted if "loss" in row["figures"]])  # not told with noise
    known = [place for place in range(len(counted)) if not math.isnan(main_C[place])]
    found: dict[str, Any] = {}
    if known:
        worst = counted[(min if better else max)(known, key=lambda place: main_C[place])]
        found["worst"] = {"client": worst["client"], "name": worst["name"], "figure": _main(worst["figures"])}
    found["spread"] = spread(main_C, loss_C if len(loss_C) else np.zeros(1), larger_is_better=better)
    if not len(loss_C):
        del found["spread"]["loss"]
    return found


def _outcomes(answers: Mapping[int, SiteAnswer], added: SecretSum | None) -> dict[int, dict[str, str]]:
    """Return what became of each client that was ready for a secret sum; nothing is to be said of its survivors."""
    outcomes: dict[int, dict[str, str]] = {}
    for client in (client for client, answer in answers.items() if answer.told.in_secret):
        if added is None or client not in added.clients:
            outcomes[client] = {"reason": "it was ready after the secret sum was begun"}
        elif client in added.refused:
            outcomes[client] = {"reason": added.refused[client]}
        elif client in added.rejected:
            outcomes[client] = {"rejected": added.rejected[client]}
        elif added.sums and client not in added.survivors:
            outcomes[client] = {"reason": "it fell silent while the secret sum was being added"}
        else:
            outcomes[client] = {}
    return outcomes


def _secret_group(
    added: SecretSum, names: Mapping[int, str], measures: Measures
) -> tuple[dict[str, Any], State | None]:
    """Return what is known of the sites in a secret sum together, and their sums; None if there is no sum."""
    clients = added.survivors or added.clients
    group: dict[str, Any] = {"clients": list(clients), "names": [names.get(each, str(each)) for each in clients]}
    if not added.sums:
        return group | {"reason": added.reason}, None
    total = unpack(added.sums, max_bytes=MAX_TOTAL).sides[0]
    return group | {"samples": int(total["count"]), "figures": measures.finish_sums(total)}, total


def _main(figures: Figures) -> float:
    """Return the main figure."""
    return next((value for name, value in figures.items() if name != "loss"), math.nan)


def _not_negative(sums: State) -> State:
    """Return sums with noise whose counts are at least 0, so that figures can be made of them."""
    return {name: value.clamp(min=0) for name, value in sums.items()}
