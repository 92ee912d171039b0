"""What the page shows of a federation's server, and what its operator may do there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.checks.rule import general
from atoll.checks.table import rules
from atoll.core.errors import AtollError, PlanError
from atoll.core.plan import Plan
from atoll.ledger.chain import OPERATOR
from atoll.network.protocol.agreement import check_names_no_code
from atoll.network.protocol.operator_endpoints import MAX_TOKEN_SECONDS
from atoll.network.server.access import AccessToken, Role
from atoll.network.server.operations import Operations
from atoll.network.server.runs import RUNNING
from atoll.ui.app import Action, Named, Page
from atoll.ui.run_files import Json
from atoll.ui.runs import RunsDirectory, Status


class PlanText(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan in TOML."""

    plan: str


class NamedPlan(PlanText, frozen=True, forbid_unknown_fields=True):
    """A run to begin."""

    run: str


class ClientIds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients by their ids."""

    clients: Annotated[list[str], Meta(min_length=1, max_length=10_000)]


class Approved(ClientIds, frozen=True, forbid_unknown_fields=True):
    """Clients to approve, and how many samples each has, where the operator knows that."""

    samples: Annotated[int, Meta(ge=1)] | None = None


class Hours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a token can be used."""

    hours: Annotated[float, Meta(gt=0, le=MAX_TOKEN_SECONDS / 3600)] = 24.0


class FederationPage:
    """A server and its runs, with the actions of its operator."""

    kind = "federation"

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.actions: Mapping[str, Action] = {
            "check_plan": Action(PlanText, self._check_plan),
            "add_run": Action(NamedPlan, self._add_run),
            "stop_run": Action(Named, self._stop_run),
            "approve": Action(Approved, self._approve),
            "revoke": Action(ClientIds, self._revoke),
            "enrol_token": Action(Hours, self._enrol_token),
        }

    def states(self) -> Mapping[str, Status]:
        """Return the states of all runs of the server."""
        states = {each["run"]: _status(each) for each in self._operations.run_states()}
        waiting = (run for run, state in states.items() if state.status == "waiting")
        return states | {run: states[run]._replace(plan=self._operations.plan_text(run)) for run in waiting}

    def clients(self) -> list[Json] | None:
        """Return all clients, and the runs that each works for."""
        states = self._operations.run_states()
        working = [(each["run"], set(each["working"] or [])) for each in states]
        return [
            {**each, "working": [run for run, numbers in working if each["number"] in numbers]}
            for each in self._operations.clients()
        ]

    def operator_ledger(self) -> list[str] | None:
        """Return the ledger of the operator's actions."""
        return self._operations.ledger_lines(OPERATOR)

    def give_access(self, name: str, role: Role, hours: float, by: str) -> tuple[str, AccessToken]:
        """Make a link to the page."""
        return self._operations.give_access(name, role, hours, by=by)

    def revoke_access(self, token_id: str, by: str) -> None:
        """Revoke a link to the page."""
        self._operations.revoke_access(token_id, by=by)

    def _check_plan(self, body: PlanText, by: str) -> Json:
        try:
            plan = _plan(body.plan)
            self._operations.check_plan(plan)
        except AtollError as error:
            return {"ok": False, "problem": str(error), "rules": [], "name": ""}
        applied = [each for each in rules(network=True) if each.applies_to(plan)]
        shown = [{"name": each.name, "reason": general(each.reason)} for each in applied]
        return {"ok": True, "problem": None, "rules": shown, "name": plan.name}

    def _add_run(self, body: NamedPlan, by: str) -> Json:
        self._operations.add_run(body.run, _plan(body.plan), by=by)
        return {"run": body.run}

    def _stop_run(self, body: Named, by: str) -> Json:
        self._operations.stop_run(body.id, by=by)
        return {}

    def _approve(self, body: Approved, by: str) -> Json:
        return {"numbers": self._operations.approve(body.clients, body.samples, by=by)}

    def _revoke(self, body: ClientIds, by: str) -> Json:
        for client in body.clients:
            self._operations.revoke(client, by=by)
        return {}

    def _enrol_token(self, body: Hours, by: str) -> Json:
        return {"token": self._operations.token(body.hours * 3600, by=by)}


def federation_page(operations: Operations, home: Path) -> Page:
    """Return the page of a server."""
    served = FederationPage(operations)
    return Page(served, RunsDirectory(home / "runs", served), operations.access, title=home.resolve().name)


def _plan(text: str) -> Plan:
    """Read a plan that came over HTTP; code that it names is refused before anything of it is built."""
    try:
        plain = tomllib.loads(text)
    except ValueError as error:
        raise PlanError(f"the plan is not valid TOML: {error}") from error
    check_names_no_code({key: value for key, value in plain.items() if key != "name"}, "the plan")
    return Plan.read(plain)


def _status(state: Mapping[str, Any]) -> Status:
    """Return a run's state as the page shows it; who is asked, and how many, stays hidden where privacy needs it."""
    over = state["status"] != RUNNING
    hidden = state["working"] is None
    live = {
        "phase": state["phase"],
        "text": None,
        "attempt": state["attempt"],
        "asked": None if hidden else state["asked"],
        "arrived": None if hidden else state["arrived"],
        "clients": state["working"],
        "seconds_waiting": state["seconds_waiting"],
    }
    waiting = not state["attempt"] and not state["round"] and state["phase"] == "ready"
    status = "ended" if over else "waiting" if waiting else "running"
    return Status(status, None if over else live)
