"""Measure what only a real accelerator can show: speed, memory, repetition, agreement, and lower precision.

    python benchmarks/gpu.py                      every work on every accelerator that torch finds
    python benchmarks/gpu.py --device cuda:1 --only mlp_2nn
    python benchmarks/gpu.py --json found.json    the figures for machines, too

Where there is no accelerator it says so and ends with code 3; nothing is measured on the processor in its place. Rates
are medians of rounds of one process; each is printed beside the processor's, with one thread, on the same machine.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

from atoll import Plan, run
from atoll.train.devices import accelerator, num_devices, peak_memory

NO_DEVICE = 3
SMALL = {
    "data": "mnist",
    "partition": {"name": "shards", "num_clients": 100},
    "local": {"epochs": 1, "batch_size": 10, "lr": 0.1},
    "policy": {"size": 20},
    "evaluation": {"every": 0},
    "rounds": 4,
}
WORKS = {
    "logistic": {**SMALL, "model": "logistic"},
    "mlp_2nn": {**SMALL, "model": "mlp_2nn"},
    "mlp_2nn, large batches": {**SMALL, "model": "mlp_2nn", "local": {"steps": 20, "batch_size": 256, "lr": 0.1}},
    "cnn_mcmahan": {**SMALL, "model": "cnn_mcmahan", "local": {"steps": 20, "batch_size": 32, "lr": 0.1}},
    "scaffold": {**SMALL, "model": "mlp_2nn", "algorithm": "scaffold"},
    "private steps": {
        **SMALL,
        "model": "cnn_mcmahan",
        "local": {"steps": 5, "batch_size": 64, "lr": 0.1},
        "privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True},
    },
}
CLOSE = 0.02
"""How far a device's model may be from the processor's, as a share of how far both moved: the order of sums differs."""


def seconds(result):
    """Seconds of the median round."""
    return statistics.median(row["seconds"] for row in (result.history[1:] or result.history))


def apart(one, other, first):
    """How far two models are apart, as a share of how far the first moved."""
    return float((one - other).norm() / (one - first).norm().clamp(min=1e-12))


def measured(name, settings, device):
    """Run a work on the processor and a device, and say what can be said."""
    plan = Plan(**settings)
    first = run(plan.replace({"rounds": 0, "engine": "inline"})).params_D
    here = run(plan.replace({"engine": {"name": "vectorised"}}))
    found = {"work": name, "device": device, "cpu_round_seconds": seconds(here)}
    runs = {}
    ways = {"float32": {}, "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"}}
    if device.startswith("cuda"):
        ways["tf32"] = {"tf32": True}
    if "privacy" in settings:
        ways = {"float32": {}}
    for way, options in ways.items():
        engine = {"name": "vectorised", "device": device, **options}

        def work(way=way, engine=engine):
            runs[way] = run(plan.replace({"engine": engine}))

        peak = peak_memory(torch.device(device), work)
        found[way] = {
            "round_seconds": seconds(runs[way]),
            "times_cpu": seconds(here) / seconds(runs[way]),
            "stack": runs[way].engine.get("stack", 0),
            "peak_bytes": peak,
            "apart_from_cpu": apart(here.params_D, runs[way].params_D, first),
        }
    again = run(plan.replace({"engine": runs["float32"].engine}))
    found["repeats"] = torch.equal(again.params_D, runs["float32"].params_D)
    resident = run(plan.replace({"engine": {"name": "inline", "device": device}, "rounds": 2}))
    found["one_by_one_round_seconds"] = seconds(resident)
    return found


def spread(settings):
    """Compare one device with all of its kind as workers: the same bits, and how much faster."""
    plan, kind = Plan(**{**settings, "policy": {"size": 100}}), accelerator()
    alone = run(plan.replace({"engine": {"name": "processes", "device": f"{kind}:0"}}))
    engine = {"name": "processes", "device": kind, "stack": alone.engine["stack"]}
    together = run(plan.replace({"engine": engine}))
    return {
        "work": "several devices",
        "num_devices": num_devices(kind),
        "same_bits": torch.equal(alone.params_D, together.params_D),
        "times_one": seconds(alone) / seconds(together),
    }


def problems(found):
    """What is not as docs/devices.md promises."""
    if found["work"] == "several devices":
        return [] if found["same_bits"] else ["several devices end with other bits than one"]
    wrong = [] if found["repeats"] else [f"{found['work']}: a second run ends with other bits"]
    if found["float32"]["apart_from_cpu"] > CLOSE:
        wrong.append(f"{found['work']}: {found['float32']['apart_from_cpu']:.3f} apart from the processor's model")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="", help="one device, e.g. cuda:1; all that torch finds unless given")
    parser.add_argument("--only", default="", help="works whose names hold this")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    kind = accelerator()
    if kind is None:
        print(
            f"torch {torch.__version__} finds no accelerator here, so there is nothing to measure: run this on a "
            "machine with a GPU, with a torch that is built for it (docs/devices.md lists what it shows)",
            file=sys.stderr,
        )
        return NO_DEVICE
    devices = [args.device] if args.device else [f"{kind}:{number}" for number in range(num_devices(kind))]
    rows = []
    for device in devices:
        for name, settings in WORKS.items():
            if args.only.lower() in name:
                rows.append(measured(name, settings, device))
                print(json.dumps(rows[-1]), flush=True)
    if num_devices(kind) > 1 and not args.device and not args.only:
        rows.append(spread(WORKS["mlp_2nn"]))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    wrong = [line for row in rows for line in problems(row)]
    print("\n".join(wrong) or "all as promised", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
