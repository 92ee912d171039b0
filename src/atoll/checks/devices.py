"""Rules on where clients' work is computed, and how exactly."""

from __future__ import annotations

import torch

from atoll.checks.rule import Rule
from atoll.checks.views import Parts
from atoll.core.plan import Plan

PRIVATE_STEPS = {"privacy": {"name": "sample", "clip": 1.0, "sigma": 1.0, "delta": 1e-5, "test_noise": True}}
ARRAYS = {"work": "atoll.testing.examples:mean_features"}
DOUBLE = {"model": "atoll.testing.examples:double_logistic"}


def _device(plan: Plan) -> str:
    return str(plan.engine.options.get("device", "cpu")).partition(":")[0]


def _lowered(plan: Plan) -> bool:
    return bool(plan.engine.options.get("precision", "float32") != "float32")


def _elsewhere(plan: Plan) -> bool:
    return _device(plan) != "cpu" or _lowered(plan) or bool(plan.engine.options.get("tf32"))


RULES: tuple[Rule[Parts], ...] = (
    Rule(
        name="tf-thirty-two-is-of-cuda",
        parts=("engine",),
        reason="engine.tf32 rounds products on an NVIDIA device, and engine.device is {device|another}",
        way_out='set engine.device = "cuda", or leave engine.tf32 out',
        finding=lambda view: (
            {"device": _device(view.plan)}
            if view.plan.engine.options.get("tf32") and _device(view.plan) not in ("cuda", "auto")
            else None
        ),
        refused=[{"engine": {"name": "inline", "tf32": True}}],
        mended={"engine": "inline"},
    ),
    Rule(
        name="private-steps-in-full-precision",
        parts=("engine", "privacy"),
        reason="{privacy|a mechanism that protects samples} bounds how far a sample moves a step by arithmetic in "
        "float32, and engine.precision is {precision|lower}",
        way_out='set engine.precision = "float32", or protect whole clients, e.g. by central',
        finding=lambda view: (
            {"precision": view.plan.engine.options["precision"]}
            if _lowered(view.plan) and view.protection.steps is not None
            else None
        ),
        refused=[{**PRIVATE_STEPS, "engine": {"name": "inline", "precision": "bf16"}}],
        mended={"engine": "inline"},
    ),
    Rule(
        name="private-steps-need-double",
        parts=("engine", "privacy"),
        reason="private steps of {privacy|a mechanism that protects samples} divide in float64, which mps has not",
        way_out='set engine.device = "cpu" or "cuda", or protect whole clients, e.g. by central',
        finding=lambda view: _device(view.plan) == "mps" and view.protection.steps is not None,
        refused=[{**PRIVATE_STEPS, "engine": {"name": "inline", "device": "mps"}}],
        mended={"engine": "inline"},
    ),
    Rule(
        name="double-models-need-a-device-with-double",
        parts=("engine", "model"),
        reason="the model has parameters of float64, which mps has not",
        way_out='set engine.device = "cpu" or "cuda", or use a model of float32',
        finding=lambda view: _device(view.plan) == "mps" and view.spec.dtype == torch.float64,
        refused=[{**DOUBLE, "engine": {"name": "inline", "device": "mps"}}],
        mended={"engine": "inline"},
    ),
    Rule(
        name="arrays-stay-on-the-processor",
        parts=("engine", "work"),
        reason="{work|work of one's own} is functions on NumPy's arrays, which torch's devices and precisions do not "
        "reach",
        way_out="leave engine.device, engine.precision and engine.tf32 out, and let the functions use a device "
        "themselves",
        finding=lambda view: view.work.first is not None and _elsewhere(view.plan),
        refused=[
            {**ARRAYS, "engine": {"name": "inline", "device": "cuda"}},
            {**ARRAYS, "engine": {"name": "vectorised", "precision": "bf16"}},
        ],
        mended={"engine": "inline"},
    ),
    Rule(
        name="split-stays-on-the-processor",
        parts=("engine", "split"),
        reason="clients and server of split learning are simulated on the processor, in full precision",
        way_out="leave engine.device, engine.precision and engine.tf32 out, or leave split out",
        finding=lambda view: _elsewhere(view.plan),
        refused=[{"model": "mlp_2nn", "split": {"cut": "2"}, "engine": {"name": "inline", "device": "cuda"}}],
        mended={"engine": "inline"},
    ),
)
