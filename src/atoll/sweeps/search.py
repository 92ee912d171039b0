"""Search over ranges of settings by Optuna's tree-structured Parzen estimator (Bergstra et al. 2011).

Trials are asked for in batches of fixed size, each from a seed of its own, and a batch is told when it has ended: what
is tried depends on the plan and the ranges alone, not on the number of workers or on how often the search was stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from atoll.core.errors import PlanError, RunError, nearest
from atoll.core.options import Count, read_value
from atoll.core.seeds import derive
from atoll.core.toml_text import read_toml, split_values
from atoll.farm import Failures, plan_key
from atoll.report.sweep import SweepTable
from atoll.sweeps.grid import Combination, check_combinations, check_key, combined

if TYPE_CHECKING:
    from optuna import Study

    from atoll.sweeps.run import SweepRunner

Kind = Literal["float", "log", "int", "choice"]
TRIALS = 30
"""Combinations that are tried unless a number is given."""
BATCH = 8
"""Trials that are asked for before any of them is told."""
JOURNAL = "search.journal"


class Range(NamedTuple):
    """The values that a key may take."""

    kind: Kind
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str, ...] = ()
    """Values as they are typed, of a choice."""

    def value(self, param: Any) -> Any:
        """Return the setting for a parameter of a trial."""
        return read_toml(param) if self.kind == "choice" else param

    def probes(self) -> list[Any]:
        """Return the values that are checked before anything runs: both ends, or all choices."""
        ends = [int(self.low), int(self.high)] if self.kind == "int" else [self.low, self.high]
        return [self.value(text) for text in self.choices] if self.kind == "choice" else ends


def read_range(key: str, text: str) -> Range:
    """Read a range as it is typed.

    >>> read_range("local.lr", "log:0.001:1"), read_range("local.epochs", "int:1:5").probes()
    (Range(kind='log', low=0.001, high=1.0, choices=()), [1, 5])
    """
    kind, _, rest = text.partition(":")
    kinds: tuple[Kind, ...] = get_args(Kind)
    known = next((each for each in kinds if each == kind.strip()), None)
    if known is None:
        raise PlanError(
            f"the range of {key} is '{text}': write log:0.001:1, float:0:1, int:1:20 or choice:a,b; "
            f"{nearest(kind, kinds)}"
        )
    if known == "choice":
        choices = tuple(split_values(rest)) if rest.strip() else ()
        if len(choices) < 2 or len(set(choices)) < len(choices):
            raise PlanError(f"the range of {key} is '{text}': name two or more different values, as in choice:a,b")
        return Range(known, choices=choices)
    low, high = _ends(key, text, rest, known)
    return Range(known, low, high)


def _ends(key: str, text: str, rest: str, kind: Kind) -> tuple[float, float]:
    example = "int:1:20" if kind == "int" else f"{kind}:0.001:1"
    try:
        low, high = (float(int(end)) if kind == "int" else float(end) for end in rest.split(":"))
    except (ValueError, OverflowError) as error:
        raise PlanError(f"the range of {key} is '{text}': write two numbers, as in {example}") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise PlanError(f"the range of {key} is '{text}': the first number must be the smaller one, as in {example}")
    if kind == "log" and low <= 0:
        raise PlanError(f"the range of {key} is '{text}': a log range begins above 0; raise {low:g}, or write float")
    return low, high


def run_search(runner: SweepRunner, search: Mapping[str, str], trials: int | None) -> SweepTable:
    """Try `trials` points of the ranges, and go on where an earlier call was stopped."""
    if not search:
        raise PlanError("the search has no ranges: name at least one, e.g. --search local.lr=log:0.001:1")
    for key in search:
        check_key(key)
    num: int = read_value(Count, TRIALS if trials is None else trials, "trials")
    space = {key: read_range(key, text) for key, text in search.items()}
    metric = _check_space(runner, space)
    study = _study(runner, search, larger_is_better=metric[1])
    failures, found = Failures(), list[Combination]()
    for start in range(0, num, BATCH):
        params = [_params(study, space, number, runner.plan.seed) for number in range(start, min(start + BATCH, num))]
        batch = [
            runner.checker(combined(runner.plan, {key: space[key].value(each[key]) for key in space}))
            for each in params
        ]
        failures |= runner.run(batch)
        found += batch
        _tell(study, start, runner.table(batch, metric, failures))
    return runner.finish(found, metric, failures, is_search=True)


def _check_space(runner: SweepRunner, space: Mapping[str, Range]) -> tuple[str, bool]:
    """Refuse unknown keys and ends that a plan does not allow; return the main figure."""
    first = {key: each.probes()[0] for key, each in space.items()}
    probes = [first] + [{**first, key: value} for key, each in space.items() for value in each.probes()[1:]]
    return check_combinations([runner.checker(combined(runner.plan, settings)) for settings in probes])


def _study(runner: SweepRunner, search: Mapping[str, str], *, larger_is_better: bool) -> Study:
    """Open the study in the sweep's directory, or begin one; refuse one of another plan or other ranges."""
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
    except ImportError as error:
        raise RunError("a search needs Optuna: pip install 'atoll[search]', or give a grid instead") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path: Path = runner.out / JOURNAL
    path.parent.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(path))),
        study_name="atoll",
        direction="maximize" if larger_is_better else "minimize",
        load_if_exists=True,
    )
    about = {"ranges": dict(search), "plan": plan_key(runner.plan), "seeds": runner.seeds}
    known = study.user_attrs.get("about")
    if known is None:
        study.set_user_attr("about", about)
    elif known != about:
        differing = ", ".join(name for name, value in about.items() if known.get(name) != value)
        raise RunError(
            f"{path} holds a search that differs in {differing}: its ranges are {json.dumps(known['ranges'])} and its "
            f"seeds {known['seeds']}; go on with the same plan, ranges and seeds, or choose another --out"
        )
    return study


def _params(study: Study, space: Mapping[str, Range], number: int, seed: int) -> dict[str, Any]:
    """Return the parameters of a trial: those that it was begun with, or new ones from a seed of its own."""
    from optuna.samplers import TPESampler

    begun = study.get_trials(deepcopy=False)
    if number < len(begun):
        return dict(begun[number].params)
    study.sampler = TPESampler(seed=derive(seed, "search", number) % 2**32, constant_liar=True)
    trial = study.ask({key: _distribution(each) for key, each in space.items()})
    assert trial.number == number
    return dict(trial.params)


def _distribution(values: Range) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if values.kind == "choice":
        return CategoricalDistribution(values.choices)
    if values.kind == "int":
        return IntDistribution(int(values.low), int(values.high))
    return FloatDistribution(values.low, values.high, log=values.kind == "log")


def _tell(study: Study, start: int, table: SweepTable) -> None:
    """Tell the figures of a batch in the order of its trials; one that lacks a seed counts as worse than all others."""
    from optuna.trial import TrialState

    for place in range(len(table.combinations)):
        row = table.row(place)
        whole = row is not None and row.num_seeds == len(table.seeds)
        if row is not None and whole:
            study.tell(start + place, row.figure.mean, skip_if_finished=True)
        else:
            study.tell(start + place, state=TrialState.PRUNED, skip_if_finished=True)
