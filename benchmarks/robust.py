"""Robust rules beside plain PyTorch and ByzFL, in one process. Run: python benchmarks/robust.py

All take turns on the same matrix of 100 updates of 1,000,000 parameters, with two threads; a figure is the least over
the turns. ByzFL (pip install --no-deps byzfl==0.0.11) is timed if it can be imported; it needs torchvision and seaborn
only to draw and to load data, so stand-ins do. Memory is the most that was held during the call, matrix included.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from atoll.core.messages import Update
from atoll.core.parts import Part

F = 10
TAU = 500.0
WEISZFELD = {"nu": 0.1, "iterations": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "median": {},
    "trimmed_mean": {"f": F},
    "krum": {"f": F},
    "multi_krum": {"f": F},
    "geometric_median": WEISZFELD,
    "centered_clipping": {"tau": TAU},
    "norm_clipping": {},
    "caf": {"f": F},
    "bulyan": {"f": F},
    "minimum_diameter": {"f": 6},
    "nnm": {"f": F, "rule": {"name": "trimmed_mean", "f": F}},
    "bucketing": {"rule": {"name": "trimmed_mean", "f": F}},
}


def plain_median(x_CD: Tensor) -> Tensor:
    num = len(x_CD)
    sorted_CD = x_CD.sort(dim=0).values
    return (sorted_CD[(num - 1) // 2] + sorted_CD[num // 2]) / 2


def plain_trimmed_mean(x_CD: Tensor) -> Tensor:
    return x_CD.sort(dim=0).values[F : len(x_CD) - F].mean(0)


def scores(x_CD: Tensor) -> Tensor:
    nearest = len(x_CD) - F - 2
    return torch.cdist(x_CD, x_CD).square().sort(dim=1).values[:, 1 : 1 + nearest].sum(1)


def plain_krum(x_CD: Tensor) -> Tensor:
    return x_CD[scores(x_CD).argmin()]


def plain_multi_krum(x_CD: Tensor) -> Tensor:
    return x_CD[scores(x_CD).argsort()[: len(x_CD) - F - 2]].mean(0)


def plain_geometric_median(x_CD: Tensor) -> Tensor:
    z_D = x_CD.mean(0)
    for _ in range(WEISZFELD["iterations"]):
        share_C = 1 / (x_CD - z_D).norm(dim=1).clamp(min=WEISZFELD["nu"])
        z_D = (share_C / share_C.sum()) @ x_CD
    return z_D


def plain_centered_clipping(x_CD: Tensor) -> Tensor:
    v_D = torch.zeros_like(x_CD[0])
    away_CD = x_CD - v_D
    return v_D + (away_CD * (TAU / away_CD.norm(dim=1)).clamp(max=1)[:, None]).mean(0)


PLAIN = {name.removeprefix("plain_"): rule for name, rule in list(globals().items()) if name.startswith("plain_")}


def byzfl_rules() -> dict[str, Callable[[Tensor], Tensor]]:
    """ByzFL's rules of the same kind, or none."""
    stand_ins = ["torchvision", "torchvision.transforms", "torchvision.datasets", "seaborn"]
    for name in stand_ins:
        sys.modules.setdefault(name, MagicMock(__name__=name, __path__=[], __spec__=None))
    try:
        import byzfl
    except ImportError as error:
        print(f"ByzFL is left out: {error}")
        return {}
    made = {
        "median": byzfl.Median(),
        "trimmed_mean": byzfl.TrMean(f=F),
        "krum": byzfl.Krum(f=F),
        "multi_krum": byzfl.MultiKrum(f=F),
        "geometric_median": byzfl.GeometricMedian(nu=WEISZFELD["nu"], T=WEISZFELD["iterations"]),
        "caf": byzfl.CAF(f=F),
    }
    fresh = {"centered_clipping": lambda x_CD: byzfl.CenteredClipping(L=1, tau=TAU)(x_CD)}  # it remembers
    return made | fresh


def ours(name: str) -> Callable[[Tensor], Tensor]:
    rule = Part(name, **OPTIONS[name]).build("aggregators")

    def call(x_CD: Tensor) -> Tensor:
        acc = rule.add(rule.zero(), Update(x_CD, torch.ones(len(x_CD)), {}))
        return rule.finish(acc, rule.init())[0].delta_D

    return call


def memory(kind: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since it was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024


def measured(call: Callable[[Tensor], Tensor], x_CD: Tensor) -> tuple[float, float]:
    """Seconds, and the most memory held during the call as a multiple of the matrix."""
    gc.collect()
    x_CD.sum()  # a system may take cold pages away; they are not the rule's
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory("VmRSS"), time.perf_counter()
    try:
        call(x_CD)
    except RuntimeError as error:
        print(f"  cannot: {error}")
        return float("nan"), float("nan")
    return time.perf_counter() - start, 1 + (memory("VmHWM") - before) / x_CD.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    torch.set_num_threads(2)
    x_CD = torch.randn(args.clients, args.params, generator=torch.Generator().manual_seed(0))
    peers = byzfl_rules()
    equal_CD = x_CD.clone()
    equal_CD[:F] = equal_CD[0]
    cases = {name: (name, x_CD) for name in OPTIONS} | {f"krum, {F} updates equal": ("krum", equal_CD)}
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for _ in range(args.turns):
        for name, (rule, rows_CD) in cases.items():
            each = {"atoll": ours(rule)} | {k: v[rule] for k, v in (("torch", PLAIN), ("byzfl", peers)) if rule in v}
            for who, call in each.items():
                seconds, held = measured(call, rows_CD)
                old = best.get((name, who), (float("inf"), 0.0))
                best[name, who] = (min(old[0], seconds), max(old[1], held)) if seconds == seconds else (seconds, held)
                print(f"{name:>25} {who:>6} {seconds:8.3f} s {held:6.2f} x", flush=True)
    lines = [
        f"Made by `python benchmarks/robust.py`: {args.clients} updates of {args.params:,} parameters, the best of "
        f"{args.turns} turns, {len(os.sched_getaffinity(0))} cores with a load of {os.getloadavg()[1]:.1f} by this and "
        "whatever else ran. Memory is in matrices, the one given included.",
        "",
        "| rule | seconds | memory | plain PyTorch | times faster | memory | ByzFL 0.0.11 | times faster | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in cases:
        seconds, held = best[name, "atoll"]
        cells = [name, f"{seconds:.3f}", f"{held:.2f}"]
        for who in ("torch", "byzfl"):
            other = best.get((name, who))
            if other is None:
                cells += ["", "", ""]
            elif other[0] != other[0]:
                cells += ["fails", "", ""]
            else:
                cells += [f"{other[0]:.3f}", f"{other[0] / seconds:.1f}", f"{other[1]:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    args.out.write_text(text)


if __name__ == "__main__":
    main()
