"""Which kind of personalisation when: every personal method on several kinds of difference between clients.

Each case is a plan in this directory, and `atoll personal` makes its table; two more questions need runs of their own
(groups that somebody knew beforehand, clients that join later). Options were chosen on seeds 100 and 101, which no
table has. Runs are kept: stop it and start it again at will.

    python recipes/personal/guide.py                     # rewrites the tables and pictures of docs/which_personal.md
    python recipes/personal/guide.py --only feature_skew
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from known_groups import known

from atoll import Plan, compare_personal, run
from atoll.matrix import part_of
from atoll.report.personal import ALONE, PersonalTable, table_rows
from atoll.report.spread import over_seeds

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "which_personal.md"
METHODS = {
    "fine_tuning": "fine_tuning:steps=100",
    "per_fedavg": "per_fedavg:alpha=0.1:steps=50",
    "interpolation": "interpolation",
    "apfl": "apfl",
    "ditto": "ditto:lam=0.01",
    "mean_regularised": "mean_regularised:lam=0.01",
    "pfedme": "pfedme:lam=1:steps=3",
    "fedper": "fedper",
    "fedrep": "fedrep",
    "fedbn": "fedbn",
    "lg_fedavg": "lg_fedavg",
    "ifca": "ifca",
}
"""Algorithm -> the method with its options, unless a case has others."""
EVERY, ONE = (0, 1, 2), (0,)
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "fashion_5_classes": (EVERY, tuple(METHODS)),
    "fashion_in_turn": (EVERY, tuple(METHODS)),
    "cifar_classes": (ONE, tuple(METHODS)),
    "feature_skew": (EVERY, ("fine_tuning", "fedper", "fedbn", "lg_fedavg")),
    "swapped_labels": (EVERY, tuple(METHODS)),
    "pfllib_fashion": (ONE, ("fine_tuning", "ditto", "fedper", "fedrep", "lg_fedavg")),
    "attacked": (EVERY, tuple(METHODS)),
}
"""Case -> its seeds and its algorithms: all but where a run takes minutes."""
VERBS = {"refused": "is refused", "failed": "failed", "done": "has nothing to be compared with"}
COLUMNS = ("over alone", "worst tenth", "better off", "up", "gradients")
NEWCOMERS = ("fedavg", "per_fedavg:alpha=0.05", "per_fedavg:alpha=0.01:way=hessian_free", "fedper", "local")


def compared(case: str, runs: Path, seeds: Sequence[int] | None) -> PersonalTable:
    """Return the table of a case, after what is missing has run."""
    print(case)
    plan = Plan.from_toml((HERE / f"{case}.toml").read_text())
    chosen, algorithms = CASES[case]
    methods = [METHODS[name] for name in algorithms]
    return compare_personal(plan, out=runs / case, methods=methods, seeds=seeds or chosen, progress=True)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first row has the titles."""
    titles, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([titles, "|" + "---|" * len(rows[0]), *others])


def case_text(table: PersonalTable) -> str:
    """Return the table of a case, from the best method on, and what was refused."""
    titles, rows = table_rows(table)
    places = [0, 1, *(titles.index(title) for title in COLUMNS)]
    without = {f"`{each.method}` {VERBS[each.status]}: {each.why}" for each in table.problems}
    chosen = [[row[place] for place in places] for row in [titles, *rows]]
    return "\n\n".join([markdown(chosen), *sorted(without)])


def groups_text(runs: Path, seeds: Sequence[int]) -> str:
    """Return what groups that are known give beside groups that IFCA must find."""
    plan = Plan.from_toml((HERE / "swapped_labels.toml").read_text())
    rows = [["seed", "a model for each known group", "ifca", "groups found"]]
    for seed in seeds:
        now = known(plan, seed, runs / "known_groups")
        found = "all" if now.found else "not all"
        rows.append([str(seed), f"{100 * now.knowing:.2f} %", f"{100 * now.finding:.2f} %", found])
    return markdown(rows)


