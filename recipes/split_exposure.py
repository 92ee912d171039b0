"""What a cut exposes of clients' samples and labels, with each defence, and what each defence costs in accuracy.

MNIST with `cnn_mcmahan` at three cuts: distance correlation and inversion of the final model's activations. Adult with
labels that stay at clients: labels that are read from gradients. Every figure is of one seed. Results are kept in a
file: stop it and start it again at will. About five minutes of one core.

    python recipes/split_exposure.py --out runs/split_exposure.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from atoll import Plan, run
from atoll.core.parts import Part
from atoll.core.probe import SAMPLE_LABELS, Work
from atoll.core.seeds import generator
from atoll.redteam.cut_judge import judge_cut
from atoll.simulation.cut_seat import watch_cut
from atoll.simulation.exposure import cut_exposure, model_vector

HERE = Path(__file__).parent
TABLE_ROUNDS = 5
DECODER_SECONDS = 5.0
"""Processor time of a decoder, so that other work on the machine does not change the figures much."""
IMAGES = Plan.from_toml((HERE / "split_mnist.toml").read_text()).replace(
    {"split.way": "splitfed_v2", "engine": "inline", "evaluation.every": 0}
)
LENGTHS = {"5": 18.0, "8": 10.0, "2": 22.0}
"""Cut -> the usual length of a sample's activations without a defence, to which noise is clipped."""
ORDER = ("none", "noise, once the length", "nopeek, weight 1", "frozen, labels kept, epsilon")
WIDTHS = {"2": 6272, "5": 3136, "8": 512}
TABLE = Plan(
    data="adult",
    model={"name": "mlp_2nn", "hidden": 64},
    rounds=TABLE_ROUNDS,
    partition={"num_clients": 20},
    policy={"size": 5},
    local={"batch_size": 64, "lr": 0.1},
    split={"cut": "2", "tail": "5", "way": "splitfed_v1"},
    engine="inline",
    evaluation={"every": 0},
)


DIGITS = Plan(
    model={"name": "mlp_2nn", "hidden": 64},
    rounds=6,
    partition={"num_clients": 5},
    policy={"size": 3},
    local={"batch_size": 10, "lr": 0.1},
    split={"cut": "2", "way": "splitfed_v2"},
    engine="inline",
    evaluation={"every": 0},
)
WEIGHTS = (0.0, 1.0, 10.0, 30.0)
"""Weights of nopeek that are tried on digits, where a run takes seconds."""


def noise(cut: str, times: float) -> dict[str, Any]:
    """Return noise that is `times` as long as activations are."""
    return {"name": "noise", "clip": LENGTHS[cut], "sigma": times / WIDTHS[cut] ** 0.5, "test_noise": True}


def image_defences(cut: str) -> dict[str, dict[str, Any]]:
    """Return what each defence changes of the plan, by its name in the table."""
    claimed = {"name": "activations", "clip": 1.0, "sigma": 6.0, "delta": 1e-5, "test_noise": True}
    frozen: dict[str, Any] = {"split.frozen": True, "split.tail": "9", "local.lr": 0.02}
    found: dict[str, dict[str, Any]] = {
        "none": {},
        "nopeek, weight 1": {"split.defences": [{"name": "nopeek", "weight": 1.0}]},
        "noise, once the length": {"split.defences": [noise(cut, 1.0)]},
    }
    if cut == "5":
        found["frozen, labels kept, epsilon"] = {**frozen, "privacy": claimed}
    return found


def image_figures(cut: str, changes: Mapping[str, Any], rounds: int, clients: int) -> dict[str, float]:
    """Train on MNIST, and measure what the final model exposes."""
    return figures_of(IMAGES.replace({"rounds": rounds, "policy.size": clients, "split.cut": cut, **changes}))


def digit_figures(weight: float) -> dict[str, float]:
    """Train on digits with nopeek."""
    defences = [{"name": "nopeek", "weight": weight}] if weight else []
    return figures_of(DIGITS.replace({"split.defences": defences}))


def figures_of(plan: Plan) -> dict[str, float]:
    """Train a plan, and measure what its final model exposes."""
    result = run(plan)
    found = cut_exposure(
        plan, model_vector(plan, dict(result.model.state_dict())), seconds=DECODER_SECONDS, now=time.process_time
    )
    assert found is not None
    epsilon = result.history[-1].get("privacy", {}).get("epsilon")
    return {
        "accuracy": result.accuracy,
        **{name: getattr(found, name) for name in ("dcor", "dcor_squared", "psnr", "psnr_floor")},
        **({} if epsilon is None else {"epsilon": epsilon}),
    }


