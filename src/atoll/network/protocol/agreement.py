"""The plan as clients receive it, and the minimum requirements (floors) of a client. A plan is data, never code.

Parts that only the server runs may be the operator's own code, which clients never build. Parts that clients run are in
the catalogue, or are the client's own under the name that the plan uses.
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
from atoll.data.targets import CLASSIFICATION
from atoll.network.protocol.bases import NO_BASES, Bases, told_by_name, with_base_hash, with_own_base
from atoll.network.protocol.messages import RunInfo
from atoll.secagg.scheme import Scheme

NOT_SENT = ("name", "data", "partition", "devices", "attack", "attackers", "stop", "engine")
"""Settings that concern the server or a simulation alone."""
SERVER_ONLY = ("aggregator", "detection", "contribution", "server")
"""Settings that clients are shown but never build, as they may be the operator's own code."""
ACCOUNTED = {"policy": "rounds", "sampler": "rounds.samplers"}
"""Settings that only the server runs, but by which clients of a private run account for what they spend."""
CHAINS = {"uplink": "transforms", "downlink": "transforms"}
Functions = Mapping[str, Callable[..., Any]]
ANY = "*"
"""Among a client's own works: what it does for a plan whose work is neither in the catalogue nor named by it."""
NO_FUNCTIONS: Functions = MappingProxyType({})
ACTIVATIONS, LABELS = "activations", "labels"
"""What a client sends in split learning."""
OPEN, NOISED, IN_SECRET, NOTHING = "open", "noised", "secret", "none"
"""What a client tells of how a version does on its samples."""
MAX_EPSILON = 20.0
"""Largest epsilon of noise that deserves the name."""


class OwnParts(NamedTuple):
    """Parts of a client beside the catalogue, by the names that plans use, with or without the module."""

    models: Functions = NO_FUNCTIONS
    algorithms: Functions = NO_FUNCTIONS
    losses: Functions = NO_FUNCTIONS
    works: Functions = NO_FUNCTIONS
    bases: Bases = NO_BASES
    """Directories of base models, by the names that plans use."""

    def loss(self, part: Part | None) -> Callable[..., Any] | None:
        """Return the client's own loss of this name; None for one of the catalogue."""
        return None if part is None else _own(self.losses, part.name, "loss", "losses", "train.losses")


@dataclass(frozen=True, kw_only=True)
class Floors(Section, key="floors"):
    """Minimum requirements of a client; a plan that does not meet them is refused."""

    min_cohort: int = 1
    """Minimum number of clients behind a version."""
    secagg: bool = False
    """Whether secure aggregation is required, by a scheme that withstands a malicious server."""
    min_survivors: int = MIN_SURVIVORS
    """Minimum number of updates in a sum that secure aggregation opens."""
    max_epsilon: float | None = None
    """Maximum epsilon of this client over all runs on all servers; runs must be private."""
    algorithms: tuple[str, ...] = ()
    """Algorithms that may be run; all if empty."""
    max_model_bytes: int = 1 << 32
    max_local_steps: int | None = None
    """Maximum number of steps of a task, and of those by which a client adapts a model."""
    max_change: float | None = None
    """Maximum L2 distance between a version and the one before; the first must be that of the plan's own seed."""
    split: str = ACTIVATIONS
    """What this client sends in split learning: "none" (it takes no part), "activations" of single samples, from which
    these can be reconstructed, or "labels" too, where the plan has no `split.tail`."""
    evaluation: str = OPEN
    """What is told of a version that the plan lets clients measure: "open" (sums), "noised" (counts with noise),
    "secret" (sums that are added to those of others in secret) or "none"."""
    evaluation_epsilon: float | None = None
    """Epsilon of the noise of one evaluation, by which a sample is protected; with "noised"."""
    hours: tuple[int, ...] = ()
    """First hour of work and the hour before which it ends, in local time; all day if empty."""

    def check(self) -> None:
        """Refuse hours outside of the day, and sums of one update."""
        if self.min_survivors < 2:
            raise PlanError(
                f"floors.min_survivors must be at least 2, got {self.min_survivors}: a sum of one is no sum"
            )
        if self.max_change is not None and not self.max_change > 0:
            raise PlanError(
                f"floors.max_change is a distance above 0, got {self.max_change}: set it to what a round moves the "
                "model, e.g. 1, or leave it out"
            )
        if self.evaluation not in (OPEN, NOISED, IN_SECRET, NOTHING):
            raise PlanError(
                f'floors.evaluation is "open", "noised", "secret" or "none", got {self.evaluation!r}: choose what this '
                "client tells of how a model does on its samples"
            )
        if self.split not in (NOTHING, ACTIVATIONS, LABELS):
            raise PlanError(
                f'floors.split is "none", "activations" or "labels", got {self.split!r}: choose what this client sends '
                "in split learning"
            )
        if (self.evaluation == NOISED) != (self.evaluation_epsilon is not None):
            raise PlanError(
                'floors.evaluation = "noised" and floors.evaluation_epsilon, e.g. 0.5, belong together: give both'
            )
        if self.evaluation_epsilon is not None and not 0 < self.evaluation_epsilon <= MAX_EPSILON:
            raise PlanError(f"floors.evaluation_epsilon is in (0, {MAX_EPSILON:g}], got {self.evaluation_epsilon}")
        if self.hours and (len(self.hours) != 2 or not all(0 <= hour <= 24 for hour in self.hours)):
            raise PlanError(f"floors.hours are two hours of the day, e.g. [20, 6], got {list(self.hours)}")


