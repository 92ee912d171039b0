"""What README and docs tell their readers to type: commands, and the plans that stand above them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELLS = ("", "sh", "bash", "shell", "console")
PROGRAMS = ("atoll", "make", "python", "pytest")
LABEL = re.compile(r"atoll \w+ [12]\b")
"""Not a command: what the protocol begins a signed text with."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:atoll|make|python|pytest) [^`]+)`")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    text: str


class Command(NamedTuple):
    """A line that a reader may type, as it stands in the text but for its comment."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    return [Block(page, language, text) for language, text in FENCE.findall(page.read_text())]


def commands_in(block: Block) -> list[Command]:
    """The commands of a block: lines that begin with one of our programs, continued by backslashes, one at a `&&`.

    A comment that ends with a command says what to type next.
    """
    if block.language not in SHELLS:
        return []
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        plain, _, comment = line.removeprefix("$ ").partition(" # ")
        next_one = re.search(r"\batoll [a-z].*", comment)
        for text in (*plain.split(" && "), *([next_one[0]] if next_one else [])):
            words = text.split()
            if words and words[0] in PROGRAMS and not LABEL.match(text.strip()):
                found.append(Command(block.page.name, " ".join(words)))
    return found


def inline_commands() -> Iterator[Command]:
    """Every command that stands in the middle of a sentence."""
    for page in PAGES:
        prose = FENCE.sub("", page.read_text())
        for text in INLINE.findall(prose):
            if not LABEL.match(text):
                yield Command(page.name, " ".join(text.split()))
