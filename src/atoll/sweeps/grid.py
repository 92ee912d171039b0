"""The grid of a sweep: keys with values, every combination of them as a plan, and refusals before anything runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import AtollError, PlanError
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.farm import plan_key, with_engine
from atoll.report.sweep import label, value_key, value_text
from atoll.simulation.dry_run import dry_run
from atoll.sweeps.measure import check_samples
from atoll.train.federation import Federation, build_federation

Grid = Mapping[str, Sequence[Any]]

REFUSED_KEYS = {
    "seed": "name seeds by --seeds, or seeds=",
    "name": "a name changes no figure: leave it out",
    "engine": "engines change no figure: leave it out; the number of runs at once is --workers, or workers=",
    "evaluation.holdout": "figures on different samples cannot be compared: set it in the plan",
    "evaluation.validation": "figures on different samples cannot be compared: set it in the plan",
    "evaluation.max_clients": "figures of different clients cannot be compared: set it in the plan",
    "evaluation.new_clients": "figures of different clients cannot be compared: set it in the plan",
    "evaluation.metrics": "different figures cannot be compared: set it in the plan",
}
"""Keys that a sweep does not vary -> what to do instead."""

FEDERATION = ("seed", "data", "public", "partition", "problem", "evaluation", "server", "attackers", "policy")
"""Settings that decide who holds which samples."""
SPEED = ("data", "partition", "model", "models", "work", "loss", "problem", "policy")
"""Settings by which the fastest engine may differ; it is measured once for each combination of their values."""


class Combination(NamedTuple):
    """One choice of settings."""

    settings: Mapping[str, Any]
    plan: Plan | None
    """The plan with its own seed, or None if it was refused."""
    why: str = ""
    """Why the plan was refused."""
    metric: tuple[str, bool] | None = None
    """Name of the main figure, and whether a larger one is better; None if the plan was refused."""


def check_grid(grid: Grid) -> None:
    """Refuse a grid without keys or values, values that repeat, and keys that a sweep does not vary."""
    if not grid:
        raise PlanError("the sweep has no grid: name at least one key with values, e.g. --grid local.lr=0.01,0.1")
    for key, values in grid.items():
        check_key(key)
        if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
            raise PlanError(f"the values of {key} must be a list, got {values!r}: write [{values!r}] for one value")
        if not values or values == [None]:
            raise PlanError(f"the grid has no values for {key}: name at least one, e.g. {key}=VALUE,VALUE")
        keys = list(map(value_key, values))
        repeated = next((value for value in values if keys.count(value_key(value)) > 1), None)
        if len(set(keys)) < len(keys):
            raise PlanError(f"the grid names {key}={value_text(repeated)} twice: leave one out")


def check_key(key: str) -> None:
    """Refuse a key that a sweep does not vary."""
    for refused, way_out in REFUSED_KEYS.items():
        if key == refused or key.startswith(f"{refused}.") or refused.startswith(f"{key}."):
            raise PlanError(f"a sweep does not vary '{key}': {way_out}")


def combinations(plan: Plan, grid: Grid) -> list[Combination]:
    """Return every combination of the values, the last key varying fastest."""
    values = [[each.to_dict() if isinstance(each, Part) else each for each in listed] for listed in grid.values()]
    return [combined(plan, dict(zip(grid, chosen, strict=True))) for chosen in itertools.product(*values)]


def combined(plan: Plan, settings: Mapping[str, Any]) -> Combination:
    """Return the plan with settings changed, tables before their keys; a refused plan becomes its reason."""
    ordered = {key: settings[key] for key in sorted(settings, key=lambda key: key.count("."))}
    try:
        return Combination(settings, plan.replace(ordered))
    except PlanError as error:
        return Combination(settings, None, _line(error))


class Checker:
    """Builds and rehearses plans before anything runs; data are dealt out once for plans that share them."""

    def __init__(self, seed: int, known: Callable[[Combination], tuple[str, bool] | None]) -> None:
        self._seed, self._known = seed, known
        self._federation: tuple[str, Federation] | None = None

    def __call__(self, combination: Combination) -> Combination:
        """Return the combination with its main figure, or with the reason for which it is refused.

        `known` gives the main figure if its runs have all ended, so that the plan is not built again.
        """
        if combination.plan is None:
            return combination
        known = self._known(combination)
        if known is not None:
            return combination._replace(metric=known)
        plan = combination.plan.replace({"seed": self._seed})
        try:
            job, _ = dry_run(plan, self._dealt(plan))
            check_samples(plan, job)
        except AtollError as error:
            return combination._replace(plan=None, why=_line(error))
        return combination._replace(metric=(job.measures.main, job.measures.larger_is_better))

    def _dealt(self, plan: Plan) -> Federation:
        plain = plan.to_dict()
        key = json.dumps([plain.get(name) for name in FEDERATION], sort_keys=True)
        if self._federation is None or self._federation[0] != key:
            self._federation = (key, build_federation(plan))
        return self._federation[1]


def check_combinations(found: Sequence[Combination]) -> tuple[str, bool]:
    """Refuse values that no combination allows, equal plans and different main figures; return the main figure."""
    for key in found[0].settings:
        for same in dict.fromkeys(value_key(each.settings[key]) for each in found):
            having = [each for each in found if value_key(each.settings[key]) == same]
            if all(each.plan is None for each in having):
                raise PlanError(
                    f"{key}={value_text(having[0].settings[key])} is refused: {having[0].why} (correct the value or "
                    "leave it out; options of one part alone belong into its table, as in "
                    'algorithm={name="fedprox",mu=0.1})'
                )
    able = [each for each in found if each.plan is not None]
    if not able:
        raise PlanError(f"no combination is allowed; {label(found[0].settings)}: {found[0].why}")
    seen: dict[str, Combination] = {}
    for each in able:
        assert each.plan is not None
        twin = seen.setdefault(plan_key(each.plan), each)
        if twin is not each:
            raise PlanError(
                f"two combinations are the same plan ({label(twin.settings)}; {label(each.settings)}): leave one out"
            )
    metrics = dict.fromkeys(each.metric for each in able if each.metric is not None)
    if len(metrics) > 1:
        names = ", ".join(name for name, _ in metrics)
        raise PlanError(f"combinations have different main figures ({names}): name one in evaluation.metrics")
    return next(iter(metrics))


class Engines:
    """Chooses the engine of one process for the runs of a sweep, the same for all that differ in no shape."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._chosen = folder, dict[str, Part]()

    def __call__(self, plan: Plan) -> Plan:
        """Return the plan with the engine for plans of its shape."""
        plain = plan.to_dict()
        shape = json.dumps([plain.get(name) for name in SPEED] + [plan.local.batch_size], sort_keys=True)
        if shape not in self._chosen:
            self._chosen[shape] = with_engine(plan, plan, self._folder / f"{plan_key(plan)}.json").engine
        return plan.replace({"engine": self._chosen[shape].to_dict()})


def _line(error: AtollError) -> str:
    return " ".join(str(error).split())