def plan_for_clients(plan: Plan, kind: str = CLASSIFICATION) -> dict[str, Any]:
    """Return the part of a plan that clients receive; refuse a plan that cannot run over a network.

    `kind` is what the server's data say of the problem, which those of a client need not show.
    """
    check(Networked(plan, plan.sampler.build("rounds.samplers")))
    plain = {key: value for key, value in plan.to_dict().items() if key not in NOT_SENT}
    if "model" in plain:
        plain["model"] = told_by_name(with_base_hash(plan).model).to_dict()
    set_apart = {"validation": plan.evaluation.validation} if plan.evaluation.validation else {}
    plain["evaluation"] = {"holdout": plan.evaluation.holdout, **set_apart, **_at_clients(plan)}
    if plan.problem is None and kind != CLASSIFICATION:
        plain["problem"] = {"name": kind}
    if ":" in plan.algorithm.name and _clients_do_fedavg(plan.algorithm.build("algorithms")):
        plain["algorithm"] = Part("fedavg").to_dict()  # its other slots run on the server
    _check_plain(plain)
    return plain


def _at_clients(plan: Plan) -> dict[str, Any]:
    """Return what clients must know to measure versions, if they are asked to; metrics must be in the catalogue."""
    ask = plan.evaluation
    if not ask.clients_every:
        return {}
    for part in ask.metrics or ():
        _check_part(part, "evaluation.metrics", "metrics")
    metrics = {} if ask.metrics is None else {"metrics": [part.to_dict() for part in ask.metrics]}
    return {"clients_every": ask.clients_every, **metrics}


def read_plan(plain: dict[str, Any], own: OwnParts) -> Plan:
    """Read a plan from a server; import nothing but parts of the catalogue and the client's own."""
    _check_plain(plain)
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
        elif field == "model":
            plain[field] = with_own_base(part, own.bases)
    plan = Plan.read(plain)
    check(Networked(plan, plan.sampler.build("rounds.samplers")))
    own.loss(plan.loss)
    return plan


def _own(known: Functions, name: str, field: str, argument: str, family: str) -> Callable[..., Any] | None:
    """Return the client's own part of this name, or None for one of the catalogue; refuse any other."""
    short = name.rpartition(":")[2]
    function = known.get(name) or known.get(short)
    if function is None and name not in members(family):
        function = known.get(ANY)
    if function is None and name not in members(family):
        raise PlanError(
            f"the plan's {field} '{name}' is neither in the catalogue nor among this client's own, and no code is sent "
            f"over a network: let the app supply it, e.g. {argument}={{'{short}': ...}}"
        )
    return function


def _clients_do_fedavg(algorithm: Algorithm) -> bool:
    """Return whether an algorithm fills slots of the server only."""
    rest = algorithm._replace(init_server=nothing, server_step=add_delta, needs_updates=False, server_lr=1.0)
    return rest == Algorithm()


