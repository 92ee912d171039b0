"""Attacks against defences: every pair as an ordinary run, several at once, one table and one page at the end.

A name takes options after colons and wraps another rule with a plus: `ipm:factor=optimised`,
`bucketing:size=3+krum`, `nnm+trimmed_mean`. The number of bad clients goes to every rule that takes `f`.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.commit.coordinator import build_coordinator
from atoll.core.aggregator import Aggregator
from atoll.core.attack import Attack
from atoll.core.coordinator import FAILURES, Reason
from atoll.core.detection import Detector
from atoll.core.errors import PlanError, RunError, nearest
from atoll.core.options import option_hints, read_value
from atoll.core.parts import Part, find, members
from atoll.core.plan import Plan
from atoll.engine.base import Workers, worker_count
from atoll.engine.build import build_engine
from atoll.farm import Cell, run_cells
from atoll.report.figures import write_whole
from atoll.report.matrix import NO_ATTACK, Matrix, Outcome, as_csv
from atoll.report.matrix_page import matrix_page
from atoll.report.progress import CellsBar
from atoll.train.federation import build_federation
from atoll.train.job import build_job

NO_SAMPLES: dict[str, object] = {"server.samples": None, "server.source": None}
"""What a plan loses whose rule does not look at samples of the server's own."""


class Pair(NamedTuple):
    """One cell of the matrix: what stands in its row and column, and the plan that is run for it."""

    attack: str
    defence: str
    f: int
    seed: int
    plan: Plan | None
    why: str = ""
    """Why there is no plan."""


