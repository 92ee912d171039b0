"""Random plans over everything that the catalogue has, drawn from a seed.

Every member of every family is listed from its folder, and drawn with the EXAMPLES that lie beside it, or its defaults.
OPTIONS gives some members other settings, for variety: no member needs an entry. What a plan needs around a member is
read from the member's traits.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from atoll.core.aggregator import Aggregator
from atoll.core.algorithm import Algorithm
from atoll.core.parts import Part, examples, find, members

Options = dict[str, Any]

NOISE = {"clip": 0.5, "sigma": 2.0, "delta": 1e-5, "test_noise": True}
FEW_BYZANTINE = [{"f": 1}, {"f": 1}, {"f": 2}]

OPTIONS: dict[tuple[str, str], list[Options]] = {
    ("algorithms", "apfl"): [{}, {"weight": 0.25, "adaptive": False}],
    ("algorithms", "fedrep"): [{}, {"head": 0.2}],
    ("algorithms", "fine_tuning"): [{"steps": 3}, {"steps": 2, "lr": 0.01}],
    ("algorithms", "ifca"): [{"clusters": 1}, {"clusters": 2}, {"clusters": 3}],
    ("algorithms", "interpolation"): [{"grid": 3}, {"grid": 1}],
    ("algorithms", "per_fedavg"): [{}, {"way": "hessian_free", "steps": 2}],
    ("algorithms", "pfedme"): [{"steps": 2}, {"steps": 1, "lr": 0.01}],
    ("rounds", "asynchronous"): [{"concurrency": 3}, {"concurrency": 4, "staleness": "hinge", "mixing": 0.3}],
    ("rounds", "buffered"): [{"size": 3, "concurrency": 6}, {"size": 2, "concurrency": 4, "staleness": "constant"}],
    ("rounds", "cohort"): [
        {"size": 5},
        {"fraction": 0.5},
        {"size": 4, "over_selection": 1.5},
        {"size": 6, "min_reports": 2, "deadline": 500.0},
    ],
    ("rounds.samplers", "poisson"): [{}, {"rate": 0.4}],
    ("rounds.devices", "fleet"): [{}, {"dropout": 0.5, "spread": 2.0}, {"diurnal": 0.5}],
    ("rounds.devices", "stragglers"): [{}, {"fraction": 0.9, "drop": True}],
    ("transforms", "clip"): [{"norm": 0.1}],
    ("transforms", "top_k"): [{"fraction": 0.1}, {"count": 7, "error_feedback": False}],
    ("transforms", "random_k"): [{"fraction": 0.2}, {"fraction": 0.5, "error_feedback": True}],
    **{
        ("aggregators", name): FEW_BYZANTINE
        for name in ("bulyan", "caf", "krum", "median_of_means", "minimum_diameter", "multi_krum", "trimmed_mean")
    },
    ("contribution", "gtg_shapley"): [{"max_permutations": 5}],
    ("contribution", "tmc_shapley"): [{"max_permutations": 5}],
    ("models", "mlp_2nn"): [{"hidden": 8}],
    ("models", "char_lstm"): [{"hidden": 6, "layers": 1}],
    ("data.partition", "shards"): [{}, {"shards_per_client": 3}],
    ("data.partition", "quantity"): [{}, {"law": "log_normal", "sigma": 1.0}],
    ("data.partition", "dirichlet"): [{"alpha": 0.3, "min_samples": 4}, {"alpha": 1.0}],
    ("privacy.mechanisms", "central"): [NOISE, {**NOISE, "per_layer": True}, {**NOISE, "epsilon": 20.0}],
    ("privacy.mechanisms", "distributed"): [NOISE],
    ("privacy.mechanisms", "ftrl"): [NOISE],
    ("privacy.mechanisms", "activations"): [{"clip": 0.1, "sigma": 4.0, "delta": 1e-5, "test_noise": True}],
    ("privacy.mechanisms", "local"): [NOISE],
    ("privacy.mechanisms", "sample"): [NOISE],
    ("privacy.mechanisms", "proportional"): [{"noise": 3.0, "epsilon": 50.0, "delta": 1e-5, "test_noise": True}],
    ("train.optimizers", "sgd"): [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True, "weight_decay": 1e-3}],
    ("secagg.schemes", "pairwise"): [{}, {"server": "curious", "dropouts": 0.4}],
}
NOT_DEALT = {"mixture", "natural"}
"""Partitions that are drawn elsewhere: one wraps others, one needs data with owners."""
OWN_PARTS: list[Options] = [
    {"work": {"name": "own_works:centroids"}},
    {"work": {"name": "own_works:remembering"}},
    {"keep": ["*bias"]},
    {"share": ["*weight"]},
    {"keep": "norms"},
]
"""What clients do instead of the local loop, or keep for themselves."""
LAYERS: list[Options] = [{"keep": ["head"]}, {"keep": ["body"]}, {"share": ["head"]}, {"share": ["body", "norms"]}]
"""What clients keep, by the words that stand for layers."""
OWN_MODELS = ["helpers:normed", "helpers:grouped", "helpers:dropped", "helpers:normalised", "helpers:recurrent"]


def part(rng: np.random.Generator, family: str, *, of: list[str] | None = None) -> Options:
    """Draw a member of a family and settings for it."""
    names = [name for name in (of or members(family)) if not needs_file(family, name)]
    name = str(rng.choice(names))
    return {"name": name, **options(rng, family, name)}


def options(rng: np.random.Generator, family: str, name: str) -> Options:
    """Draw settings for a member."""
    choices = OPTIONS.get((family, name)) or examples(family, name)
    return dict(choices[int(rng.integers(len(choices)))]) if choices != [{}] else {}


def needs_file(family: str, name: str) -> bool:
    """Whether a member reads a file that a plan names."""
    settings = [option for each in examples(family, name) for option in each.items()]
    return any(option == "path" or str(value).endswith(".csv") for option, value in settings)


def random_plan(seed: int) -> Options:
    """Draw a plan: the parts that every plan has, and some of the others."""
    rng = np.random.default_rng([7, seed])

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    num_clients = int(rng.integers(6, 13))
    plan: Options = {
        "seed": seed,
        "rounds": 2,
        "data": "digits",
        "partition": part(rng, "data.partition", of=[n for n in members("data.partition") if n not in NOT_DEALT]),
        "model": _model(rng),
        "algorithm": part(rng, "algorithms"),
        "local": {"lr": 0.05, "optimizer": part(rng, "train.optimizers"), "schedule": part(rng, "train.schedules")},
        "evaluation": {"every": int(rng.integers(0, 3))},
    }
    plan["partition"]["num_clients"] = num_clients
    _local(rng, plan, chance)
    if chance(0.2):
        plan["partition"] = {
            "name": "mixture",
            "parts": [plan["partition"], *(part(rng, "data.skew") for _ in range(int(rng.integers(1, 3))))],
        }
    if chance(0.1):
        plan["data"] = {"name": "helpers:phrases"}
        plan["model"] = {"name": "char_lstm", **options(rng, "models", "char_lstm")}
        plan["partition"] = {"name": "iid" if chance(0.7) else "quantity", "num_clients": num_clients}
    elif chance(0.1):
        plan["data"] = {"name": "synthetic", "num_devices": num_clients}
        plan["model"] = part(rng, "models", of=["logistic", "mlp_2nn"])
        plan["partition"] = {"name": "natural"} if chance(0.8) else plan["partition"]
    _rounds(rng, plan, chance)
    _ways(rng, plan, chance)
    _server(rng, plan, chance, num_clients)
    if chance(0.12):
        plan |= OWN_PARTS[int(rng.integers(len(OWN_PARTS)))]
    if chance(0.15):
        _problem(rng, plan, chance, num_clients)
    if chance(0.1):
        plan["evaluation"] |= {"new_clients": int(rng.integers(1, 4)), "holdout": 0.25, "adapt_steps": [0, 2]}
    _own_models(np.random.default_rng([8, seed]), plan)
    return plan


def is_personal(name: str) -> bool:
    """Whether an algorithm gives clients models of their own, and models travel."""
    algorithm: Algorithm = Part(name, **examples("algorithms", name)[0]).build("algorithms")
    own = (algorithm.keep, algorithm.personal, algorithm.adapt)
    return any(own) or (algorithm.work is not None and algorithm.work.name == "clusters")


PERSONAL = [name for name in members("algorithms") if is_personal(name)]
PRIVATE = {"central": "poisson", "distributed": "round_robin", "ftrl": "round_robin", "local": "uniform"}
"""Mechanisms that protect clients, and how clients are drawn for them."""


def personal_plan(seed: int) -> Options:
    """Draw a plan whose clients have models of their own, and one to three parts that go with it or not."""
    rng = np.random.default_rng([9, seed])
    algorithm = part(rng, "algorithms", of=PERSONAL)
    models = ["helpers:normed", "helpers:grouped", "helpers:normalised", "mlp_2nn"]
    model = str(rng.choice(models[:3] if algorithm["name"] == "fedbn" else models))
    plan: Options = {
        "seed": seed,
        "rounds": 2,
        "partition": {"name": "classes", "num_clients": 9, "classes_per_client": 4},
        "model": {"name": model, **({"hidden": 8} if model == "mlp_2nn" else {})},
        "algorithm": algorithm,
        "local": {"lr": 0.05, "batch_size": 8, "steps": 3, "buffers": str(rng.choice(["local", "average"]))},
        "policy": {"name": "cohort", "size": 7},
        "evaluation": {"every": 1, "validation": 0.2 if algorithm["name"] == "interpolation" else None},
    }
    for name in rng.choice(list(BESIDE), size=int(rng.integers(1, 4)), replace=False):
        BESIDE[name](rng, plan)
    return plan


CUT: list[tuple[Options, list[int | str], list[int | str]]] = [
    ({"name": "mlp_2nn", "hidden": 8}, [1, 2, 3], [3, 4, 5]),
    ({"name": "helpers:normed"}, ["conv", "norm", "drop"], ["out"]),
    ({"name": "helpers:normalised"}, [0, 2, 4, 6], [6, 7]),
    ({"name": "helpers:dropped"}, [1, 3], [4]),
]
"""Models that are cut, after which layers, and where a tail may begin."""


WAYS = [way for way in members("split.ways") if way != "vertical"]
BOTTOMS: list[Options] = [{"name": "mlp", "widths": [6]}, {"name": "logistic"}, {"name": "mlp_2nn", "hidden": 5}]


def vertical_plan(seed: int) -> Options:
    """Draw a plan of parties that hold columns, and up to two parts that go with them or not."""
    rng = np.random.default_rng([11, seed])
    ends = sorted(rng.choice(np.arange(1, 63), size=int(rng.integers(0, 4)), replace=False).tolist())
    parties: list[Options] = [
        {
            "name": f"party-{number}",
            "columns": [f"{first}-{last - 1}"],
            "model": BOTTOMS[int(rng.integers(len(BOTTOMS)))],
            "width": int(rng.integers(1, 6)),
        }
        for number, (first, last) in enumerate(zip([0, *ends], [*ends, 64], strict=True))
    ]
    split: Options = {"way": "vertical", "parties": parties, "labels": str(rng.choice([p["name"] for p in parties]))}
    if rng.random() < 0.3:
        split["tail"] = int(rng.integers(1, 5))
    if rng.random() < 0.3:
        split |= {"micro_batches": int(rng.integers(2, 4)), "latency": 0.02, "bandwidth": 1e6}
    if rng.random() < 0.3:
        split["codecs"] = [part(rng, "transforms")]
    if rng.random() < 0.1:
        split["missing"] = float(rng.choice([0.1, 0.6]))
    plan: Options = {
        "seed": seed,
        "rounds": 2,
        "model": {"name": "mlp", "widths": [7]},
        "split": split,
        "local": {"lr": 0.05, "batch_size": 8, "steps": 3, "optimizer": part(rng, "train.optimizers")},
        "evaluation": {"every": 1},
    }
    if rng.random() < 0.2:
        plan["algorithm"] = part(rng, "algorithms")
    if rng.random() < 0.3:
        BESIDE[str(rng.choice(list(BESIDE)))](rng, plan)
    return plan


def split_plan(seed: int) -> Options:
    """Draw a plan whose model is cut, and up to two parts that go with it or not."""
    rng = np.random.default_rng([10, seed])
    model, cuts, tails = CUT[int(rng.integers(len(CUT)))]
    split: Options = {"way": str(rng.choice(WAYS)), "cut": cuts[int(rng.integers(len(cuts)))]}
    if rng.random() < 0.3:
        split["tail"] = tails[int(rng.integers(len(tails)))]
    if rng.random() < 0.3:
        split |= {"micro_batches": int(rng.integers(2, 4)), "latency": 0.02, "bandwidth": 1e6}
    if rng.random() < 0.3:
        split["codecs"] = [part(rng, "transforms")]
    guarded = np.random.default_rng([11, seed])
    if guarded.random() < 0.4:
        split["defences"] = [part(guarded, "split.defences") for _ in range(int(guarded.integers(1, 3)))]
    split |= {"frozen": True} if guarded.random() < 0.15 else {}
    if split["way"] == "in_turn" and rng.random() < 0.5:
        split["handover"] = "peer"
    plan: Options = {
        "seed": seed,
        "rounds": 2,
        "partition": {"name": "iid", "num_clients": 9},
        "model": model,
        "split": split,
        "local": {"lr": 0.05, "batch_size": 8, "steps": 3, "optimizer": part(rng, "train.optimizers")},
        "policy": {"name": "cohort", "size": 4},
        "evaluation": {"every": 1},
    }
    if rng.random() < 0.2:
        plan["algorithm"] = part(rng, "algorithms")
    if rng.random() < 0.3:
        BESIDE[str(rng.choice(list(BESIDE)))](rng, plan)
    if guarded.random() < 0.15:
        plan["privacy"] = {"name": "activations", **options(guarded, "privacy.mechanisms", "activations")}
        split |= {"frozen": True} if guarded.random() < 0.8 else {}
        if guarded.random() < 0.8 and "tail" not in split:
            split["tail"] = tails[int(guarded.integers(len(tails)))]
    return plan


def _private(rng: np.random.Generator, plan: Options) -> None:
    name = str(rng.choice(list(PRIVATE)))
    plan |= {"privacy": {"name": name, **NOISE}, "sampler": {"name": PRIVATE[name]}}
    plan["local"]["buffers"] = "local"


def _overlapping(rng: np.random.Generator, plan: Options) -> None:
    plan["policy"] = part(rng, "rounds", of=["buffered", "asynchronous"])
    plan["devices"] = part(rng, "rounds.devices")


def _attacked(rng: np.random.Generator, plan: Options) -> None:
    plan |= {"attack": part(rng, "attacks"), "attackers": {"num": 2} if rng.random() < 0.8 else {"added": 1}}


BESIDE: dict[str, Any] = {
    "privacy": _private,
    "secagg": lambda rng, plan: plan.update(secagg={"scheme": part(rng, "secagg.schemes")}),
    "aggregator": lambda rng, plan: plan.update(aggregator=part(rng, "aggregators"), server={"lr": 0.1}),
    "feedback": lambda rng, plan: plan.update(uplink=[part(rng, "transforms", of=["top_k", "random_k", "low_rank"])]),
    "quantiser": lambda rng, plan: plan.update(uplink=[part(rng, "transforms", of=["quantise", "qsgd", "sign"])]),
    "downlink": lambda rng, plan: plan.update(downlink=[{"name": "delta"}, part(rng, "transforms")]),
    "policy": _overlapping,
    "attack": _attacked,
    "detection": lambda rng, plan: plan.update(detection=part(rng, "detection", of=["cosine", "distance"])),
    "sites": lambda rng, plan: plan["evaluation"].update(clients_every=1, holdout=0.2),
}
"""What personalisation must go with, or be refused with."""


def _own_models(rng: np.random.Generator, plan: Options) -> None:
    """Set samples apart for clients' choices, and let them keep layers."""
    algorithm: Algorithm = Part.of(plan["algorithm"]).build("algorithms")
    if rng.random() < (0.9 if algorithm.needs_validation else 0.1):
        plan["evaluation"]["validation"] = float(rng.choice([0.1, 0.3]))
    if rng.random() < 0.1:
        plan.pop("keep", None)
        plan.pop("share", None)
        plan |= LAYERS[int(rng.integers(len(LAYERS)))]
    if algorithm.prepare is not None and plan["model"]["name"] != "char_lstm":
        plan["model"] = {"name": "lora_mlp", "hidden": 8}


