"""Attack x defence: what every attack gets out of MNIST under every defence, and what each defence costs in accuracy.

Ten clients a round with 8 images each take one step, or with 1 image for attacks that search on a LeNet; each defence
changes that plan in one way. Attacks on membership need a model that remembers: there, clients train two epochs on 400
images, 15 rounds. Cells are kept: stop it and start it again at will. About ten minutes on one core.

    python recipes/redteam_defences.py            # writes docs/redteam_defences.table.md and .png
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import torch

from atoll import Dataset, Plan, run
from atoll.core.parts import Part
from atoll.core.probe import Guess, Probe, Work
from atoll.data.catalog.mnist import mnist
from atoll.redteam.image_judge import match
from atoll.redteam.membership_judge import auc, fair_candidates
from atoll.simulation.seat import Watched, samples_of, watch

NOISE = {"delta": 1e-5, "test_noise": True}
"""Noise from the plan's seed, so that a picture can be made again: it protects nobody."""
BLACK, COPY = 16.0, 40.0
"""The PSNR that a black image has of a thin digit, and that of a copy without a visible flaw, in dB."""
SIZE = 8
"""Images of a client unless a defence or an attack says otherwise."""


class Defence(NamedTuple):
    """How a defence changes a plan."""

    changes: Mapping[str, Any]
    size: int | None = None
    """Images of a client, all of which are in its batch; as many as the attack takes unless given."""
    cohort: int = 10
    steps: int = 1
    model: Any = None
    """In place of the fully connected one."""


class Cell(NamedTuple):
    """What an attack got under a defence."""

    text: str
    got: float | None
    """From 0, no more than without an attack, to 1, everything; None if it could not be tried."""


class Attack(NamedTuple):
    """A probe, on which model, and what counts."""

    model: Any
    figure: Callable[[Watched, list[Guess]], Cell]
    options: Mapping[str, Any] = {}
    size: int = SIZE
    """Images of a client."""


def _local_noise(sigma: float) -> Defence:
    return Defence({"privacy": {"name": "local", "clip": 1.0, "sigma": sigma, **NOISE}})


