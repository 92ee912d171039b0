"""Who a run waits for, and why, in words for the log. Of parties that hold columns every round needs all."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.core.plan import Plan
from atoll.network.server.presence import Presence
from atoll.network.server.runs import Run
from atoll.network.server.tables import ClientRow


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