def run_matrix(
    plan: Plan,
    *,
    attacks: Sequence[str],
    defences: Sequence[str],
    f: Sequence[int],
    out: str | Path,
    seeds: Sequence[int] | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> Matrix:
    """Run every attack against every defence, with f bad clients and each seed, and each defence without an attack.

    Each cell is a run in `out/cells`, and `workers` of them go on at once. Call it again to go on after it was stopped:
    cells that have a result are not run again. A cell that cannot be, or fails, says so, and the others go on; one
    whose model diverged counts as guessing. At the end `out` holds matrix.csv and matrix.html. The plan's own attack,
    aggregator and seed are replaced; of its attackers, start_round and num_rounds stay. If they are `added`, the f bad
    clients come in addition to all others.
    """
    out, seeds = Path(out), list(seeds if seeds is not None else [plan.seed])
    _check_lists(attacks, defences, f, seeds)
    bad = {text: part_of(text, "attacks") for text in attacks}
    rules = {text: [part_of(piece, "aggregators") for piece in text.split("+")] for text in defences}
    for text, chain in rules.items():
        _check_chain(text, chain)
    num_workers = worker_count(read_value(Workers | None, workers, "workers"))
    base = _with_engine(_plain(plan), out)
    pairs = [
        _pair(base, attack, defence, number, seed, bad, rules)
        for number in f
        for attack in [NO_ATTACK, *attacks]
        for defence in defences
        for seed in seeds
    ]
    cells = {_folder(pair): Cell(out / _folder(pair), pair.plan) for pair in pairs if pair.plan is not None}
    failed = run_cells([cell for cell in cells.values() if not has_result(cell.path)], num_workers, CellsBar(progress))
    matrix = Matrix(
        title=plan.name or f"{plan.data.name}, {plan.algorithm.name}",
        attacks=tuple(attacks),
        targeted=frozenset(text for text, part in bad.items() if _built(part).target is not None),
        defences=tuple(defences),
        f=tuple(f),
        seeds=tuple(seeds),
        outcomes=tuple(_outcome(pair, out, failed) for pair in pairs),
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
        try:
            options[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            options[key.strip()] = value.strip()
    taken = option_hints(find(family, first))
    for option in options:
        if option not in taken:
            raise PlanError(f"{text}: {first} has no option '{option}': {nearest(option, taken)}")
    return Part(first, **options)


def has_result(path: Path) -> bool:
    """Whether a run is over, and was not stopped."""
    try:
        reason = json.loads((path / "result.json").read_text())["reason"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(reason != Reason.INTERRUPTED)


def _check_lists(attacks: Sequence[str], defences: Sequence[str], f: Sequence[int], seeds: Sequence[int]) -> None:
    for name, values in (("attacks", attacks), ("defences", defences), ("f", f), ("seeds", seeds)):
        if not values:
            raise PlanError(f"the matrix has no {name}: name at least one, separated by commas")
        if len(set(values)) < len(values):
            raise PlanError(f"the matrix names one of its {name} twice: {', '.join(map(str, values))}; leave one out")
    if min(f) < 1:
        raise PlanError(f"f counts bad clients and must be at least 1, got {min(f)}: without an attack is always run")


def _check_chain(text: str, chain: list[Part]) -> None:
    """Every rule of a defence but the last must take another."""
    takes = [name for name in members("aggregators") if "rule" in _options(Part(name))]
    for part, inner in zip(chain, [*chain[1:], None], strict=True):
        if inner is not None and "rule" not in _options(part):
            raise PlanError(f"{text}: {part.name} cannot be put before another rule; these can: {', '.join(takes)}")
        if inner is None and "rule" in _options(part) and "rule" not in part.options:
            raise PlanError(f"{text}: {part.name} needs a rule after it, e.g. {part.name}+trimmed_mean")


def _options(part: Part) -> Iterable[str]:
    return option_hints(find("aggregators", part.name))


def _defence(chain: list[Part], f: int) -> Part:
    """The rules of a defence as one part, with f filled in where a rule takes it."""
    found: Part | None = None
    for part in reversed(chain):
        options = dict(part.options)
        if "f" in _options(part):
            options.setdefault("f", f)
        if found is not None:
            options["rule"] = found
        found = Part(part.name, **options)
    assert found is not None
    return found


def _plain(plan: Plan) -> Plan:
    """The plan that all cells share: without an attack, by the mean."""
    kept = {name: getattr(plan.attackers, name) for name in ("start_round", "num_rounds", "added")}
    return plan.replace({"attack": None, "attackers": {k: v for k, v in kept.items() if v is not None}}).replace(
        {"aggregator": {"name": "mean"}}
    )


def _pair(
    base: Plan, attack: str, defence: str, f: int, seed: int, bad: dict[str, Part], rules: dict[str, list[Part]]
) -> Pair:
    rule = _defence(rules[defence], f)
    name = f"{attack}, {defence}, f = {f}, seed {seed}"
    settings: dict[str, object] = {"seed": seed, "aggregator": rule.to_dict(), "name": name}
    try:
        if not _looks_at_samples(base, rule, seed):
            settings |= NO_SAMPLES
        if attack == NO_ATTACK:
            settings["attackers"] = {}
        else:
            how = "num" if base.attackers.added is None else "added"
            settings |= {"attack": bad[attack].to_dict(), f"attackers.{how}": f}
        return Pair(attack, defence, f, seed, base.replace(settings))
    except PlanError as error:
        return Pair(attack, defence, f, seed, None, str(error))


def _looks_at_samples(base: Plan, rule: Part, seed: int) -> bool:
    """Whether a rule, the plan's detection or contribution uses samples of the server's own; others refuse them."""
    built: Aggregator = rule.build("aggregators", seed=seed)
    detector: Detector | None = base.detection.build("detection") if base.detection else None
    return (
        built.add_server_update is not None
        or base.contribution is not None
        or (detector is not None and detector.needs_loss)
    )


def _built(part: Part) -> Attack:
    attack: Attack = part.build("attacks")
    return attack


def _key(plan: Plan) -> str:
    """A hash of all that decides how a run ends; its engine and its name do not."""
    plain = {key: value for key, value in plan.to_dict().items() if key not in ("engine", "name")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:10]


def _folder(pair: Pair) -> str:
    """Where a cell is run, seen from the matrix; cells with one plan, such as the mean for any f, are run once."""
    assert pair.plan is not None
    same_for_any_f = pair.attack == NO_ATTACK and "f" not in pair.plan.aggregator.to_dict()
    words = f"{pair.attack}_{pair.defence}{'' if same_for_any_f else f'_f{pair.f}'}_s{pair.seed}"
    plain = "".join(c if c.isalnum() or c in "._" else "-" for c in words)
    return f"cells/{plain[:80]}_{_key(pair.plan)}"


def _with_engine(plan: Plan, out: Path) -> Plan:
    """The plan with an engine inside one process.

    What `auto` finds fastest is measured once and kept in matrix.json, so that all cells work alike, also later.
    """
    unused = not _looks_at_samples(plan, plan.aggregator, plan.seed)
    plain = plan.replace(NO_SAMPLES) if unused else plan
    federation = build_federation(plain)
    job = build_job(plain, federation)  # what is wrong with every cell is said once
    name, options = plan.engine.name, plan.engine.options
    if name == "processes":
        return plan.replace({"engine": {"name": "vectorised", **_without_workers(options)}})
    if name != "auto":
        return plan
    known, file = _key(plan), out / "matrix.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if kept.get("plan") != known:
        engine = build_engine(Part("auto", workers=1), job, build_coordinator(plain, federation))
        kept = {"plan": known, "engine": engine.describe()}
        engine.close()
        write_whole(file, (json.dumps(kept, indent=1) + "\n").encode())
    return plan.replace({"engine": kept["engine"]})


def _without_workers(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "workers"}


def _outcome(pair: Pair, out: Path, failed: dict[Path, tuple[bool, str]]) -> Outcome:
    """What became of a cell."""
    who = pair[:4]
    if pair.plan is None:
        return Outcome(*who, "impossible", why=pair.why)
    folder = _folder(pair)
    if out / folder in failed:
        impossible, why = failed[out / folder]
        return Outcome(*who, "impossible" if impossible else "failed", why=why)
    result = _read_json(out / folder / "result.json")
    test, reason = result.get("test") or {}, result["reason"]
    ended = Outcome(*who, "failed", rounds=result["rounds"], why=reason, directory=folder)
    if reason == Reason.DIVERGED:  # what is left of the model is no better than guessing
        num_classes = _read_json(out / folder / "run.json")["data"]["num_classes"]
        return ended._replace(status="done", accuracy=1 / num_classes)
    if reason in FAILURES or "accuracy" not in test:
        return ended
    return ended._replace(status="done", accuracy=test["accuracy"], attack_success=test.get("attack_success"), why="")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): remove {path.parent} and start again") from error
    return found
