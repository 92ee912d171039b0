"""From texts to counts of words. Shapes: N texts, V words of the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from atoll.core.options import Range
from atoll.data.targets import Array

NumWords = Annotated[int, Range(1, 2**15, hint="every word is a feature of every text")]
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+")
DIGIT = re.compile(r"[0-9]")
MAX_COUNT = 255


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, and numbers as zeros, so that only their length counts.

    >>> words("Don't call 07123, CALL me!")
    ["don't", 'call', '00000', 'call', 'me']
    """
    return WORD.findall(DIGIT.sub("0", text.lower()))


def bags_of_words(texts: Sequence[str], train: Array, num_words: int) -> tuple[Array, tuple[str, ...]]:
    """Count, in every text, each of the words that are in most of the training texts: (N, V), and the vocabulary.

    Words in equally many texts are taken in alphabetical order; texts for test do not matter for the choice.

    >>> counts, vocabulary = bags_of_words(["a b b", "b c", "c c d"], np.array([0, 1]), 2)
    >>> vocabulary, counts.tolist()
    (('b', 'a'), [[2, 1], [1, 0], [0, 0]])
    """
    number: dict[str, int] = {}
    texts_N = [np.array([number.setdefault(word, len(number)) for word in words(text)], np.int64) for text in texts]
    num_texts = np.zeros(len(number), dtype=np.int64)
    for row in train:
        num_texts[np.unique(texts_N[row])] += 1
    known = sorted(number, key=lambda word: (-num_texts[number[word]], word))
    vocabulary = tuple(word for word in known[:num_words] if num_texts[number[word]])
    column = np.full(len(number), len(vocabulary))
    column[[number[word] for word in vocabulary]] = np.arange(len(vocabulary))
    counts_NV = np.empty((len(texts), len(vocabulary)), dtype=np.uint8)
    for row, text in enumerate(texts_N):
        counts = np.bincount(column[text], minlength=len(vocabulary) + 1)[: len(vocabulary)]
        counts_NV[row] = np.minimum(counts, MAX_COUNT)
    return counts_NV, vocabulary
