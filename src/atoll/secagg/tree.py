"""A Merkle tree: one hash identifies all adverts, and a short proof shows that an advert is among them.

The tree is padded with empty leaves to a power of two; the number of leaves is part of the root.
"""

from __future__ import annotations

import hashlib

HASH = 32
EMPTY = bytes(HASH)


def build(leaves: list[bytes]) -> list[list[bytes]]:
    """Return all levels of the tree, the leaves' hashes first."""
    level = [_hash(b"\0", leaf) for leaf in leaves]
    level += [EMPTY] * ((1 << depth(len(leaves))) - len(leaves))
    levels = [level]
    while len(level) > 1:
        level = [_hash(b"\1", level[at] + level[at + 1]) for at in range(0, len(level), 2)]
        levels.append(level)
    return levels


def root(levels: list[list[bytes]], num_leaves: int) -> bytes:
    """Return the hash that identifies all leaves."""
    return _top(levels[-1][0], num_leaves)


def proof(levels: list[list[bytes]], index: int) -> bytes:
    """Return the proof that the leaf at this index is in the tree: `depth` hashes."""
    return b"".join(level[index >> height ^ 1] for height, level in enumerate(levels[:-1]))


def proves(proof: bytes, leaf: bytes, index: int, num_leaves: int, root: bytes) -> bool:
    """Return whether a proof shows that a leaf is in the tree with this root."""
    node = _hash(b"\0", leaf)
    for at in range(0, len(proof), HASH):
        sibling = proof[at : at + HASH]
        node = _hash(b"\1", sibling + node if index & 1 else node + sibling)
        index >>= 1
    return len(proof) == HASH * depth(num_leaves) and _top(node, num_leaves) == root


def depth(num_leaves: int) -> int:
    """Return the number of hashes in a proof.

    >>> depth(1), depth(2), depth(1000)
    (0, 1, 10)
    """
    return (num_leaves - 1).bit_length()


def _top(node: bytes, num_leaves: int) -> bytes:
    return _hash(b"\2", num_leaves.to_bytes(8, "big") + node)


def _hash(kind: bytes, data: bytes) -> bytes:
    return hashlib.sha256(kind + data).digest()
