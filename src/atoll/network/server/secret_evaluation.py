"""Evaluations that sites add in secret: one session of secure aggregation for a version, and the check of its total.

A site says that it has measured a version, and no more. The sum that the sites then add is all that the server learns.
A session is recorded before its first message: if the process ends, the sum is lost, and is never begun again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from atoll.core.messages import SERVER, State
from atoll.network.protocol.secret_sums import (
    MIN_SITES,
    from_total,
    invite_of,
    max_answer_bytes,
    pack_sums,
    session_of,
    task_of,
)
from atoll.network.server.monitoring import log
from atoll.network.server.parts import BadUpdate
from atoll.network.server.presence import Offences
from atoll.network.server.runs import Run
from atoll.network.server.secure_session import SecureContext, hold_session
from atoll.network.server.sites import MAX_SUM, SecretSum, check_plausible
from atoll.network.server.writer import Transaction
from atoll.secagg.scheme import Session


def why_too_few(num_sites: int) -> str:
    """Return why so many sites are no secret sum; "" if they are enough to try."""
    if num_sites >= MIN_SITES:
        return ""
    number = "1 site was ready, and a sum of one is no sum" if num_sites == 1 else f"{num_sites} sites were ready"
    return f"{number}: {MIN_SITES} sites are needed to add evaluations in secret"


def record_sum(transaction: Transaction, run: Run, version: int, added: SecretSum, offences: Offences) -> None:
    """Record that the secret sum of a version was begun, or what came of it; bad messages are offences."""
    text = msgspec.json.encode(added).decode()
    transaction.tables.set_evaluation(run.name, version, SERVER, text)
    transaction.after_commit(lambda: run.sites.secret_sums.update({version: added}))
    offences.count_offences(transaction, added.rejected)


def add_in_secret(
    run: Run, version: int, clients: tuple[int, ...], context: SecureContext, most: Mapping[int, int]
) -> SecretSum:
    """Let clients add what they measured of a version, each of at most `most` samples; return what came of it."""
    sites, layout = run.sites, run.sites.layout
    session = session_of(run.name, version, run.models[version].ref.name, layout, clients)
    rejected: dict[int, str] = {}
    sites.leavers = {}
    sites.adding = (version, max_answer_bytes(session))
    try:
        outcome = hold_session(session, invite_of, context, rejected)
    finally:
        sites.adding = None
        run.uploads.drop_tasks([task_of(client, version) for client in clients])
    for client in sites.leavers.keys() & rejected.keys():  # it answered with nothing
        del rejected[client]
    added = SecretSum(clients, outcome.survivors, rejected=rejected, refused=dict(sites.leavers))
    if outcome.total_L is None:
        return msgspec.structs.replace(added, reason=outcome.why)
    total = from_total(outcome.total_L, len(outcome.survivors), layout, session.encoding)
    try:
        packed = pack_sums(_checked(total, run, session, outcome.survivors, most))
    except BadUpdate as error:
        return msgspec.structs.replace(added, survivors=(), reason=str(error))
    return msgspec.structs.replace(added, sums=packed, reason="")


def _checked(
    total: State | None, run: Run, session: Session, survivors: tuple[int, ...], most: Mapping[int, int]
) -> State:
    """Return a total that samples of these sites can have; BadUpdate if none can. Which site lied is not known."""
    unknown = "which site added something else is not known"
    if total is None:
        raise BadUpdate(f"the secret sum does not count its {len(survivors)} sites: {unknown}")
    for name, value in total.items():
        if not bool((value.abs() <= MAX_SUM).all()):
            raise BadUpdate(f"{name} of the secret sum is too large: {unknown}")
    count, largest = float(total["count"]), sum(most[client] for client in survivors)
    if not (len(survivors) <= count <= largest and math.floor(count) == count):
        raise BadUpdate(f"a secret sum of {count:g} samples: its {len(survivors)} sites stated {largest:,}; {unknown}")
    try:
        check_plausible(total, run.parts.job.measures, int(count))
    except BadUpdate as error:
        raise BadUpdate(f"{error}; of the sites in the secret sum, {unknown}") from error
    return total


def log_sum(run: Run, version: int, added: SecretSum, names: Mapping[int, str]) -> None:
    """Log a secret sum, and who was rejected in it."""
    for client, why in added.rejected.items():
        log("rejected", run=run.name, client=names.get(client, str(client)), why=why)
    num = f"{len(added.survivors)} of {len(added.clients)}"
    log("added", run=run.name, round=version, clients=num, why=added.reason or None)
