"""Matrix of attacks against defences: every pair is an ordinary run, and the results are one table and one page.

Options follow a name after colons, and a plus puts a rule before another: `ipm:factor=optimised`,
`bucketing:size=3+krum`, `nnm+trimmed_mean`. The number of bad clients is passed to every rule that takes `f`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.aggregator import Aggregator
from atoll.core.attack import Attack
from atoll.core.coordinator import FAILURES, Reason
from atoll.core.detection import Detector
from atoll.core.errors import PlanError, RunError, nearest
from atoll.core.options import option_hints
from atoll.core.parts import Part, find, members
from atoll.core.plan import Plan
from atoll.core.toml_text import read_toml
from atoll.farm import Cell, Failures, Pool, cell_directory, run_grid, with_engine
from atoll.report.figures import write_whole
from atoll.report.matrix import NO_ATTACK, Matrix, Outcome, as_csv
from atoll.report.matrix_page import matrix_page

NO_SAMPLES: dict[str, object] = {"server.samples": None, "server.source": None}
"""Settings that are removed from a plan whose rule does not use the server's own samples."""


class Pair(NamedTuple):
    """One cell of the matrix: its attack and defence, and its plan."""

    attack: str
    defence: str
    f: int
    """Number of bad clients."""
    seed: int
    plan: Plan | None
    """The plan, or None if it was refused."""
    why: str = ""
    """Why the plan was refused."""


def run_matrix(
    plan: Plan,
    *,
    attacks: Sequence[str],
    defences: Sequence[str],
    f: Sequence[int],
    out: str | Path,
    seeds: Sequence[int] | None = None,
    workers: int | None = None,
    ray: str | None = None,
    progress: bool = False,
) -> Matrix:
    """Run every attack against every defence, with f bad clients and each seed, and each defence without an attack.

    Each cell is a run in `out/cells`, and `workers` of them run at once: in processes of this machine, or on the Ray
    cluster at the address `ray`, whose machines must all see `out`. Call the function again to continue after a
    stop: cells that have a result are not run again. A cell whose plan is refused, or that fails, keeps its reason, and
    the others continue; one whose model diverged counts as guessing. At the end `out` holds matrix.csv and matrix.html.
    The plan's own attack, aggregator and seed are replaced; of its attackers, start_round and num_rounds are kept. If
    they are `added`, the f bad clients join in addition to all others.
    """
    out, seeds = Path(out), list(seeds if seeds is not None else [plan.seed])
    _check_lists(attacks, defences, f, seeds)
    attack_parts = {text: part_of(text, "attacks") for text in attacks}
    rules = {text: [part_of(piece, "aggregators") for piece in text.split("+")] for text in defences}
    for text, chain in rules.items():
        _check_chain(text, chain)
    pool = Pool.of(plan, workers, ray)
    base = _base_plan(plan)
    uses_samples = _uses_server_samples(base, base.aggregator, base.seed)
    base = with_engine(base, base if uses_samples else base.replace(NO_SAMPLES), out / "matrix.json")
    pairs = [
        _pair(base, attack, attack_parts.get(attack), defence, _defence(rules[defence], num_bad), num_bad, seed)
        for num_bad in f
        for attack in [NO_ATTACK, *attacks]
        for defence in defences
        for seed in seeds
    ]
    cells = [Cell(out / _folder(pair), pair.plan) for pair in pairs if pair.plan is not None]
    failures = run_grid(cells, pool, progress=progress)
    matrix = Matrix(
        title=plan.name or f"{plan.data.name}, {plan.algorithm.name}",
        attacks=tuple(attacks),
        targeted=frozenset(text for text, part in attack_parts.items() if _has_target(part)),
        defences=tuple(defences),
        f=tuple(f),
        seeds=tuple(seeds),
        outcomes=tuple(_outcome(pair, out, failures) for pair in pairs),
    )
    write_whole(out / "matrix.csv", as_csv(matrix).encode())
    write_whole(out / "matrix.html", matrix_page(matrix, base.to_toml()).encode("utf-8", "replace"))
    return matrix


def part_of(text: str, family: str) -> Part:
    """Read `name:option=value:option=value`; a value is TOML, and a bare word is a string.

    >>> part_of("ipm:factor=optimised", "attacks")
    Part('ipm', factor='optimised')
    """
    first, *rest = text.strip().split(":")
    options: dict[str, Any] = {}
    for piece in rest:
        key, equals, value = piece.partition("=")
        if not equals:
            first += f":{piece}"  # a function of the user's own: module:function
            continue
        options[key.strip()] = read_toml(value.strip())
    known = option_hints(find(family, first))
    for option in options:
        if option not in known:
            raise PlanError(f"{text}: {first} has no option '{option}': {nearest(option, known)}")
    return Part(first, **options)