def refusal_reason(
    floors: Floors,
    info: RunInfo,
    plan: Plan,
    mechanism: Mechanism | None,
    num_steps: int,
    *,
    number: int,
    keys_known: bool = False,
) -> str | None:
    """Return why the floors refuse a run whose tasks, or adaptations, take `num_steps`; None if they allow it.

    `number` is the client's, and `keys_known` tells that the owner gave the other clients' keys, which protect against
    a malicious server.
    """
    if info.cohort < floors.min_cohort:
        return f"a version is made of {info.cohort} clients, this client asks for at least {floors.min_cohort}"
    reason = split_refusal_reason(floors, plan, number) or secure_refusal_reason(floors, plan, keys_known=keys_known)
    if reason is not None:
        return reason
    charged = not plan.rounds and floors.evaluation in (NOISED, NOTHING)  # evaluations are charged one by one
    if floors.max_epsilon is not None and not charged:
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


def split_refusal_reason(floors: Floors, plan: Plan, number: int) -> str | None:
    """Return why the floors refuse what a plan with a cut lets this client send; None if they allow it."""
    if plan.split is None or floors.split == LABELS:
        return None
    if floors.split == NOTHING:
        return (
            'the model is cut, and the server would see activations of single samples, which floors.split = "none" '
            "keeps here"
        )
    if plan.split.tail is None and (not plan.split.parties or number == plan.split.label_holder):
        return (
            "the model is cut without split.tail, so that the server would see labels of single samples: this client "
            'sends them with floors.split = "labels" only'
        )
    return None


def secure_refusal_reason(floors: Floors, plan: Plan, *, keys_known: bool) -> str | None:
    """Return why the plan's secure aggregation is weaker than the floors; None if it is not."""
    if plan.secagg is None:
        if not floors.secagg or (not plan.rounds and floors.evaluation in (IN_SECRET, NOTHING)):
            return None
        what = "updates" if plan.rounds else "evaluations"
        return f"{what} would be seen one by one, this client asks for secure aggregation"
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


def evaluates_in_secret(floors: Floors, plan: Plan) -> bool:
    """Return whether a client's evaluations are added in secret: by its floors, or since all of the run is."""
    return floors.evaluation == IN_SECRET or (floors.evaluation == OPEN and plan.secagg is not None)


def is_working_hour(hours: tuple[int, ...], hour: int) -> bool:
    """Return whether an hour of the day is within working hours.

    >>> is_working_hour((20, 6), 23), is_working_hour((20, 6), 12), is_working_hour((), 12)
    (True, False, True)
    """
    if not hours:
        return True
    first, last = hours
    return first <= hour < last if first <= last else hour >= first or hour < last


def _check_plain(plain: dict[str, Any]) -> None:
    """Refuse names of code in parts that clients run, but for model, algorithm and loss, which may be their own."""
    for part in (plain.get("split") or {}).get("defences", []):
        _check_part(Part.of(part, where="split.defences"), "split.defences", "split.defences")
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
    for part in plain.get("split", {}).get("codecs", []):
        _check_part(Part.of(part, where="split.codecs"), "split.codecs", "transforms")
    for part in plain.get("split", {}).get("defences", []):
        _check_part(Part.of(part, where="split.defences"), "split.defences", "split.defences")
    for party in plain.get("split", {}).get("parties") or []:
        _check_part(Part.of(party.get("model", "mlp"), where="split.parties"), "split.parties: model", "models")
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
    """Refuse `module:function` at any depth: a sender of options must not choose what is called with them."""
    if (code := _code_in(value)) is not None:
        raise PlanError(f"{field}: over a network options are numbers and names from the catalogue, got {code!r}")


def _names_code(value: Any) -> bool:
    return _code_in(value) is not None


def _code_in(value: Any) -> str | None:
    """Return the first `module:function` in plain data, at any depth."""
    if isinstance(value, dict | list):
        return next(filter(None, map(_code_in, value.values() if isinstance(value, dict) else value)), None)
    return value if isinstance(value, str) and ":" in value else None