def _problem(rng: np.random.Generator, plan: Options, chance: Any, num_clients: int) -> None:
    """Learn something else than classes, by a loss and metrics that may or may not fit."""
    name = str(rng.choice(["diabetes", "cancer", "labels", "sequences", "lifetimes"]))
    plan["data"] = {"name": f"problem_data:{name}"}
    plan["model"] = part(rng, "models", of=["logistic", "mlp_2nn"])
    if name == "sequences":
        plan["model"] = {"name": "char_lstm", **options(rng, "models", "char_lstm")}
    if chance(0.8):
        plan["partition"] = {"name": "iid" if chance(0.7) else "quantity", "num_clients": num_clients}
    if chance(0.3):
        plan["loss"] = part(rng, "train.losses")
    if chance(0.3):
        plan["evaluation"]["metrics"] = [part(rng, "metrics") for _ in range(int(rng.integers(1, 4)))]


AMPLIFIERS = ("uplink", "downlink", "privacy", "secagg", "aggregator", "detection", "contribution", "attack", "stop")


def calm(settings: Options) -> Options:
    """Take out of a plan what turns a difference of one rounding into a large one; the training stays as it is.

    Codecs, votes, noise, masks and choices by a score do so by jumps, unit steps by dividing by what is almost zero. A
    member whose step may change by more than the gradient does (Adam's first step is the gradient's sign) brings SMOOTH
    beside it: settings under which it does not.
    """
    plan = {key: value for key, value in settings.items() if key not in (*AMPLIFIERS, "attackers", "server")}
    plan["local"] = {key: value for key, value in settings["local"].items() if key != "epochs"}
    plan["algorithm"] = _smooth("algorithms", settings["algorithm"])
    if "epochs" not in Part.of(plan["algorithm"]).build("algorithms").local:
        plan["local"]["steps"] = 3
    if "optimizer" in plan["local"]:
        plan["local"]["optimizer"] = _smooth("train.optimizers", plan["local"]["optimizer"])
    if "sampler" in plan and Part.of(plan["sampler"]).build("rounds.samplers").score:
        del plan["sampler"]
    return plan


