"""Causal language models of Hugging Face, of which an adapter or the head is trained. Shapes: B rows, T tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from atoll.core.adapters import FACTOR
from atoll.core.errors import PlanError
from atoll.core.options import Positive, ShareBelowOne, at_least
from atoll.core.personal_adapters import add_personal
from atoll.models.hf_files import base_hash, extra, loaded_base, quantise
from atoll.models.sizes import MaybeWidth, Width

TARGETS = {"lora": ("q_proj", "v_proj"), "ia3": ("k_proj", "v_proj", "down_proj"), "head": ()}
"""Layers that are tuned where a plan does not say, by their names in Llama and its relatives."""
EXAMPLE = {"path": "models/base"}
SIZE = "that of the base"
"""It reads, or fetches, a whole model."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
"""Types of frozen weights; with `int8`, of those that are not quantised."""


class CausalLM(nn.Module):
    """A causal language model as the tokens problem takes it: (B, T) tokens -> (B, T, K) scores of the next.

    Its state is what was trained: the frozen weights of the base are in no file and no message.
    """

    def __init__(self, model: nn.Module, separator: int | None = None) -> None:
        super().__init__()
        self.model, self.separator = model, separator

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of the next token at every position."""
        context = {} if self.separator is None else _apart(tokens, self.separator, next(self.parameters()).dtype)
        scores: Tensor = self.model(input_ids=tokens, use_cache=False, **context).logits
        return scores if scores.dtype == torch.float64 else scores.float()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the tensors that are not the base's."""
        prefix = kwargs.get("prefix", "")
        whole: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name, _ in self._frozen():
            whole.pop(prefix + name, None)
        return whole

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take tensors that `state_dict` gave; the base stays as it is."""
        base = {name: tensor.detach() for name, tensor in self._frozen()}
        return super().load_state_dict({**base, **state_dict}, strict, assign)

    def _frozen(self) -> list[tuple[str, Tensor]]:
        named = self.named_parameters(remove_duplicate=False)
        return [(name, each) for name, each in named if not each.requires_grad and not FACTOR.search(name)]

    def __deepcopy__(self, memo: dict[int, Any]) -> CausalLM:
        memo |= {id(tensor): tensor for _, tensor in self._frozen()}  # nobody writes to them: one copy serves all
        twin = CausalLM.__new__(CausalLM)
        memo[id(self)] = twin
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin


def hf_causal(
    path: str,
    tune: Literal["lora", "ia3", "head"] = "lora",
    rank: Width = 8,
    alpha: Positive = 16.0,
    targets: tuple[str, ...] = (),
    dropout: ShareBelowOne = 0.0,
    dtype: Literal["float32", "bfloat16", "int8"] = "float32",
    checkpointing: bool = False,
    separator: Annotated[int, at_least(0)] | None = None,
    sha256: str = "",
    personal_rank: MaybeWidth = 0,
) -> nn.Module:
    """Load a causal language model from a directory or by its name on the hub, and tune a small part of it.

    `lora` trains a product of rank `rank`, times alpha / rank, beside each layer of `targets` (Hu et al. 2022,
    arXiv:2106.09685); `ia3` a factor for each output of `targets` (Liu et al. 2022, arXiv:2205.05638); `head` the last
    layer. `dtype` is that of the frozen weights; `int8` rounds the matrices of linear layers, but the last, to eight
    bits and holds the rest in bfloat16. `checkpointing` computes activations twice to save memory. Rows may hold
    several texts: with a `separator`, the token that each begins with, none sees those before it. `sha256` is the
    hash of the base (`atoll.models.hf_files.base_hash`): another base is refused. With a `personal_rank` each client
    has adapters of its own beside the shared ones (`core/personal_adapters.py`). Code of a model's own is never run.
    """
    if personal_rank and tune != "lora":
        raise PlanError(
            f"model.personal_rank = {personal_rank} adds adapters to those of lora, but model.tune is {tune!r}: set "
            'model.tune = "lora", or leave model.personal_rank out'
        )
    transformers, peft = extra()
    sized = torch.get_default_device().type == "meta"  # no weights are read then
    if sha256 and not sized and (own := base_hash(path)) != sha256.lower():
        raise PlanError(
            f"model.path {path!r} holds other weights than the plan is for: their hash is {own}, and model.sha256 says "
            f"{sha256}; get the same base as all others"
        )
    model = loaded_base(transformers, path, DTYPES[dtype]).requires_grad_(False)
    if dtype == "int8" and not sized:
        quantise(model)
    if tune == "head":
        _train_head(model, dtype)
    else:
        layers = targets or TARGETS[tune]
        _inject(peft, model, _config(peft, tune, layers, rank, alpha, dropout), layers)
    if personal_rank:
        add_personal(model, personal_rank, alpha)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return CausalLM(model, separator)


def _config(peft: Any, tune: str, targets: tuple[str, ...], rank: int, alpha: float, dropout: float) -> Any:
    if tune == "lora":
        return peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(targets))
    forward = [name for name in targets if name in ("down_proj", "fc2", "c_proj", "w2", "dense_4h_to_h")]
    return peft.IA3Config(target_modules=list(targets), feedforward_modules=forward)


def _inject(peft: Any, model: nn.Module, config: Any, targets: tuple[str, ...]) -> None:
    """Put adapters beside layers; they are trained in float32 whatever the base has."""
    try:
        with warnings.catch_warnings():  # of merging into quantised weights, which export does not do
            warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated")
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise PlanError(
            f"model.targets {list(targets)} do not fit {type(model).__name__}: {' '.join(str(error).split())[:200]}; "
            f"name some of its layers: {', '.join(linear)}"
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _train_head(model: Any, dtype: str) -> None:
    """Train the last layer alone, apart from the embedding where they are one."""
    if dtype != "float32":
        raise PlanError('tune = "head" trains a layer of the base: set model.dtype = "float32", or use lora')
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach().clone())
    head.requires_grad_(True)
    model.config.tie_word_embeddings = False


def _apart(tokens_BT: Tensor, separator: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return positions within texts, and a mask that lets a token see its own text alone."""
    begins_BT = tokens_BT == separator
    text_BT, place_T = begins_BT.cumsum(-1), torch.arange(tokens_BT.shape[-1], device=tokens_BT.device)
    start_BT = torch.where(begins_BT, place_T, torch.zeros_like(place_T)).cummax(-1).values
    sees_BTT = (text_BT.unsqueeze(-1) == text_BT.unsqueeze(-2)) & (place_T.unsqueeze(-1) >= place_T)
    hidden = torch.zeros((), dtype=dtype, device=tokens_BT.device), torch.finfo(dtype).min
    return {"position_ids": place_T - start_BT, "attention_mask": torch.where(sees_BTT, *hidden).unsqueeze(1)}
