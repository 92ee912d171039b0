"""Let a base model speak with an adapter that a federation has trained, by transformers and peft alone.

python recipes/language/use_adapter.py models/stories15m adapters/hamlet "My lord,"
"""

from __future__ import annotations

import sys

import peft
import torch
import transformers


def say(base: str, adapter: str, prompt: str, tokens: int = 40) -> tuple[str, str]:
    """Return how a prompt goes on, by the base and with the adapter; the likeliest token each time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)

    def answer(speaker: torch.nn.Module) -> str:
        with torch.inference_mode():
            ids = speaker.generate(**asked, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]
        return str(tokenizer.decode(ids[0], skip_special_tokens=True))

    before = answer(model)
    return before, answer(peft.PeftModel.from_pretrained(model, adapter).eval())


def main(arguments: list[str]) -> None:
    """Print both answers."""
    if len(arguments) != 3:
        raise SystemExit('usage: python recipes/language/use_adapter.py BASE ADAPTER "PROMPT"')
    before, after = say(*arguments)
    print(f"base:         {before}\nwith adapter: {after}")


if __name__ == "__main__":
    main(sys.argv[1:])
