"""Plans over all families whose results are known to the bit, and how they are recorded.

Record them anew with `python tests/laws/golden_plans.py`, and only where results were wrong before.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from atoll.api import Result, run
from atoll.core.plan import Plan

FILE = Path(__file__).with_name("golden.json")
PLAN: dict[str, Any] = {
    "partition": {"name": "dirichlet", "num_clients": 12, "alpha": 0.5},
    "model": {"name": "mlp_2nn", "hidden": 16},
    "policy": {"size": 6},
    "local": {"lr": 0.1, "batch_size": 16},
    "rounds": 3,
    "engine": "inline",
    "evaluation": {"every": 2, "clients_every": 3},
}
PUBLIC = {"name": "held_out", "fraction": 0.1}
NOISE = {"clip": 0.5, "sigma": 1.0, "delta": 1e-5, "test_noise": True}
PRIVATE = {"evaluation": {"every": 1}, "sampler": "poisson"}
PLANS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox, stacked": {"algorithm": "fedprox", "engine": {"name": "vectorised", "stack": 3}},
    "scaffold, processes": {"algorithm": "scaffold", "engine": {"name": "processes", "workers": 2, "stack": 3}},
    "fednova": {"algorithm": "fednova", "uplink": ["eden"]},
    "feddyn": {"algorithm": "feddyn"},
    "fedadam, importance": {"algorithm": "fedadam", "sampler": "importance"},
    "fedsam, group norm": {"algorithm": "fedsam", "model": "helpers:grouped"},
    "moon, dropout": {"algorithm": "moon", "model": "helpers:dropped"},
    "qffl": {"algorithm": "qffl", "contribution": "leave_one_out", "server": {"samples": 50}},
    "fedsgd": {"algorithm": "fedsgd", "local": {"lr": 0.1}},
    "feddf": {"algorithm": {"name": "feddf", "steps": 5}, "public": PUBLIC},
    "fedmd": {"algorithm": "fedmd", "public": PUBLIC, "models": ["logistic", {"name": "mlp_2nn", "hidden": 8}]},
    "batch norm, momentum": {"algorithm": "fedavgm", "model": "helpers:batch_normed"},
    "local statistics": {"model": "helpers:batch_normed", "local": {"buffers": "local", "batch_size": 16}},
    "codecs": {"uplink": [{"name": "top_k", "fraction": 0.1}, "quantise"], "stop": {"bytes": 100_000}},
    "differences down": {"downlink": ["delta", {"name": "top_k", "fraction": 0.3}], "uplink": ["low_rank"]},
    "krum against alie": {"aggregator": {"name": "krum", "f": 1}, "attack": "alie", "attackers": {"num": 1}},
    "detection": {"detection": "distance", "attack": "sign_flip", "attackers": {"num": 2}},
    "fltrust": {"aggregator": "fltrust", "server": {"samples": 50}, "attack": "label_flip", "attackers": {"num": 1}},
    "buffered": {"policy": {"name": "buffered", "size": 3, "concurrency": 6}, "devices": "fleet"},
    "asynchronous": {"policy": {"name": "asynchronous", "concurrency": 4}, "devices": "stragglers", "rounds": 6},
    "secure sum": {"evaluation": {"every": 1}, "secagg": {}, "algorithm": "scaffold"},
    "secure groups": {"evaluation": {"every": 1}, "secagg": {"groups": 2}, "aggregator": "median"},
    "central": {**PRIVATE, "privacy": {"name": "central", **NOISE}},
    "distributed": {**PRIVATE, "sampler": "uniform", "privacy": {"name": "distributed", **NOISE}, "secagg": {}},
    "local noise": {**PRIVATE, "privacy": {"name": "local", **NOISE}},
    "private steps": {**PRIVATE, "privacy": {"name": "sample", **NOISE}},
    "tree": {"evaluation": {"every": 1}, "sampler": "round_robin", "privacy": {"name": "ftrl", **NOISE}},
}


def machine() -> str:
    """Return a name for how this machine rounds: that of sums, products and convolutions of fixed numbers."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 97, generator=generator), torch.randn(97, 33, generator=generator)
    image, kernel = torch.randn(2, 3, 16, 16, generator=generator), torch.randn(4, 3, 3, 3, generator=generator)
    results = (a @ b, a.sum(0), a.exp(), torch.conv2d(image, kernel), a.double() @ b.double(), a.norm(dim=1))
    digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in results))
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()} {digest.hexdigest()[:12]}"


def outcome(name: str) -> Result:
    """Run one of the plans."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(Plan(**{**PLAN, **PLANS[name]}))
    finally:
        torch.set_num_threads(threads)


def hashes(result: Result) -> list[str]:
    """Return the hash of a run's parameters, and that of its metrics without seconds."""
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "round_seconds")} for row in result.history]
    texts = (result.params_D.numpy().tobytes(), json.dumps(rows, sort_keys=True).encode())
    return [hashlib.sha256(text).hexdigest()[:16] for text in texts]


def size(result: Result) -> float:
    """Return the norm of the parameters, which hardly depends on the machine."""
    return float(result.params_D.double().norm())


def record() -> None:
    """Write what this machine finds beside what other machines found."""
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"hashes": {}, "hospitals": {}}
    results = {name: outcome(name) for name in PLANS}
    known["norms"] = {name: round(size(result), 6) for name, result in results.items()}
    known["hashes"][machine()] = {name: hashes(result) for name, result in results.items()}
    FILE.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    record()
