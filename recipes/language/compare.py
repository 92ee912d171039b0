"""Federated fine-tuning of stories15M, measured: methods, codecs, ranks and privacy, in nats a token.

Clients are roles of Shakespeare's plays. Runs are kept: stop it and start it again at will. Rates and numbers of steps
were chosen on seed 100, whose roles no table has. Figures go to docs/language_results.json, tables to the page of that
name.

    python recipes/language/stories15m.py models/stories15m
    python recipes/language/compare.py methods codecs ranks privacy
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compare_private import privacy
from compare_runs import Runs, mean_nats
from compare_tables import METHODS, codecs_table, methods_table, privacy_table, ranks_table

from atoll import Plan
from atoll.data.targets import IGNORED
from atoll.report.reading import read_run
from atoll.train.federation import Federation, build_federation

Json = dict[str, Any]
MODEL_BYTES = 60_766_720
"""Bytes of the base's weights in float32."""
RATES = {"local": 0.002, "ffa_lora": 0.01, "flora": 0.002}
"""Local rates other than 0.005."""
CODECS: dict[str, list[Any]] = {
    "none": [],
    "quantise 8 bits": [{"name": "quantise", "bits": 8}],
    "top_k 10 %, quantise 8 bits": [{"name": "top_k", "fraction": 0.1}, {"name": "quantise", "bits": 8}],
}
RANKS = {"all 16": [], "4, 8, 16": [4, 8, 16]}
ROLES = Plan(
    rounds=16,
    data={"name": "atoll.data.sequences:shakespeare", "length": 32, "min_characters": 7000, "test": 0.01},
    partition={
        "name": "mixture",
        "parts": [
            {"name": "natural", "num_clients": 20, "min_samples": 60},
            {"name": "at_most", "samples": 60},
        ],
    },
    policy={"fraction": 1.0},
    model={"name": "hf_causal", "path": "models/stories15m", "dtype": "bfloat16"},
    algorithm="fedit",
    local={"steps": 6, "batch_size": 4, "lr": 0.005, "optimizer": "adam"},
    evaluation={"metrics": ["perplexity"], "every": 0, "clients_every": 16, "holdout": 1 / 3},
    engine="inline",
)
"""Roles with little text each: 40 rows of 32 tokens to train on, 20 to be measured on."""


def of_base(plan: Plan) -> list[float]:
    """Return nats a token of the base on each client's held-out text."""
    federation, model = build_federation(plan), plan.model.build("models").eval()
    return [_nats(model, federation, federation.evaluation_indices(client)) for client in _clients(federation)]


def of_unigram(plan: Plan) -> Json:
    """Return nats a token of token frequencies of all clients' training text, (n_k + alpha) / (n + alpha V).

    The alpha is the one that is best on the held-out text.
    """
    federation = build_federation(plan)
    data = federation.dataset

    def targets(indices: np.ndarray) -> np.ndarray:
        rows = data.train_y[indices]
        return rows[rows != IGNORED]

    clients = _clients(federation)
    count_K = np.bincount(
        np.concatenate([targets(federation.train_indices(client)) for client in clients]), minlength=data.num_classes
    )
    held = [targets(federation.evaluation_indices(client)) for client in clients]
    best: Json = {"mean": math.inf}
    for alpha in 10.0 ** np.arange(-4, 1.01, 0.25):
        surprise_K = -np.log((count_K + alpha) / (count_K.sum() + alpha * len(count_K)))
        nats = [float(surprise_K[some].mean()) for some in held]
        if statistics.fmean(nats) < best["mean"]:
            best = {"mean": statistics.fmean(nats), "alpha": float(alpha), "tokens": int(count_K.sum()), "nats": nats}
    return best


def _clients(federation: Federation) -> range:
    return range(federation.num_clients)


def _nats(model: torch.nn.Module, federation: Federation, indices: np.ndarray) -> float:
    return mean_nats(model, np.asarray(federation.dataset.train_x[indices]), federation.dataset.train_y[indices])


