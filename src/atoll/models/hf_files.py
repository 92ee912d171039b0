"""The files of a language model: loading without running its code, and a hash of its weights."""

from __future__ import annotations

import hashlib
import importlib
import json
import struct
from pathlib import Path
from typing import Any

import torch

from atoll.core.errors import PlanError

CHUNK = 1 << 22


def extra() -> tuple[Any, Any]:
    """Import transformers and peft, or say how to install them."""
    try:
        return importlib.import_module("transformers"), importlib.import_module("peft")
    except ImportError as error:
        raise PlanError(
            f"language models need transformers and peft ({error}): use pip install 'atoll[llm]', with --constraint "
            "constraints.txt for the tested versions"
        ) from error


def loaded_base(transformers: Any, path: str, dtype: torch.dtype) -> Any:
    """Load a causal language model from safetensors; no pickle, and no code of its own.

    Where tensors are made without values, on the device `meta`, so is the model: its weights are not read.
    """
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        if torch.get_default_device().type == "meta":
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise PlanError(
            f"model.path {path!r} cannot be loaded as a causal language model ({' '.join(str(error).split())[:300]}): "
            "give a directory with config.json and safetensors, or a name on the hub, of an architecture that "
            "transformers has; code that comes with a model is not run"
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()


def quantise(model: torch.nn.Module) -> None:
    """Round the matrices of linear layers, but of the last one, to eight bits with a scale for each output."""
    try:
        quantisation: Any = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise PlanError(
            f'model.dtype = "int8" needs torchao ({error}): use pip install "atoll[llm,int8]", with --constraint '
            'constraints.txt for the tested versions, or model.dtype = "bfloat16"'
        ) from error
    last_of: Any = getattr(model, "get_output_embeddings", None)
    last = None if last_of is None else last_of()
    layers = [each for each in model.modules() if isinstance(each, torch.nn.Linear) and each is not last]
    if not layers:
        raise PlanError(
            f'model.dtype = "int8" rounds the matrices of linear layers, and {type(model).__name__} has none but the '
            'last: use model.dtype = "bfloat16"'
        )
    chosen = set(map(id, layers))
    quantisation.quantize_(model, quantisation.Int8WeightOnlyConfig(), filter_fn=lambda layer, _: id(layer) in chosen)


def base_directory(path: str) -> Path:
    """Return the directory of a model's files: the one that is given, or the local copy of one on the hub."""
    if Path(path).is_dir():
        return Path(path)
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.md", "*.model"]))
    except Exception as error:
        raise PlanError(
            f"model.path {path!r} is no directory, and the hub does not give it ({type(error).__name__}): check the "
            "spelling, or copy the model's files here"
        ) from error


def base_hash(path: str) -> str:
    """Return the SHA-256 of a model's weights: of name, type, shape and bytes of each tensor in the order of names.

    How tensors are shared out to files does not matter.
    """
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in sorted(base_directory(path).glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        tensors |= {name: (file, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    if not tensors:
        raise PlanError(f"model.path {path!r} has no safetensors: convert its weights, or choose another model")
    whole = hashlib.sha256()
    for name, (file, begin, entry) in sorted(tensors.items()):
        whole.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        first, last = entry["data_offsets"]
        with file.open("rb") as stream:
            stream.seek(begin + first)
            for left in range(last - first, 0, -CHUNK):
                whole.update(stream.read(min(CHUNK, left)))
    return whole.hexdigest()