LABEL_DEFENCES: dict[str, list[Any]] = {
    "none": [],
    "max_norm": [{"name": "max_norm", "test_noise": True}],
    "isotropic, scale 1": [{"name": "isotropic", "scale": 1.0, "test_noise": True}],
    "isotropic, scale 4": [{"name": "isotropic", "scale": 4.0, "test_noise": True}],
    "marvell, scale 1": [{"name": "marvell", "scale": 1.0, "test_noise": True}],
    "marvell, scale 4": [{"name": "marvell", "scale": 4.0, "test_noise": True}],
}


def label_figures(defences: list[Any]) -> dict[str, float]:
    """Train a plan, and read labels from the gradients of its last round."""
    plan = TABLE.replace({"split.defences": defences})
    watched = watch_cut(plan, TABLE_ROUNDS, since=TABLE_ROUNDS - 1)
    figures = {"auroc": run(plan).test["auroc"]}
    for name in ("gradient_norm", "gradient_direction", "tail_replay"):
        probe = Part(name).build("probes")
        guesses = probe.at_cut(watched.known, watched.sights, Work(generator(0, name), lambda: False))
        judged = judge_cut(SAMPLE_LABELS, watched, guesses)
        assert judged is not None
        figures[name] = judged.figures["AUC"]
        figures["usual label"] = judged.figures["share right by the usual label"]
        figures[f"{name}, right"] = judged.figures["share of labels right"]
    return figures


def main() -> None:
    """Measure every cell that the file does not have, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/split_exposure.json"))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3, help="clients of a round, with 600 images each")
    chosen = parser.parse_args()
    out, size = chosen.out, (chosen.rounds, chosen.clients)
    torch.set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, float]] = json.loads(out.read_text()) if out.exists() else {}
    cells: dict[str, Callable[[], dict[str, float]]] = {
        f"labels | {name}": lambda defences=defences: label_figures(defences)  # type: ignore[misc]
        for name, defences in LABEL_DEFENCES.items()
    }
    for weight in WEIGHTS:
        cells[f"digits | nopeek, weight {weight:g}"] = lambda weight=weight: digit_figures(weight)  # type: ignore[misc]
    images = [(cut, name, changes) for cut in LENGTHS for name, changes in image_defences(cut).items()]
    for cut, name, changes in sorted(images, key=lambda each: ORDER.index(each[1])):
        cells[f"{cut} | {name}"] = lambda cut=cut, changes=changes: image_figures(cut, changes, *size)  # type: ignore[misc]
    for name, measure in cells.items():
        if name not in done:
            done[name] = measure()
            out.write_text(json.dumps(done, indent=1) + "\n")
            print(name, done[name], flush=True)
    print_tables(done)


def print_tables(done: Mapping[str, Mapping[str, float]]) -> None:
    """Print both tables as Markdown."""
    print(
        "\n| cut after | defence | accuracy | distance correlation | bias-corrected square | PSNR | of the mean image |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, cell in sorted(done.items(), key=lambda item: item[0].split(" | ")[0]):
        cut, _, defence = name.partition(" | ")
        if cut != "labels":
            shown = defence + (f" ({cell['epsilon']:.1f})" if "epsilon" in cell else "")
            print(
                f"| `{cut}` | {shown} | {cell['accuracy']:.2%} | {cell['dcor']:.2f} | {cell['dcor_squared']:.2f} "
                f"| {cell['psnr']:.1f} dB | {cell['psnr_floor']:.1f} dB |"
            )
    print("\n| defence | test AUC | norm | direction | replay | labels right by replay | usual label |")
    print("|---|---|---|---|---|---|---|")
    for name, cell in done.items():
        cut, _, defence = name.partition(" | ")
        if cut == "labels":
            attacks = " | ".join(f"{cell[each]:.3f}" for each in ("gradient_norm", "gradient_direction", "tail_replay"))
            right = f"{cell['tail_replay, right']:.1%} | {cell['usual label']:.1%}"
            print(f"| {defence} | {cell['auroc']:.3f} | {attacks} | {right} |")


if __name__ == "__main__":
    main()
