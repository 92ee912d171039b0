"""How fast codecs are, on one core, beside a copy of the same memory. Run: python benchmarks/codecs.py

Ten million normal float32 values. Encoding includes writing the bytes that travel, decoding includes reading them. All
take turns with the copy; a figure is the best of the turns, in gigabytes of float32 input a second.
"""

import argparse
import time
from pathlib import Path

import torch

from atoll.core.params import ParamSpec, Slot
from atoll.core.parts import Part
from atoll.core.seeds import generator
from atoll.core.transform import Encoding, chain
from atoll.core.wire import pack, unpack

CODECS = {
    "quantise, 8 bits": [Part("quantise", bits=8)],
    "quantise, 4 bits": [Part("quantise", bits=4)],
    "qsgd": [Part("qsgd")],
    "half": [Part("half")],
    "rotate": [Part("rotate")],
    "rotate, quantise 1 bit": [Part("rotate"), Part("quantise", bits=1)],
    "eden, 1 bit": [Part("eden", bits=1)],
    "top_k, 1 %": [Part("top_k", fraction=0.01, error_feedback=False)],
    "top_k, 1 %, error feedback": [Part("top_k", fraction=0.01)],
    "random_k, 1 %": [Part("random_k", fraction=0.01)],
    "sign": [Part("sign")],
}


def seconds(work, *args):
    """How long some work takes, and what it gives."""
    started = time.perf_counter()
    found = work(*args)
    return time.perf_counter() - started, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    vector_V = torch.randn(args.values, generator=torch.Generator().manual_seed(0))
    target_V = torch.empty_like(vector_V)
    spec = ParamSpec((Slot("weight", (args.values,), 0, args.values),), args.values, torch.float32)
    gigabytes = vector_V.nbytes / 1e9
    chains = {name: chain(*(part.build("transforms") for part in parts)) for name, parts in CODECS.items()}
    best = {name: [float("inf")] * 2 for name in chains} | {"copy": [float("inf")]}
    sizes, memories = {}, {name: {} for name in chains}
    for turn in range(args.turns):
        best["copy"][0] = min(best["copy"][0], seconds(target_V.copy_, vector_V)[0])
        for name, codec in chains.items():
            encoding = Encoding(spec, turn, generator(0, "bench", turn))
            took, (raw, memories[name]) = seconds(_encoded, codec, vector_V, memories[name], encoding)
            back, _ = seconds(_decoded, codec, raw)
            best[name] = [min(old, new) for old, new in zip(best[name], (took, back), strict=True)]
            sizes[name] = len(raw)
    copy = gigabytes / best["copy"][0]
    lines = [
        f"Made by `python benchmarks/codecs.py`: {args.values:,} float32 values, one core, best of {args.turns} turns.",
        f"A copy of the memory does {copy:.1f} GB/s in the same run.",
        "",
        "| codec | times smaller | encode, GB/s | decode, GB/s | encode, share of a copy | decode, share of a copy |",
        "|---|---|---|---|---|---|",
    ]
    for name in chains:
        up, down = (gigabytes / took for took in best[name])
        smaller = vector_V.nbytes / sizes[name]
        lines.append(f"| {name} | {smaller:.1f} | {up:.2f} | {down:.2f} | {up / copy:.3f} | {down / copy:.3f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    args.out.write_text(text)


def _encoded(codec, vector_V, memory, encoding):
    payload, memory = codec.encode(vector_V, memory, encoding)
    return pack(payload), memory


def _decoded(codec, raw):
    return codec.decode(unpack(raw, max_bytes=2 * len(raw)))


if __name__ == "__main__":
    main()
