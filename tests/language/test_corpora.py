"""Texts of presidents and dialogues, as published and as rows of tokens; and data sets of Hugging Face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import DataError, PlanError
from atoll.data.corpora import Address, Exchange, addresses, exchanges
from atoll.data.dataset import Dataset
from atoll.data.sequences import dialogues, huggingface, jsonl, state_of_the_union

IGNORED = -100


@pytest.fixture(scope="module")
def given() -> list[Address]:
    """All addresses; skipped where no source can be reached."""
    try:
        return addresses(quiet=True)
    except DataError as error:
        pytest.skip(f"needs real data: {error}")


@pytest.fixture(scope="module")
def said() -> list[Exchange]:
    """All dialogues; skipped where no source can be reached."""
    try:
        return exchanges(quiet=True)
    except DataError as error:
        pytest.skip(f"needs real data: {error}")


def test_addresses_are_all_there_by_year(given: list[Address]) -> None:
    assert len(given) == 233 and len({each.president for each in given}) == 43
    assert [each.year for each in given] == sorted(each.year for each in given)
    assert given[0].president == "George Washington" and given[-1].year == 2021
    assert min(len(each.text) for each in given) > 5_000


def test_presidents_are_owners(given: list[Address], base: Path) -> None:
    some = ("John Adams", "George Washington")
    data = state_of_the_union(str(base), length=32, presidents=some, quiet=True)
    assert sorted(data.owner_names) == sorted(some) and data.owners is not None
    adams = data.owner_names.index("John Adams")
    tokens = sum(len(each.text) for each in given if each.president == "John Adams")  # a token is a letter
    assert (data.owners == adams).sum() == pytest.approx(0.9 * tokens / 32, rel=0.02)
    assert "public domain" in data.origin
    with pytest.raises(PlanError, match="'Caesar' gave no State of the Union address: take some of Abraham Lincoln"):
        state_of_the_union(str(base), presidents=("Caesar",), quiet=True)


def test_dialogues_are_pairs_in_28_languages(said: list[Exchange]) -> None:
    assert len({each.language for each in said}) == 28
    first = exchanges(("chinese",), quiet=True)[0]
    assert first.topic == "ai" and first.said == "什么是ai" and "人工智能" in first.reply
    joined = [each for each in said if each.topic == "ai" and each.language == "english"]
    assert joined[0].said == joined[1].said == "What is AI?" and joined[0].reply != joined[1].reply
    with pytest.raises(PlanError, match="no dialogues in 'klingon': take some of bengali"):
        exchanges(("klingon",), quiet=True)


def test_replies_count_and_what_was_said_does_not(said: list[Exchange], base: Path) -> None:
    languages = ("english", "french")
    data = dialogues(str(base), length=200, languages=languages, test=0.0, quiet=True)
    assert sorted(data.owner_names) == ["english", "french"]
    first = next(each for each in said if each.language == "english")
    row = data.train_y[data.owners == data.owner_names.index("english")][0]
    prompt = len(first.said) + 1
    assert (row[:prompt] == IGNORED).all() and row[prompt] != IGNORED
    by_topic = dialogues(str(base), length=200, languages=languages, owner="topic", quiet=True)
    assert "english: food" in by_topic.owner_names and len(by_topic.owner_names) > 20


def test_a_data_set_of_hugging_face_gives_the_rows_of_its_file(texts: Path, base: Path) -> None:
    package = pytest.importorskip("datasets")
    face = package.load_dataset("json", data_files=str(texts), split="train", cache_dir=str(texts.parent))
    options = {"tokenizer": str(base), "owner": "who", "text": "said", "prompt": "asked", "length": 12}
    one, other = huggingface(face, **options), jsonl(str(texts), **options)
    assert one.owner_names == other.owner_names and one.num_train > 20
    for name in ("train_x", "train_y", "test_x", "test_y", "owners"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert isinstance(one, Dataset)
    with pytest.raises(DataError, match=r"row 1: no field 'nobody', it has .*'who'.*: name the fields"):
        huggingface(face, **{**options, "owner": "nobody"})
