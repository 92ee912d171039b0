"""A tiny random Llama with its tokenizer, and texts of owners who speak differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.plan import Plan

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model of two layers of width 16, and of a tokenizer of letters."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    path = tmp_path_factory.mktemp("base")
    vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2, **{letter: 3 + i for i, letter in enumerate(LETTERS)}}
    letters = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = Split("", "isolated")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    (path / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of texts: each of eight owners repeats a word of its own."""
    path, rng = tmp_path_factory.mktemp("texts") / "texts.jsonl", np.random.default_rng(0)
    words = ["".join(rng.choice(list(LETTERS[:26]), 4)) for _ in range(8)]
    lines = [
        {"who": f"owner {who}", "said": " ".join([word] * 4) + ".", "asked": "say it "}
        for _ in range(6)
        for who, word in enumerate(words)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


@pytest.fixture
def llm_plan(base: Path, texts: Path) -> Plan:
    """Two rounds of four of the eight owners, with an adapter of rank 4."""
    settings: dict[str, Any] = {
        "data": {
            "name": "atoll.data.sequences:jsonl",
            "path": str(texts),
            "tokenizer": str(base),
            "owner": "who",
            "text": "said",
            "length": 12,
            "test": 0.2,
        },
        "partition": "natural",
        "model": {"name": "hf_causal", "path": str(base), "rank": 4, "alpha": 8.0},
        "local": {"lr": 1.0, "batch_size": 4, "epochs": 2},
        "policy": {"size": 4},
        "evaluation": {"metrics": ["perplexity"]},
        "rounds": 2,
        "engine": "inline",
    }
    return Plan(**settings)
