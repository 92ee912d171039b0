"""Rows of tokens from texts: owners, packing, prompts that do not count, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import DataError
from atoll.data.sequences import Text, Tokenizer, _texts, token_rows

LETTERS = Tokenizer(lambda text: [ord(letter) - 97 for letter in text], 28, begin=26, end=27)
SAID = [Text("a", "abcdefgh"), Text("b", "xyz"), Text("a", "klm", prompt="ij"), Text("b", "q")]


def test_packed_rows_join_the_texts_of_an_owner_and_of_nobody_else() -> None:
    data = token_rows("said", SAID, LETTERS, length=5, test=0.0001)
    rows = {name: data.train_x[data.owners == number] for number, name in enumerate(data.owner_names)}
    tests = data.test_x
    stream = [26, *range(8), 27, 26, 8, 9, 10, 11, 12, 27]
    assert list(rows) == ["a", "b"] and len(tests) == 2  # one row of each
    assert rows["a"].tolist() == [stream[0:5], stream[5:10], stream[10:15]]
    assert rows["b"].tolist() == [[26, 23, 24, 25, 27]] and tests.tolist()[1] == [26, 16, 27, 27, 27]
    assert data.problem == "tokens" and data.num_classes == 28


def test_targets_are_the_next_tokens_and_prompts_do_not_count() -> None:
    data = token_rows("said", SAID, LETTERS, length=8, packed=False, test=0.0)
    rows = {tuple(x): y.tolist() for x, y in zip(data.train_x.tolist(), data.train_y, strict=True)}
    assert rows[(26, 8, 9, 10, 11, 12, 27, 27)] == [-100, -100, 10, 11, 12, 27, -100, -100]
    assert rows[(26, 23, 24, 25, 27, 27, 27, 27)] == [23, 24, 25, 27, -100, -100, -100, -100]
    assert len(rows) == 5  # the longest text has two rows


def test_no_tokens_are_lost_or_counted_twice() -> None:
    rng = np.random.default_rng(0)
    texts = [Text(str(who), "".join(chr(97 + n) for n in rng.integers(0, 26, rng.integers(1, 30)))) for who in range(9)]
    for packed in (True, False):
        data = token_rows("any", texts, LETTERS, length=7, packed=packed, test=0.3)
        counted = int((data.train_y != -100).sum() + (data.test_y != -100).sum())
        assert counted == sum(len(text.answer) + 1 for text in texts)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("{", "line 1: .*each line must be a JSON object"),
        ('{"owner": "a"}', "no field 'text', it has .*name the fields"),
        ("[1]", "no field 'owner'"),
    ],
)
def test_wrong_files_are_refused_with_their_line(tmp_path: Path, lines: str, words: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(lines)
    with pytest.raises(DataError, match=words):
        list(_texts(path, "owner", "text", ""))
    with pytest.raises(DataError, match="cannot be read"):
        list(_texts(tmp_path / "none", "owner", "text", ""))


def test_fields_are_read_by_name(tmp_path: Path) -> None:
    path, entry = tmp_path / "texts.jsonl", dict[str, Any](who=3, question="why", answer="so")
    path.write_text(json.dumps(entry) + "\n\n")
    assert list(_texts(path, "who", "answer", "question")) == [Text("3", "so", "why")]
