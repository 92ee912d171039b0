"""Write the adapter of a trained language model for peft, or the model with it merged in.

Shapes: R rank, O outputs, I inputs. Layers move by s (P + B A), where P is what the server keeps beside the factors
(see `atoll.core.adapters`). Without P the adapter is A and B as they are. With it, it is a factorisation of P + B A,
whose rank may be larger; nothing is cut off.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.core.adapters import WithRest, adapted_layers, factor, scaling_of
from atoll.core.algorithm import Algorithm
from atoll.core.errors import RunError
from atoll.core.personal_adapters import WithPersonal
from atoll.core.plan import Plan
from atoll.language.card import card
from atoll.models.hf_causal import TARGETS, CausalLM
from atoll.models.hf_files import base_directory, extra, loaded_base
from atoll.report.reading import read_run

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "spiece.model")
"""Files of a tokenizer, which a merged model needs as its base does."""
SMALL = 1e-6
"""Singular values below this share of the largest are rounding."""


class Adapter(NamedTuple):
    """What peft needs: its settings, and tensors by the names that it gives them."""

    config: Any
    tensors: dict[str, Tensor]


def export_run(path: Path, out: Path, *, merged: bool = False) -> Path:
    """Write what the run in a directory ended with as an adapter that peft loads, or as a merged model."""
    record = read_run(path)
    _, model = models_of(path)
    return save_adapter(model, record.plan, out, merged=merged, rows=record.rows, info=record.info, run=path)


def models_of(path: Path) -> tuple[nn.Module, nn.Module]:
    """Return the model that the run in a directory began with, and the one that it ended with."""
    plan, weights = read_run(path).plan, path / "model.safetensors"
    if not weights.is_file():
        raise RunError(f"{path} has no model.safetensors: let the run end, with atoll run --resume {path}")
    _must_be_language(plan)
    first = plan.model.build("models")
    algorithm: Algorithm = plan.algorithm.build("algorithms")
    if algorithm.prepare is not None:
        algorithm.prepare(first)
    last = copy.deepcopy(first)
    _load(last, weights)
    return first.eval(), last.eval()


def _load(model: nn.Module, weights: Path) -> None:
    try:
        model.load_state_dict(load_file(weights))
    except RuntimeError as error:
        raise RunError(
            f"{weights} does not hold one whole model, since clients keep parts of it: write that of one client, in "
            'Python by result.save_adapter("adapters/0", client=0)'
        ) from error


def save_adapter(
    model: nn.Module,
    plan: Plan,
    out: Path,
    *,
    merged: bool = False,
    rows: Sequence[Mapping[str, Any]] = (),
    info: Mapping[str, Any] | None = None,
    run: Path | None = None,
) -> Path:
    """Write a trained model's adapter, or the merged model, and a card that says how it came about."""
    _must_be_language(plan)
    if not isinstance(model, CausalLM):
        raise RunError(f"the model is {type(model).__name__}, not one of hf_causal: save its state_dict instead")
    if out.exists() and any(out.iterdir()):
        raise RunError(f"{out} is not empty: choose another directory")
    out.mkdir(parents=True, exist_ok=True)
    options, base = plan.model.options, str(plan.model.options["path"])
    if merged:
        _merge(model, base, out, options)
    else:
        adapter = _adapter(model, base, options)
        adapter.config.save_pretrained(str(out))
        save_file(adapter.tensors, str(out / "adapter_model.safetensors"))
    (out / "README.md").write_text(card(plan, rows, info or {}, run, merged=merged), encoding="utf-8")
    return out


def _must_be_language(plan: Plan) -> None:
    if plan.model.name != "hf_causal":
        raise RunError(
            f"the plan's model is {plan.model.name}: adapters are of hf_causal alone; model.safetensors in the run's "
            "directory holds any other model"
        )


