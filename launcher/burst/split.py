"""Which rows ``data.eval_split`` holds out: decided by a row's content and the seed, whatever its order, file or machine."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NOTHING = -1
"""A threshold that holds out no row."""


def rank(content: bytes, seed: int) -> int:
    """A number in [0, 2**64) from a row's canonical JSON and the seed alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=str(seed).encode()).digest(), "big")


def threshold(contents: Iterable[bytes], share: float | None, seed: int) -> int:
    """The rank up to which rows are held out. Equal rows have equal ranks, so none stands on both sides.

    At least one row is held out. Keeps 8 bytes a row.
    """
    if share is None:
        return NOTHING
    ranks = array("Q", (rank(content, seed) for content in contents))
    if not ranks:
        return NOTHING
    return sorted(ranks)[max(1, round(share * len(ranks))) - 1]