def _smooth(family: str, given: Options) -> Options:
    beside = sys.modules[find(family, given["name"]).__module__]
    return {**given, **getattr(beside, "SMOOTH", {})}


def _model(rng: np.random.Generator) -> Options:
    if rng.random() < 0.5:
        return {"name": str(rng.choice(OWN_MODELS))}
    return part(rng, "models", of=["logistic", "mlp_2nn"] if rng.random() < 0.95 else None)


def _local(rng: np.random.Generator, plan: Options, chance: Any) -> None:
    algorithm: Algorithm = Part.of(plan["algorithm"]).build("algorithms")
    if "optimizer" in algorithm.local and chance(0.9):
        del plan["local"]["optimizer"]
    if "batch_size" not in algorithm.local:
        plan["local"]["batch_size"] = [16, 32, "all", 7][int(rng.integers(4))]
        plan["local"] |= {"steps": 3} if chance(0.3) else {"epochs": int(rng.integers(1, 3))}
    if chance(0.3) and not algorithm.needs_public:
        plan["local"]["buffers"] = "local"
    if algorithm.needs_public or chance(0.05):
        plan["public"] = {"name": "held_out", "fraction": 0.1}
    if algorithm.work is not None and chance(0.5):
        plan["models"] = ["logistic", {"name": "mlp_2nn", "hidden": 8}]


