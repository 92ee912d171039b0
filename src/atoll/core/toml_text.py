"""Values as they are typed on a command line: TOML, where a bare word is a string."""

from __future__ import annotations

import tomllib
from typing import Any

PAIRS = {"[": "]", "{": "}"}


def read_toml(text: str) -> Any:
    """Read one value: TOML, or the text itself if it is none; None if it is empty.

    >>> read_toml("0.1"), read_toml("fedprox"), read_toml("[1, 2]"), read_toml(" ")
    (0.1, 'fedprox', [1, 2], None)
    """
    if not text.strip():
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # no TOML, or a number of thousands of digits
        return text


def split_values(text: str) -> list[str]:
    """Split at the commas that stand outside brackets, braces and quotes.

    >>> split_values('fedavg,{name="fedprox", mu=0.1},[1,2]')
    ['fedavg', '{name="fedprox", mu=0.1}', '[1,2]']
    """
    pieces, closing, quote = [""], list[str](), ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in PAIRS:
            closing.append(PAIRS[letter])
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter == "," and not closing:
            pieces.append("")
            continue
        pieces[-1] += letter
    return [piece.strip() for piece in pieces]