def newcomers_text(runs: Path, seeds: Sequence[int]) -> str:
    """Return what clients get that join after training, by steps of adaptation."""
    base = Plan.from_toml((HERE / "new_clients.toml").read_text())
    steps = base.evaluation.adapt_steps
    rows = [["trained by", *(f"after {k} step{'s' * (k != 1)}" if k else "on arrival" for k in steps)]]
    for method in NEWCOMERS:
        figures = []
        for seed in seeds:
            path = runs / "new_clients" / f"{'_'.join(re.findall('[a-z0-9]+', method))}_{seed}"
            plan = base.replace({"seed": seed, "algorithm": part_of(method, "algorithms").to_dict()})
            result = run(plan, out=path, resume=path.exists(), progress=True)
            figures.append([100 * result.new_clients[k]["mean"] for k in steps])
        spreads = [over_seeds(values) for values in zip(*figures, strict=True)]
        rows.append([method, *(f"{each.mean:.1f} ± {each.std or 0:.1f} %" for each in spreads)])
    return markdown(rows)


def heat_map(tables: dict[str, PersonalTable], target: Path) -> None:
    """Draw by how many points each method is better than alone, by case."""
    names = ["fedavg", *METHODS]
    gains = np.full((len(names), len(tables)), np.nan)
    for column, table in enumerate(tables.values()):
        for method in table.ranked():
            row, name = table.row(method), method.split(":")[0]
            if row is not None and name in names:
                gains[names.index(name), column] = 100 * row.gain.mean
    figure, axes = plt.subplots(figsize=(1.5 + 1.25 * len(tables), 6.5), layout="constrained")
    axes.imshow(gains, cmap="RdYlGn", vmin=-15, vmax=15, aspect="auto")
    axes.set_yticks(range(len(names)), names)
    axes.set_xticks(range(len(tables)), [case.replace("_", "\n") for case in tables])
    for (row, column), gain in np.ndenumerate(gains):
        text = "–" if np.isnan(gain) else f"{gain:+.1f}"
        colour = "white" if abs(gain) > 12 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=9, color=colour)
    axes.set_title("points of accuracy over training alone, mean over clients and seeds")
    figure.savefig(target, dpi=120)
    plt.close(figure)


def clients_picture(tables: dict[str, PersonalTable], target: Path) -> None:
    """Draw for every case how single clients fare beside training alone."""
    figure, places = plt.subplots(
        len(tables), 1, figsize=(8, 2.6 * len(tables)), layout="constrained", squeeze=False, sharex=False
    )
    for axes, (case, table) in zip(places[:, 0], tables.items(), strict=True):
        methods = [method for method in reversed(table.ranked()) if method != ALONE]
        values = [np.concatenate([table.gains(each) for each in table.done(method)]) * 100 for method in methods]
        axes.boxplot(values, orientation="horizontal", showfliers=False, tick_labels=methods)
        axes.axvline(0, color="0.5", linewidth=1)
        axes.set(title=case, xlabel="points over alone, by client")
        axes.tick_params(axis="y", labelsize=7)
    figure.savefig(target, dpi=90)
    plt.close(figure)


def put(text: str, mark: str, block: str) -> str:
    """Replace what stands between the marks of a block on the page."""
    pattern = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.S)
    if not pattern.search(text):
        raise SystemExit(f"{PAGE} has no block <!-- {mark} --> ... <!-- end -->: add it")
    return pattern.sub(lambda found: f"{found[1]}{block}\n{found[2]}", text)


def main() -> None:
    """Run what is missing, then rewrite tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the cases' own")
    parser.add_argument("--only", nargs="+", choices=[*CASES, "known_groups", "new_clients"])
    parser.add_argument("--runs", type=Path, default=Path("runs/which_personal"))
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    chosen = args.only or [*CASES, "known_groups", "new_clients"]
    tables = {case: compared(case, args.runs, args.seeds) for case in CASES if case in chosen}
    blocks = {case: case_text(table) for case, table in tables.items()}
    if "known_groups" in chosen:
        blocks["known_groups"] = groups_text(args.runs, args.seeds or EVERY)
    if "new_clients" in chosen:
        blocks["new_clients"] = newcomers_text(args.runs, args.seeds or EVERY)
    text = args.page.read_text()
    for mark, block in blocks.items():
        text = put(text, mark, block)
    args.page.write_text(text)
    if len(tables) == len(CASES):
        heat_map(tables, args.page.with_suffix(".png"))
        clients_picture(tables, args.page.with_name(f"{args.page.stem}-clients.png"))


if __name__ == "__main__":
    main()