def _check_lists(attacks: Sequence[str], defences: Sequence[str], f: Sequence[int], seeds: Sequence[int]) -> None:
    """Refuse lists that are empty or repeat a value, and numbers of bad clients below 1."""
    for name, values in (("attacks", attacks), ("defences", defences), ("f", f), ("seeds", seeds)):
        if not values:
            raise PlanError(f"the matrix has no {name}: name at least one, separated by commas")
        if len(set(values)) < len(values):
            raise PlanError(f"the matrix names one of its {name} twice: {', '.join(map(str, values))}; leave one out")
    if min(f) < 1:
        raise PlanError(
            f"f is a number of bad clients and must be at least 1, got {min(f)}: leave it out, runs without an attack "
            "are always included"
        )


def _check_chain(text: str, chain: list[Part]) -> None:
    """Refuse a chain in which a rule before the last takes no other rule, or in which the last lacks one."""
    wrappers = [name for name in members("aggregators") if "rule" in _options(Part(name))]
    for part, inner in zip(chain, [*chain[1:], None], strict=True):
        if inner is not None and "rule" not in _options(part):
            raise PlanError(f"{text}: {part.name} cannot be put before another rule; these can: {', '.join(wrappers)}")
        if inner is None and "rule" in _options(part) and "rule" not in part.options:
            raise PlanError(f"{text}: {part.name} needs a rule after it, e.g. {part.name}+trimmed_mean")


def _options(part: Part) -> Iterable[str]:
    return option_hints(find("aggregators", part.name))


def _defence(chain: list[Part], f: int) -> Part:
    """Return the rules of a defence as one part, with f filled in for rules that take it."""
    defence: Part | None = None
    for part in reversed(chain):
        options = dict(part.options)
        if "f" in _options(part):
            options.setdefault("f", f)
        if defence is not None:
            options["rule"] = defence
        defence = Part(part.name, **options)
    assert defence is not None
    return defence


def _base_plan(plan: Plan) -> Plan:
    """Return the plan that all cells share: without an attack, aggregated by the mean."""
    kept = {name: getattr(plan.attackers, name) for name in ("start_round", "num_rounds", "added")}
    return plan.replace({"attack": None, "attackers": {k: v for k, v in kept.items() if v is not None}}).replace(
        {"aggregator": {"name": "mean"}}
    )


def _pair(base: Plan, attack: str, attack_part: Part | None, defence: str, rule: Part, f: int, seed: int) -> Pair:
    """Build the cell of an attack (None for the baseline) and a defence; a refused plan becomes its reason."""
    pair = Pair(attack=attack, defence=defence, f=f, seed=seed, plan=None)
    name = f"{attack}, {defence}, f = {f}, seed {seed}"
    settings: dict[str, object] = {"seed": seed, "aggregator": rule.to_dict(), "name": name}
    try:
        if not _uses_server_samples(base, rule, seed):
            settings |= NO_SAMPLES
        if attack_part is None:
            settings["attackers"] = {}
        else:
            key = "num" if base.attackers.added is None else "added"
            settings |= {"attack": attack_part.to_dict(), f"attackers.{key}": f}
        return pair._replace(plan=base.replace(settings))
    except PlanError as error:
        return pair._replace(why=str(error))


def _uses_server_samples(base: Plan, rule: Part, seed: int) -> bool:
    """Return whether the rule, the plan's detection or its contribution uses the server's own samples."""
    built: Aggregator = rule.build("aggregators", seed=seed)
    detector: Detector | None = base.detection.build("detection") if base.detection else None
    return (
        built.add_server_update is not None
        or base.contribution is not None
        or (detector is not None and detector.needs_loss)
    )


def _has_target(part: Part) -> bool:
    attack: Attack = part.build("attacks")
    return attack.target is not None


def _folder(pair: Pair) -> str:
    """Return a cell's directory, relative to the matrix; equal plans, such as the mean for any f, share one."""
    assert pair.plan is not None
    same_for_any_f = pair.attack == NO_ATTACK and "f" not in pair.plan.aggregator.to_dict()
    words = f"{pair.attack}_{pair.defence}{'' if same_for_any_f else f'_f{pair.f}'}_s{pair.seed}"
    return cell_directory(words, pair.plan)


def _outcome(pair: Pair, out: Path, failures: Failures) -> Outcome:
    """Return the outcome of a cell, from its run directory or its failure."""
    outcome = Outcome(attack=pair.attack, defence=pair.defence, f=pair.f, seed=pair.seed, status="failed")
    if pair.plan is None:
        return outcome._replace(status="impossible", why=pair.why)
    folder = _folder(pair)
    if out / folder in failures:
        refused, why = failures[out / folder]
        return outcome._replace(status="impossible" if refused else "failed", why=why)
    result = _read_json(out / folder / "result.json")
    test, reason = result.get("test") or {}, result["reason"]
    outcome = outcome._replace(rounds=result["rounds"], why=reason, directory=folder)
    if reason == Reason.DIVERGED:  # a diverged model is no better than guessing
        num_classes = _read_json(out / folder / "run.json")["data"]["num_classes"]
        return outcome._replace(status="done", accuracy=1 / num_classes)
    if reason in FAILURES or "accuracy" not in test:
        return outcome
    return outcome._replace(status="done", accuracy=test["accuracy"], attack_success=test.get("attack_success"), why="")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): remove {path.parent} and start again") from error
    return table
