"""Ids as parties compare them: one rule for all, checked before anything is sent."""

from __future__ import annotations

import hashlib
import hmac
import unicodedata
from collections.abc import Sequence
from typing import Literal, get_args

from atoll.core.errors import DataError

Rule = Literal["folded", "exact"]
RULES = get_args(Rule)
MAX_IDS = 5_000_000
"""More ids than this no party may have, unless both say so."""
PSEUDONYM = 16
"""Bytes of what stands for an id between parties that share a key."""


def normalised(text: str, rule: Rule) -> str:
    """Return an id as it is compared: without spaces around it and in one form of its characters, or as it is.

    >>> normalised(" Müller-7 ", "folded"), normalised(" A", "exact")
    ('müller-7', ' A')
    """
    return text if rule == "exact" else unicodedata.normalize("NFKC", text).strip().casefold()


def read_ids(texts: Sequence[str], rule: Rule, whose: str, max_ids: int = MAX_IDS) -> list[str]:
    """Return all ids as they are compared; refuse none, too many, an empty one, and one that is there twice."""
    if rule not in RULES:
        raise DataError(f"{whose}: there is no rule '{rule}' for ids: use {' or '.join(RULES)}")
    if not 1 <= len(texts) <= max_ids:
        raise DataError(f"{whose} has {len(texts)} ids, 1 to {max_ids} are allowed: check the file, or raise max_ids")
    ids, rows = [normalised(text, rule) for text in texts], dict[str, int]()
    for row, each in enumerate(ids):
        if not each:
            raise DataError(f"{whose} has no id in row {row + 1}: leave the row out, or give it one")
        if rows.setdefault(each, row) != row:
            raise DataError(
                f"{whose} has the same id in rows {rows[each] + 1} and {row + 1}"
                f"{' (ids are compared without case)' if rule == 'folded' else ''}: keep one row of each id"
            )
    return ids


def salted(ids: Sequence[str], salt: bytes) -> list[str]:
    """Return ids as they go into the intersection: hashes with a salt of this session, all of one length."""
    return [hashlib.blake2b(each.encode(), key=salt, digest_size=32).hexdigest() for each in ids]


def pseudonym(key: bytes, each: str) -> bytes:
    """Return what stands for an id among those that share a key; nobody else can try ids out."""
    return hmac.digest(key, b"id " + each.encode(), "sha256")[:PSEUDONYM]


def order_tag(key: bytes, pseudonyms: Sequence[bytes]) -> bytes:
    """Return a commitment to rows in their order: equal where they are, and saying nothing without the key."""
    return hmac.digest(key, b"order " + b"".join(pseudonyms), "sha256")