def _adapter(model: CausalLM, base: str, options: Mapping[str, Any]) -> Adapter:
    _, peft = extra()
    tune = options.get("tune", "lora")
    if tune == "head":
        raise RunError("a trained head is no adapter: write the merged model instead (--merged)")
    targets = list(options.get("targets") or TARGETS[tune])
    about: dict[str, Any] = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    if tune == "ia3":
        config: Any = model.model.peft_config["default"]  # type: ignore[index]
        named = {name: value for name, value in model.model.state_dict().items() if "ia3_l" in name}
        settings = {"target_modules": targets, "feedforward_modules": sorted(config.feedforward_modules)}
        tensors = {f"base_model.model.{n.removesuffix('.default')}": v.contiguous() for n, v in named.items()}
        return Adapter(peft.IA3Config(**settings, **about), tensors)
    factors = _factors(model.model)
    rank = len(next(iter(factors.values()))[0])
    scaling = {scaling for _, _, scaling in factors.values()}.pop()
    tensors = {}
    for name, (a_RI, b_OR, _) in factors.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a_RI.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = b_OR.contiguous()
    config = peft.LoraConfig(r=rank, lora_alpha=scaling * rank, target_modules=targets, **about)
    return Adapter(config, tensors)


def _factors(model: nn.Module) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return A, B and s of each adapted layer, all of one rank."""
    layers = adapted_layers(model, "an adapter")
    if not any(isinstance(layer.base_layer, WithRest | WithPersonal) for layer in layers.values()):
        pairs = {name: (factor(layer, "A"), factor(layer, "B")) for name, layer in layers.items()}
        return {n: (a.detach(), b.detach(), scaling_of(layers[n])) for n, (a, b) in pairs.items()}
    split = {name: torch.linalg.svd(_product(layer), full_matrices=False) for name, layer in layers.items()}
    rank = max(1, *(int((values > SMALL * values[0]).sum()) for _, values, _ in split.values()))
    factors = {}
    for name, (left, values, right) in split.items():
        a_RI, b_OR = values.sqrt()[:, None] * right, left * values.sqrt()
        a_RI, b_OR = (each[:rank] for each in (a_RI, b_OR.T))
        missing = rank - len(a_RI)
        a_RI, b_RO = (torch.cat([each, each.new_zeros(missing, each.shape[1])]) for each in (a_RI, b_OR))
        factors[name] = a_RI.float(), b_RO.T.float(), scaling_of(layers[name])
    return factors


def _product(layer: nn.Module) -> Tensor:
    """Return P + B A of a layer, or both adapters of an agent in one, (O, I), in float64."""
    product_OI = factor(layer, "B").detach().double() @ factor(layer, "A").detach().double()
    base = layer.base_layer
    if isinstance(base, WithPersonal):
        return base.mixed(product_OI, scaling_of(layer))
    return product_OI + base.get_buffer("rest").double() if isinstance(base, WithRest) else product_OI


def _merge(model: CausalLM, base: str, out: Path, options: Mapping[str, Any]) -> None:
    """Write the base with what was learnt added to its weights, and its tokenizer."""
    transformers, _ = extra()
    tune = options.get("tune", "lora")
    whole = loaded_base(transformers, base, torch.float32)
    if tune == "head":
        whole.config.tie_word_embeddings = False
        head = model.model.get_output_embeddings()  # type: ignore[operator]
        whole.get_output_embeddings().weight = nn.Parameter(head.weight.detach().clone())
    elif tune == "ia3":
        _scale(model, whole)
    else:
        with torch.no_grad():
            for name, layer in adapted_layers(model.model, "an adapter").items():
                weight_OI = _matrix(whole.get_submodule(name))
                weight_OI.copy_(weight_OI.double() + scaling_of(layer) * _product(layer))
    whole.save_pretrained(str(out))
    for pattern in TOKENIZER:
        for file in base_directory(base).glob(pattern):
            shutil.copy(file, out / file.name)


def _matrix(layer: nn.Module) -> Tensor:
    """Return a view of a layer's weight of shape (O, I); layers of GPT-2 have it transposed."""
    transformers, _ = extra()
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if isinstance(layer, transformers.pytorch_utils.Conv1D) else weight


def _scale(model: CausalLM, whole: Any) -> None:
    """Multiply layers' outputs, or inputs where the vector is before a layer, by the vectors of IA3."""
    with torch.no_grad():
        for name, layer in model.model.named_modules():
            vectors = getattr(layer, "ia3_l", None)
            if vectors is None or not len(vectors):
                continue
            vector, weight_OI = vectors["default"].detach(), _matrix(whole.get_submodule(name))
            weight_OI.mul_(vector.reshape(1, -1) if layer.is_feedforward else vector.reshape(-1, 1))
            bias = getattr(whole.get_submodule(name), "bias", None)
            if bias is not None and not layer.is_feedforward:
                bias.mul_(vector.flatten())
