"""Finding equal rows among millions in little memory: hashes are sorted into buckets on disk, one bucket is held at a time."""

from __future__ import annotations

import hashlib
import heapq
import struct
import tempfile
from dataclasses import dataclass, field
from typing import IO, NamedTuple

_RECORD = struct.Struct("<8sBQ")  # hash, 1 for evaluation rows, (file index << 40 | line)
_BUCKETS = 64
_FLUSH_BYTES = 1 << 18
_EXAMPLES = 5


class Place(NamedTuple):
    """A row's file (index) and line."""

    file: int
    line: int


@dataclass
class Duplicates:
    """``repeated`` rows equal an earlier one of the same split; ``leaked`` evaluation rows also stand in train.

    Examples are pairs (row, the row it equals), in file order.
    """

    repeated: int = 0
    leaked: int = 0
    repeated_examples: list[tuple[Place, Place]] = field(default_factory=list)
    leaked_examples: list[tuple[Place, Place]] = field(default_factory=list)


class Finder:
    """Collects row hashes; ``finish`` answers which rows are equal (by a 64-bit hash of their content)."""

    def __init__(self) -> None:
        self._buffers = [bytearray() for _ in range(_BUCKETS)]
        self._files: list[IO[bytes] | None] = [None] * _BUCKETS

    def add(self, content: bytes, place: Place, evaluation: bool) -> None:
        digest = hashlib.sha256(content).digest()[:8]  # in hardware on most machines
        bucket = digest[0] % _BUCKETS
        buffer = self._buffers[bucket]
        buffer += _RECORD.pack(digest, evaluation, place.file << 40 | place.line)
        if len(buffer) >= _FLUSH_BYTES:
            self._flush(bucket)

    def finish(self) -> Duplicates:
        found = Duplicates()
        for bucket in range(_BUCKETS):
            _compare(self._records(bucket), found)
        return found

    def _flush(self, bucket: int) -> None:
        file = self._files[bucket]
        if file is None:
            file = self._files[bucket] = tempfile.TemporaryFile(prefix="burst-rows-")  # noqa: SIM115
        file.write(self._buffers[bucket])
        self._buffers[bucket].clear()

    def _records(self, bucket: int) -> bytes:
        file = self._files[bucket]
        if file is None:
            return bytes(self._buffers[bucket])
        with file:
            file.seek(0)
            return file.read() + bytes(self._buffers[bucket])


def _compare(records: bytes, found: Duplicates) -> None:
    """Add what one bucket shows; of all examples only the first few in file order are kept."""
    seen: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
    repeated = []
    for digest, evaluation, place in _RECORD.iter_unpack(records):
        first = seen[evaluation].setdefault(digest, place)
        if first != place:
            repeated.append((_place(place), _place(first)))
    leaked = [(_place(place), _place(seen[0][digest])) for digest, place in seen[1].items() if digest in seen[0]]
    found.repeated += len(repeated)
    found.leaked += len(leaked)
    found.repeated_examples = heapq.nsmallest(_EXAMPLES, found.repeated_examples + repeated)
    found.leaked_examples = heapq.nsmallest(_EXAMPLES, found.leaked_examples + leaked)


def _place(packed: int) -> Place:
    return Place(packed >> 40, packed & (1 << 40) - 1)