DEFENCES: dict[str, Defence] = {
    "none": Defence({}),
    "clip to 0.1": Defence({"uplink": [{"name": "clip", "norm": 0.1}]}),
    "noise 0.001": _local_noise(1e-3),
    "noise 0.01": _local_noise(1e-2),
    "noise 0.1": _local_noise(0.1),
    "noise 1": _local_noise(1.0),
    "8 bits": Defence({"uplink": [{"name": "quantise", "bits": 8}]}),
    "2 bits": Defence({"uplink": [{"name": "quantise", "bits": 2}]}),
    "top 10 %": Defence({"uplink": [{"name": "top_k", "fraction": 0.1}]}),
    "top 1 %": Defence({"uplink": [{"name": "top_k", "fraction": 0.01}]}),
    "batch 1": Defence({}, size=1),
    "batch 8": Defence({}, size=8),
    "batch 32": Defence({}, size=32),
    "5 steps": Defence({}, steps=5),
    "sum of 2": Defence({"secagg": {"scheme": "additive", "min_survivors": 2}}, cohort=2),
    "sum of 10": Defence({"secagg": {}}),
    "sum of 100": Defence({"secagg": {}}, cohort=100),
    "LoRA only": Defence({}, model={"name": "lora_mlp", "hidden": 64}),
    "sample DP": Defence({"privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, **NOISE}}),
    "central DP": Defence(
        {"privacy": {"name": "central", "clip": 1.0, "sigma": 1.0, **NOISE}, "sampler": {"name": "poisson"}}
    ),
    "distributed DP": Defence(
        {
            "privacy": {"name": "distributed", "clip": 1.0, "sigma": 1.0, **NOISE},
            "sampler": {"name": "round_robin"},
            "secagg": {},
        }
    ),
}
MLP, LENET = {"name": "mlp_2nn", "hidden": 64}, "lenet_sigmoid"


def _images(watched: Watched, guesses: list[Guess]) -> Cell:
    """Return the PSNR of the best image; what is beyond that of a black one counts, up to that of a good copy."""
    known, best = watched.known, -np.inf
    truths = [truth for sight in watched.truths for truth in sight]
    for guess in guesses:
        if guess.row is None or guess.x is None or not len(guess.x):
            continue
        true = samples_of(watched, truths[guess.row]).x[:100]
        best = max(best, *match(guess.x[:100], true, known.high - known.low).psnr)
    if not np.isfinite(best):
        return Cell("none", 0.0)
    return Cell(f"{best:.0f} dB", float(np.clip((best - BLACK) / (COPY - BLACK), 0, 1)))


def _labels(watched: Watched, guesses: list[Guess]) -> Cell:
    """Return the share of labels that counts cover, of the best row, beside what the usual counts do."""
    truths, num = [truth for sight in watched.truths for truth in sight], watched.known.num_classes
    usual_K = torch.bincount(watched.known.elsewhere.y, minlength=num).double()
    shares, usual = [0.0], [0.0]
    for guess in guesses:
        if guess.row is None or guess.counts_K is None:
            continue
        own_K = torch.bincount(samples_of(watched, truths[guess.row]).y, minlength=num).double()
        for into, counts_K in ((shares, guess.counts_K.double().clamp(min=0)), (usual, usual_K)):
            scaled_K = counts_K * own_K.sum() / counts_K.sum().clamp(min=1e-12)
            into.append(float(torch.minimum(scaled_K, own_K).sum() / own_K.sum()))
    best, floor = max(shares), min(max(usual), 0.99)
    return Cell(f"{100 * best:.0f} %", float(np.clip((best - floor) / (1 - floor), 0, 1)))


ATTACKS: dict[str, Attack] = {
    "linear_leak": Attack(MLP, _images),
    "trap_weights": Attack(MLP, _images),
    "r_gap": Attack(LENET, _images, size=1),
    "dlg": Attack(LENET, _images, {"restarts": 2, "iterations": 300}, size=1),
    "inverting_gradients": Attack(LENET, _images, {"restarts": 1, "iterations": 300}, size=1),
    "label_counts": Attack(MLP, _labels),
}
MEMBERSHIP = ("loss_threshold", "lira")


def some_of(full: Dataset, num: int, num_test: int = 2000) -> Dataset:
    """Return the first training and test images."""
    cut = {"train_x": full.train_x[:num], "train_y": full.train_y[:num]}
    return replace(full, **cut, test_x=full.test_x[:num_test], test_y=full.test_y[:num_test])


def plan_of(defence: Defence, model: Any, data: Dataset, own_size: int = SIZE) -> Plan:
    """Return the plan of attacks on updates, and of accuracy."""
    size = defence.size or own_size
    num_clients = min(1000, data.num_train // size)
    base = Plan(
        data=data,
        model=defence.model or model,
        partition={"name": "iid", "num_clients": num_clients, "samples_per_client": size},
        policy={"size": defence.cohort},
        local={"steps": defence.steps, "batch_size": "all", "lr": 0.3},
        evaluation={"every": 0},
        engine="inline",
    )
    return base.replace(defence.changes)


def remembering(defence: Defence, data: Dataset) -> Plan:
    """Return the plan of attacks on membership: few images, again and again, half of them held out."""
    base = Plan(
        data=data,
        model=defence.model or MLP,
        partition={"name": "iid", "num_clients": defence.cohort},
        local={"epochs": 2 * defence.steps, "batch_size": defence.size or SIZE, "lr": 0.1},
        evaluation={"every": 0, "holdout": 0.5},
        engine="inline",
    )
    return base.replace(defence.changes)


def attacked(name: str, defence: Defence, data: Dataset, seconds: float) -> Cell:
    """Let one probe attack what the server sees of one round; a search looks at the first row alone."""
    attack, rng = ATTACKS[name], np.random.default_rng(0)
    if defence.model is not None and attack.model is LENET:
        return Cell("-", None)
    probe: Probe = Part(name, **attack.options).build("probes")
    until = time.process_time() + seconds  # others may use the machine too
    work = Work(rng, lambda: time.process_time() > until)
    plan, plant = plan_of(defence, attack.model, data, attack.size), probe.plant
    watched = watch(plan, 1, elsewhere=500)
    if not watched.sights or probe.why_not(watched.known, watched.sights) is not None:
        return Cell("-", None)
    if plant is not None:
        watched = watch(plan, 1, plant=lambda known, model_M: plant(known, model_M, work), elsewhere=500)
    [sight, *_] = watched.sights
    first = sight._replace(
        rows=sight.rows.rows(torch.arange(len(sight.num_clients_R)) == 0),
        num_clients_R=sight.num_clients_R[:1],
        num_samples_R=sight.num_samples_R[:1],
        sender_R=sight.sender_R[:1],
        num_steps_R=sight.num_steps_R[:1],
    )
    return attack.figure(watched, probe.run(watched.known, [first if attack.model is LENET else sight], work))


def members_found(names: Sequence[str], defence: Defence, data: Dataset, rounds: int) -> dict[str, Cell]:
    """Let attacks tell members from others, in one run."""
    watched = watch(remembering(defence, data), rounds, elsewhere=1000)
    candidates, member_C = fair_candidates(watched, data.num_train // 2, np.random.default_rng(0))
    work, cells = Work(np.random.default_rng(5), lambda: False, candidates), dict[str, Cell]()
    for name in names:
        [guess] = Part(name).build("probes").run(watched.known, watched.sights, work)
        assert guess.score_C is not None
        area = auc(guess.score_C, member_C)
        cells[name] = Cell(f"{area:.2f}", float(np.clip(2 * area - 1, 0, 1)))
    return cells


def accuracy_of(defence: Defence, data: Dataset, rounds: int) -> Cell:
    """Return the test accuracy after some rounds, in percent; sums are made in the open, which differs by rounding."""
    changes = {"rounds": rounds, "engine": "auto", "evaluation": {"every": rounds}, "secagg": None}
    found = run(plan_of(defence, MLP, data).replace(changes)).accuracy
    return Cell(f"{100 * found:.0f} %", None)


def table(cells: Mapping[str, Mapping[str, Cell]], columns: Sequence[str]) -> str:
    """Return all cells as Markdown, a row for each defence."""
    lines = [f"| defence | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    rows = [f"| {name} | {' | '.join(row[column].text for column in columns)} |" for name, row in cells.items()]
    return "\n".join(lines + rows)


def draw(cells: Mapping[str, Mapping[str, Cell]], columns: Sequence[str], path: Path) -> None:
    """Draw the heat map; cells of attacks that could not be tried are grey."""
    got = np.array([[np.nan if (g := row[column].got) is None else g for column in columns] for row in cells.values()])
    figure, axes = plt.subplots(figsize=(1.5 + 1.1 * len(columns), 1 + 0.36 * len(cells)), layout="constrained")
    colours = plt.get_cmap("YlOrRd").with_extremes(bad="#e8e8e8")
    axes.imshow(got, cmap=colours, vmin=0, vmax=1, aspect="auto")
    for place, row in enumerate(cells.values()):
        for column, name in enumerate(columns):
            dark = (row[name].got or 0) > 0.6
            axes.text(column, place, row[name].text, ha="center", va="center", color="white" if dark else "black")
    axes.set_xticks(range(len(columns)), [name.replace("_", "\n") for name in columns])
    axes.set_yticks(range(len(cells)), list(cells))
    axes.xaxis.tick_top()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Fill in the cells that are missing, then write the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS, *MEMBERSHIP], default=[*ATTACKS, *MEMBERSHIP])
    parser.add_argument("--defences", nargs="+", choices=DEFENCES, default=list(DEFENCES))
    parser.add_argument("--seconds", type=float, default=6.0, help="Processor time of one cell.")
    parser.add_argument("--rounds", type=int, default=100, help="Rounds after which accuracy is measured.")
    parser.add_argument("--member-rounds", type=int, default=15)
    parser.add_argument("--cells", type=Path, default=Path("runs/redteam_defences.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/redteam_defences"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    full = mnist(quiet=True)
    many, few = some_of(full, 8000), some_of(full, 800)
    done: dict[str, dict[str, Any]] = json.loads(args.cells.read_text()) if args.cells.exists() else {}
    for name in args.defences:
        defence, cells = DEFENCES[name], done.setdefault(name, {})
        for attack in (each for each in args.attacks if each in ATTACKS and each not in cells):
            cells[attack] = attacked(attack, defence, many, args.seconds)
        missing = [each for each in args.attacks if each in MEMBERSHIP and each not in cells]
        cells |= members_found(missing, defence, few, args.member_rounds) if missing else {}
        if "accuracy" not in cells:
            cells["accuracy"] = accuracy_of(defence, many, args.rounds)
        args.cells.parent.mkdir(parents=True, exist_ok=True)
        args.cells.write_text(json.dumps(done, indent=1))
        print(name, {key: Cell(*value).text for key, value in cells.items()}, flush=True)
    found = {name: {key: Cell(*value) for key, value in done[name].items()} for name in args.defences}
    columns = [*args.attacks, "accuracy"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".table.md").write_text(table(found, columns) + "\n")
    draw(found, columns, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
