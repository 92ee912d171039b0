"""The plan that clients are sent, and what a client insists on. It is data: names and numbers, never code.

What only the server runs may be the operator's own code, which clients never build. What clients run is in the
catalogue, or is the client's own under the name that the plan uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from atoll.checks.table import check
from atoll.checks.views import Networked
from atoll.core.algorithm import Algorithm, add_delta, nothing
from atoll.core.errors import PlanError
from atoll.core.parts import Part, members
from atoll.core.plan import Plan
from atoll.core.privacy import Mechanism
from atoll.core.secagg import MIN_SURVIVORS
from atoll.core.section import Section
from atoll.network.protocol.messages import RunInfo
from atoll.secagg.scheme import Scheme

NOT_SENT = ("name", "data", "partition", "devices", "attack", "attackers", "stop", "engine")
"""What is the server's own business, or a simulation's."""
SERVER_ONLY = ("aggregator", "detection", "contribution", "server")
"""What clients are told, and never build: it may be the operator's own code."""
ACCOUNTED = {"policy": "rounds", "sampler": "rounds.samplers"}
"""What only the server runs too, but by which clients of a private run reckon what they spend."""
CHAINS = {"uplink": "transforms", "downlink": "transforms"}
Functions = Mapping[str, Callable[..., Any]]
NO_FUNCTIONS: Functions = MappingProxyType({})


class OwnParts(NamedTuple):
    """What a client knows beside the catalogue, by the names that plans use, with or without the module's."""

    models: Functions = NO_FUNCTIONS
    algorithms: Functions = NO_FUNCTIONS
    losses: Functions = NO_FUNCTIONS
    works: Functions = NO_FUNCTIONS

    def loss(self, name: str) -> Callable[..., Any] | None:
        """The client's own loss of this name; None for one of the catalogue."""
        return _own(self.losses, name, "loss", "losses", "train.losses")


@dataclass(frozen=True, kw_only=True)
class Floors(Section, key="floors"):
    """What a client insists on, whatever the server's plan says; unset asks nothing."""

    min_cohort: int = 1
    """A version must be made of at least so many clients."""
    secagg: bool = False
    """Whether updates must be added in secret, by a scheme that a server which lies cannot open."""
    min_survivors: int = MIN_SURVIVORS
    """No sum of fewer updates may be opened, where they are added in secret."""
    max_epsilon: float | None = None
    """Runs must be private, and this client's samples spend no more than this in all of them, on all servers."""
    algorithms: tuple[str, ...] = ()
    """The only algorithms that it runs; all if empty."""
    max_model_bytes: int = 1 << 32
    max_local_steps: int | None = None
    """Most steps that one task may take."""
    hours: tuple[int, ...] = ()
    """Hours of the day, local time, in which it works: the first and the one before which it stops; all if empty."""

    def check(self) -> None:
        """Refuse hours that are none, and a sum that is one update."""
        if self.min_survivors < 2:
            raise PlanError(
                f"floors.min_survivors must be at least 2, got {self.min_survivors}: a sum of one is no sum"
            )
        if self.hours and (len(self.hours) != 2 or not all(0 <= hour <= 24 for hour in self.hours)):
            raise PlanError(f"floors.hours are two hours of the day, e.g. [20, 6], got {list(self.hours)}")


def plan_for_clients(plan: Plan) -> dict[str, Any]:
    """What clients are told of a plan; a plan that cannot be run between organisations is refused."""
    check(Networked(plan, plan.sampler.build("rounds.samplers")))
    plain = {key: value for key, value in plan.to_dict().items() if key not in NOT_SENT}
    plain["evaluation"] = {"holdout": plan.evaluation.holdout}
    if ":" in plan.algorithm.name and _clients_do_fedavg(plan.algorithm.build("algorithms")):
        plain["algorithm"] = Part("fedavg").to_dict()  # the rest of it is the server's
    _must_be_plain(plain)
    return plain


def read_plan(plain: dict[str, Any], own: OwnParts) -> Plan:
    """The part of a server's plan that a client runs, in the catalogue or its own: nothing else is imported."""
    _must_be_plain(plain)
    unknown = [key for key in (*NOT_SENT, "models", "public") if key in plain]
    if unknown:
        raise PlanError(f"the server's plan says {unknown[0]}, which is not for clients: ask the operator")
    left_out = {*SERVER_ONLY, *(field for field in ACCOUNTED if field in plain and _names_code(plain[field]))}
    plain = {key: value for key, value in plain.items() if key not in left_out}
    check_names_no_code(
        {key: plain[key] for key in plain if key not in ("model", "algorithm", "loss", "work")}, "the plan"
    )
    families = {"model": ("models", "logistic"), "algorithm": ("algorithms", "fedavg"), "work": ("train.works", "sgd")}
    for field, (family, default) in families.items():
        part = Part.of(plain.get(field, default), where=field)
        function = _own(getattr(own, f"{field}s"), part.name, field, f"{field}s", family)
        if function is not None:
            plain[field] = Part(function, **part.options)
            plain[field].name = part.name
    plan = Plan.read(plain)
    check(Networked(plan, plan.sampler.build("rounds.samplers")))
    own.loss(plan.loss)
    return plan


def _own(known: Functions, name: str, field: str, argument: str, family: str) -> Callable[..., Any] | None:
    """The client's own part of this name; None for one of the catalogue. Whatever is neither is refused."""
    short = name.rpartition(":")[2]
    function = known.get(name) or known.get(short)
    if function is None and name not in members(family):
        raise PlanError(
            f"the plan's {field} '{name}' is neither in the catalogue nor among this client's own, and no code is sent "
            f"over a network: let the app supply it, e.g. {argument}={{'{short}': ...}}"
        )
    return function