def methods(runs: Runs, seeds: Sequence[int]) -> Json:
    """Measure the base, a unigram model, each client alone at its best step, and every method."""
    by_seed: dict[str, Json] = {}
    for seed in seeds:
        plan = runs.plan(ROLES, {"seed": seed})
        alone = runs.plan(ROLES, {"seed": seed, "algorithm": "local", "local.lr": RATES["local"], "local.steps": 6})
        local = np.array(runs.nats(f"local-{seed}", alone.replace({"rounds": 6, "evaluation.clients_every": 1})))
        row: Json = {
            "base": statistics.fmean(runs.kept(f"base-{seed}", lambda plan=plan: of_base(plan))),
            "unigram": runs.kept(f"unigram-{seed}", lambda plan=plan: of_unigram(plan))["mean"],
            "local": float(local.min(axis=0).mean()),
        }
        for name in METHODS:
            path = runs.done(f"{name}-{seed}", _federated(runs, name, seed))
            row[name] = last_nats(path)
            row[f"{name} error"] = (read_run(path).rows[-1].get("algorithm") or {}).get("aggregation_error")
        by_seed[str(seed)] = row
    return by_seed


def _federated(runs: Runs, name: str, seed: int, changes: Mapping[str, object] | None = None) -> Plan:
    settings = {"seed": seed, "algorithm": name, "local.lr": RATES.get(name, ROLES.local.lr)}
    return runs.plan(ROLES, {**settings, **(changes or {})})


def last_nats(path: Path) -> float:
    """Return the mean over clients of nats a token at the end of a run."""
    record = read_run(path)
    assert record.clients is not None
    return statistics.fmean(math.log(value) for value in record.clients["perplexity"])


def _bytes_an_update(path: Path) -> float:
    record = read_run(path)
    return record.rows[-1]["bytes_up"] / sum(row["clients"] for row in record.rows)


def codecs(runs: Runs, seeds: Sequence[int]) -> Json:
    """Measure fedit with codecs on the uplink: loss, and how many times fewer bytes than the model."""
    found: Json = {}
    for name, uplink in CODECS.items():
        slug = "fedit" if not uplink else f"codec-{list(CODECS).index(name)}"
        paths = [runs.done(f"{slug}-{seed}", _federated(runs, "fedit", seed, {"uplink": uplink})) for seed in seeds]
        num_bytes = statistics.fmean(map(_bytes_an_update, paths))
        nats = {str(seed): last_nats(path) for seed, path in zip(seeds, paths, strict=True)}
        found[name] = {"bytes": num_bytes, "fewer": MODEL_BYTES / num_bytes, "nats": nats}
    return found


def ranks(runs: Runs, seeds: Sequence[int]) -> Json:
    """Measure clients of different ranks beside all at the largest."""
    found: Json = {}
    for name, some in RANKS.items():
        changes = {"model.rank": 16, "model.alpha": 32.0, "algorithm.ranks": some}
        slug = f"rank{'s' * bool(some)}-16"
        paths = [runs.done(f"{slug}-{seed}", _federated(runs, "fedit", seed, changes)) for seed in seeds]
        found[name] = {str(seed): last_nats(path) for seed, path in zip(seeds, paths, strict=True)}
    return found


TABLES: dict[str, tuple[Callable[[Runs, Sequence[int]], Json], Callable[[Json], list[str]]]] = {
    "methods": (methods, methods_table),
    "codecs": (codecs, codecs_table),
    "ranks": (ranks, ranks_table),
    "privacy": (privacy, privacy_table),
}


def write(name: str, found: Json, lines: Sequence[str], out: Path) -> None:
    """Write figures to the JSON file, and the table to its place on the page."""
    figures, page = out / "language_results.json", out / "language_results.md"
    known = json.loads(figures.read_text()) if figures.exists() else {}
    figures.write_text(json.dumps({**known, name: found}, indent=1) + "\n")
    table = [lines[0], f"|{'---|' * (lines[0].count(' | ') + 1)}", *lines[1:]]
    head, _, rest = page.read_text().partition(f"<!-- {name} -->\n")
    page.write_text(
        f"{head}<!-- {name} -->\n" + "\n".join(table) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    )


def main() -> None:
    """Run what is missing, then write tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", choices=TABLES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", default="models/stories15m")
    parser.add_argument("--runs", type=Path, default=Path("runs/language"))
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row of privacy after these")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    TABLES["privacy"] = functools.partial(privacy, until=time.monotonic() + 60 * args.minutes), privacy_table
    for name in args.tables:
        measure, table = TABLES[name]
        found = measure(Runs(args.runs, args.model), args.seeds)
        lines = table(found)
        print("\n".join(lines), flush=True)
        write(name, found, lines, args.out)


if __name__ == "__main__":
    main()