def _rounds(rng: np.random.Generator, plan: Options, chance: Any) -> None:
    plan["policy"] = {"name": "cohort", "size": 7} if chance(0.6) else part(rng, "rounds")
    if chance(0.3):
        plan["sampler"] = part(rng, "rounds.samplers")
    if chance(0.3):
        plan["devices"] = part(rng, "rounds.devices")
    if chance(0.15):
        plan["evaluation"] |= {"clients_every": 1, "holdout": 0.2 if chance(0.5) else 0.0}
    if chance(0.1):
        plan["stop"] = {"bytes": int(rng.integers(10_000, 200_000))}


def _ways(rng: np.random.Generator, plan: Options, chance: Any) -> None:
    if chance(0.5):
        codecs = [name for name in members("transforms") if name != "delta"]
        plan["uplink"] = [part(rng, "transforms", of=codecs) for _ in range(int(rng.choice([1, 1, 1, 2, 3])))]
    if chance(0.2):
        plan["downlink"] = [{"name": "delta"}] if chance(0.5) else []
        plan["downlink"] += [part(rng, "transforms") for _ in range(int(rng.integers(1, 3)))]


def _server(rng: np.random.Generator, plan: Options, chance: Any, num_clients: int) -> None:
    if chance(0.4):
        plan["aggregator"] = part(rng, "aggregators")
    name = plan.get("aggregator", {}).get("name")
    rule: Aggregator = Part.of(plan.get("aggregator", "mean")).build("aggregators")
    server: Options = {"lr": 0.01} if rule.unit_steps else {"lr": 0.5} if chance(0.1) else {}
    if chance(0.15 if plan["policy"]["name"] == "cohort" else 0.03):
        plan["detection"] = part(rng, "detection")
    if chance(0.08):
        plan["contribution"] = part(rng, "contribution")
    looks = "detection" in plan and Part.of(plan["detection"]).build("detection").needs_loss
    wants = rule.add_server_update is not None or looks or "contribution" in plan
    server |= {"samples": 30} if wants or chance(0.03) else {}
    plan["server"] = server
    if chance(0.3):
        plan["attack"] = part(rng, "attacks")
        plan["attackers"] = {"num": 1} if chance(0.5) else {"added": 1} if chance(0.3) else {"fraction": 0.3}
    if chance(0.15 if "uplink" not in plan else 0.03):
        scheme = part(rng, "secagg.schemes")
        plan["secagg"] = {"scheme": scheme, "groups": 1 if name in (None, "mean") else 2}
        plan["secagg"] |= {"modulus_bits": 64} if chance(0.3) else {}
    if chance(0.15 if name is None and "detection" not in plan else 0.03):
        plan["privacy"] = part(rng, "privacy.mechanisms")
        plan["sampler"] = {"name": "round_robin" if plan["privacy"]["name"] == "ftrl" else "poisson"}
        if plan["sampler"]["name"] == "poisson" and chance(0.5):
            plan["sampler"]["rate"] = 0.5