def _clients_do_fedavg(algorithm: Algorithm) -> bool:
    """Whether an algorithm leaves all slots of clients as they are, so that it is the server's alone."""
    rest = algorithm._replace(init_server=nothing, server_step=add_delta, needs_updates=False, server_lr=1.0)
    return rest == Algorithm()


def why_not(
    floors: Floors,
    info: RunInfo,
    plan: Plan,
    mechanism: Mechanism | None,
    num_steps: int,
    *,
    keys_known: bool = False,
) -> str | None:
    """Why a client refuses a run, in words; None if it agrees. `num_steps` is what one task would take.

    `keys_known` says that the owner gave the keys of the others, by which a server that lies is found out.
    """
    if info.cohort < floors.min_cohort:
        return f"a version is made of {info.cohort} clients, this client asks for at least {floors.min_cohort}"
    reason = why_not_secret(floors, plan, keys_known=keys_known)
    if reason is not None:
        return reason
    if floors.max_epsilon is not None:
        if mechanism is None or info.epsilon is None:
            return f"the run is not private, this client asks for an epsilon of at most {floors.max_epsilon:g}"
        if mechanism.test_noise:
            return "the run's noise comes from its seed, which protects nobody"
        if mechanism.steps is not None and mechanism.steps.share:
            return "the run's clip follows this client's own gradient, whose length nothing protects"
        if info.epsilon > floors.max_epsilon:
            return f"the run may spend epsilon {info.epsilon:g}, this client allows {floors.max_epsilon:g}"
    name = plan.algorithm.name
    if floors.algorithms and not {name, name.rpartition(":")[2]} & set(floors.algorithms):
        return f"the algorithm is {plan.algorithm.name}, this client runs {', '.join(floors.algorithms)} only"
    if info.num_bytes > floors.max_model_bytes:
        return f"the model has {info.num_bytes:,} bytes, this client allows {floors.max_model_bytes:,}"
    if floors.max_local_steps is not None and num_steps > floors.max_local_steps:
        return f"a task takes {num_steps} steps, this client allows {floors.max_local_steps}"
    return None


def why_not_secret(floors: Floors, plan: Plan, *, keys_known: bool) -> str | None:
    """Say why the plan's way to add updates is weaker than a client asks for; None if it is not."""
    if plan.secagg is None:
        asked = "updates would be seen one by one, this client asks for secure aggregation"
        return asked if floors.secagg else None
    scheme: Scheme = plan.secagg.scheme.build("secagg.schemes")
    if (floors.secagg or keys_known) and scheme.mode != "active":
        asker = "floors.secagg" if floors.secagg else "--peers"
        return (
            f"the plan adds updates against a server that is {scheme.mode}, which one that lies can open; by {asker} "
            'this client asks for active: set secagg.scheme = {name = "pairwise", server = "active"}'
        )
    if plan.secagg.required_survivors < floors.min_survivors:
        return (
            f"a sum of {plan.secagg.required_survivors} updates would be opened, this client asks for at least "
            f"{floors.min_survivors}: raise secagg.min_survivors, or lower floors.min_survivors"
        )
    return None


def at_work(hours: tuple[int, ...], hour: int) -> bool:
    """Whether a client with these hours works at this hour of the day.

    >>> at_work((20, 6), 23), at_work((20, 6), 12), at_work((), 12)
    (True, False, True)
    """
    if not hours:
        return True
    first, last = hours
    return first <= hour < last if first <= last else hour >= first or hour < last


def _must_be_plain(plain: dict[str, Any]) -> None:
    """Refuse code where clients would have to run it; their own model, algorithm and loss are looked for later."""
    for field, default in (("model", "logistic"), ("algorithm", "fedavg"), ("work", "sgd")):
        check_names_no_code(Part.of(plain.get(field, default), where=field).options, field)
    if "privacy" in plain:
        _check_part(Part.of(plain["privacy"], where="privacy"), "privacy", "privacy.mechanisms")
    for field, family in ACCOUNTED.items():
        if field in plain and ("privacy" in plain or not _names_code(plain[field])):
            _check_part(Part.of(plain[field], where=field), field, family)
    for field, family in CHAINS.items():
        for part in plain.get(field, []):
            _check_part(Part.of(part, where=field), field, family)
    local = plain.get("local", {})
    _check_part(Part.of(local.get("optimizer", "sgd")), "local.optimizer", "train.optimizers")
    _check_part(Part.of(local.get("schedule", "constant")), "local.schedule", "train.schedules")
    if "secagg" in plain:
        _check_part(Part.of(plain["secagg"].get("scheme", "pairwise")), "secagg.scheme", "secagg.schemes")


def _check_part(part: Part, field: str, family: str) -> None:
    if part.name not in members(family):
        raise PlanError(
            f"{field} '{part.name}' is not in the catalogue, and no code is sent over a network: use one of "
            f"{', '.join(members(family))}"
        )
    check_names_no_code(part.options, field)


def check_names_no_code(value: Any, field: str) -> None:
    """Refuse `module:function` however deep it is: whoever sends options must not choose what is called with them."""
    if (code := _code_in(value)) is not None:
        raise PlanError(f"{field}: over a network options are numbers and names from the catalogue, got {code!r}")


def _names_code(value: Any) -> bool:
    return _code_in(value) is not None


def _code_in(value: Any) -> str | None:
    """The first `module:function` in plain data, however deep it is."""
    if isinstance(value, dict | list):
        return next(filter(None, map(_code_in, value.values() if isinstance(value, dict) else value)), None)
    return value if isinstance(value, str) and ":" in value else None
