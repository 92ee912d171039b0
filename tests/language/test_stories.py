"""The conversion of llama2.c checkpoints: the same scores as a forward pass written after llama2.c itself."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")

RECIPE = Path(__file__).parents[2] / "recipes" / "language" / "stories15m.py"
WIDTH, BETWEEN, LAYERS, HEADS, KV_HEADS, TOKENS, LENGTH = 16, 24, 2, 4, 2, 300, 32


@pytest.fixture(scope="module")
def recipe() -> Any:
    spec = importlib.util.spec_from_file_location("stories15m", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors() -> dict[str, np.ndarray]:
    rng, kv = np.random.default_rng(0), WIDTH // HEADS * KV_HEADS
    shapes = {
        "embedding": (TOKENS, WIDTH),
        "norm": (LAYERS, WIDTH),
        "q": (LAYERS, WIDTH, WIDTH),
        "k": (LAYERS, kv, WIDTH),
        "v": (LAYERS, kv, WIDTH),
        "o": (LAYERS, WIDTH, WIDTH),
        "norm_2": (LAYERS, WIDTH),
        "w1": (LAYERS, BETWEEN, WIDTH),
        "w2": (LAYERS, WIDTH, BETWEEN),
        "w3": (LAYERS, BETWEEN, WIDTH),
        "last": (WIDTH,),
    }
    return {name: rng.normal(0, 0.5, shape).astype("<f4") for name, shape in shapes.items()}


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x_TE: np.ndarray) -> np.ndarray:
    """Rotate neighbours (0, 1), (2, 3), ... of each head by the place times a frequency, as llama2.c does."""
    size, turned = WIDTH // HEADS, x_TE.copy()
    for place in range(len(x_TE)):
        for i in range(0, x_TE.shape[1], 2):
            angle = place * 10000.0 ** (-(i % size) / size)
            a, b = x_TE[place, i], x_TE[place, i + 1]
            turned[place, i] = a * np.cos(angle) - b * np.sin(angle)
            turned[place, i + 1] = a * np.sin(angle) + b * np.cos(angle)
    return turned


def forward(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    x, size = w["embedding"][tokens].astype(np.float64), WIDTH // HEADS
    for layer in range(LAYERS):
        seen = normed(x, w["norm"][layer])
        q, k, v = rotated(seen @ w["q"][layer].T), rotated(seen @ w["k"][layer].T), seen @ w["v"][layer].T
        heads = []
        for head in range(HEADS):
            own, shared = slice(head * size, (head + 1) * size), head // (HEADS // KV_HEADS) * size
            scores = q[:, own] @ k[:, shared : shared + size].T / np.sqrt(size)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared : shared + size])
        x = x + np.concatenate(heads, 1) @ w["o"][layer].T
        seen = normed(x, w["norm_2"][layer])
        gate = seen @ w["w1"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (seen @ w["w3"][layer].T)) @ w["w2"][layer].T
    return normed(x, w["last"]) @ w["embedding"].T


def test_weights_give_the_scores_of_llama2_c(recipe: Any) -> None:
    made, tokens = tensors(), [1, 40, 7, 299, 40, 12]
    header = struct.pack("<7i", WIDTH, BETWEEN, LAYERS, HEADS, KV_HEADS, TOKENS, LENGTH)
    config, weights = recipe.read_model(header + b"".join(value.tobytes() for value in made.values()))
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(found, forward(made, tokens), rtol=1e-3, atol=1e-3)


def test_pieces_are_joined_by_score_and_bytes_fall_back(recipe: Any) -> None:
    pieces = [(0.0, b"<unk>"), (0.0, b"\n<s>\n"), (0.0, b"\n</s>\n"), *((0.0, bytes([b])) for b in range(256))]
    pieces += [(-1.0, b"ab"), (-2.0, b"bc"), (-3.0, b" ab"), (-5.0, b" "), (-6.0, b"a"), (-7.0, b"b"), (-8.0, b"c")]
    data = b"\x00" * 4 + b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in pieces)
    tokenizer = recipe.read_tokenizer(data, len(pieces))
    ids = tokenizer("abc\u00e9 b", add_special_tokens=False)["input_ids"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids] == ["\u2581ab", "c", "<0xC3>", "<0xA9>", "\u2581", "b"]
    assert tokenizer.decode(ids) == "abc\u00e9 b"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
