"""The seal of an adapter: ``SEALED.json``, written last, with size and sha256 of every file. Standard library only.

A folder with a valid seal is complete. Whoever holds it can check it again at any time, on any machine.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burst_payload.manifest import Entry, ManifestError, bundle_id, differences, is_safe_path
from burst_payload.records import publish_directory, read_json, sha256_file, write_json

if TYPE_CHECKING:
    from pathlib import Path

SEAL_NAME = "SEALED.json"
ADAPTER_NAME = "adapter"
WEIGHTS_NAME = "adapter_model.safetensors"
METADATA_NAME = "metadata.json"
TEMPORARY_PREFIX = ".adapter.tmp-"
"""Folders that hold an adapter still being written."""
FORMAT = 1
MAX_HEADER_BYTES = 100_000_000
"""The limit that the safetensors format sets for its own header."""

_ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}


class SealError(Exception):
    """A sealed folder is not as it was sealed. Carries every difference, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Seal:
    """``seal_id`` names the content; ``files`` are what the seal covers."""

    seal_id: str
    bundle_id: str
    files: list[Entry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)


def write_seal(folder: Path, bundle: str) -> Seal:
    """Seal all files of ``folder`` as they are now; ``bundle`` is the id of the bundle that made them."""
    entries = [
        Entry(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_file(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != SEAL_NAME
    ]
    seal = Seal(bundle_id(entries), bundle, entries)
    write_json(
        folder / SEAL_NAME,
        {
            "format": FORMAT,
            "seal_id": seal.seal_id,
            "bundle_id": bundle,
            "files": [{"path": e.path, "size_bytes": e.size_bytes, "sha256": e.sha256} for e in entries],
        },
    )
    return seal


def read_seal(folder: Path) -> Seal:
    """The seal of a folder without checking the files. Raises ``SealError``."""
    path = folder / SEAL_NAME
    try:
        return parse_seal(read_json(path))
    except FileNotFoundError:
        raise SealError([f"{path} is missing: the folder is not sealed"]) from None
    except ValueError as error:
        raise SealError([f"{path} is not JSON: {error}"]) from None


def parse_seal(value: Any) -> Seal:
    """A seal from its JSON value. Raises ``SealError`` for anything malformed, unsafe or inconsistent."""
    try:
        entries = [Entry(item["path"], item["size_bytes"], item["sha256"]) for item in value["files"]]
        well_formed = (
            value["format"] == FORMAT
            and isinstance(value["bundle_id"], str)
            and all(
                isinstance(e.path, str)
                and is_safe_path(e.path)
                and type(e.size_bytes) is int
                and isinstance(e.sha256, str)
                for e in entries
            )
        )
        if well_formed and value["seal_id"] == bundle_id(entries):
            return Seal(value["seal_id"], value["bundle_id"], entries)
    except (TypeError, KeyError):
        pass
    raise SealError([f"{SEAL_NAME} is malformed or was edited"])


def verify_seal(folder: Path) -> Seal:
    """Check a sealed adapter: every hash, and the safetensors header against the file's size.

    Raises ``SealError`` with every difference.
    """
    seal = read_seal(folder)
    problems = differences(folder, seal.files)
    names = {entry.path for entry in seal.files}
    problems += [
        f"{name}: not covered by the seal"
        for name in (WEIGHTS_NAME, "adapter_config.json", METADATA_NAME)
        if name not in names
    ]
    if not problems:
        try:
            tensors(folder / WEIGHTS_NAME)
        except ManifestError as error:
            problems += error.problems
    if problems:
        raise SealError(problems)
    return seal


def is_sealed(folder: Path) -> bool:
    """True where ``folder`` verifies completely."""
    try:
        verify_seal(folder)
    except (SealError, OSError):
        return False
    return True


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def tensors(path: Path) -> dict[str, Tensor]:
    """The tensors that a safetensors file declares, by name.

    Format: an 8-byte little-endian length, a JSON header of that length, then the data; each tensor has ``dtype``,
    ``shape`` and ``data_offsets`` into the data (https://github.com/huggingface/safetensors, "Format").
    Raises ``ManifestError`` where header and file do not agree to the byte.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ManifestError([f"{path.name}: {size} bytes cannot hold its safetensors header"])
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ManifestError([f"{path.name}: the safetensors header is not JSON: {error}"]) from None
    found: dict[str, Tensor] = {}
    ranges = []
    try:
        for name, item in header.items():
            if name == "__metadata__":
                continue
            begin, end = item["data_offsets"]
            count = 1
            for side in item["shape"]:
                count *= side
            if count * _ITEM_BYTES[item["dtype"]] != end - begin:
                raise ManifestError([f"{path.name}: {name}: shape and length disagree"])
            found[name] = Tensor(item["dtype"], tuple(item["shape"]), end - begin)
            ranges.append((begin, end))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError([f"{path.name}: malformed safetensors header: {error}"]) from None
    position = 0
    for begin, end in sorted(ranges):
        if begin != position:
            raise ManifestError([f"{path.name}: tensors overlap or leave a gap at byte {position}"])
        position = end
    if 8 + length + position != size:
        raise ManifestError([f"{path.name}: {size} bytes instead of {8 + length + position}: truncated or padded"])
    return found


def recover(output: Path, bundle: str | None) -> None:
    """Put ``output/adapter`` in order after a former process: afterwards it is sealed by ``bundle``, or absent.

    A folder under that name that does not verify, or that another bundle made, is moved aside, never deleted; one that
    was sealed but had not got its name yet gets it; unfinished ones are removed.
    """
    adapter = output / ADAPTER_NAME
    if os.path.lexists(adapter) and not _made_by(adapter, bundle):
        number = 1
        while os.path.lexists(aside := output / f"{ADAPTER_NAME}.unsealed-{number}"):
            number += 1
        os.rename(adapter, aside)
    for path in sorted(output.glob(f"{TEMPORARY_PREFIX}*")):
        if not adapter.exists() and _made_by(path, bundle):
            publish_directory(path, adapter)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


def _made_by(folder: Path, bundle: str | None) -> bool:
    try:
        return bundle is not None and verify_seal(folder).bundle_id == bundle
    except (SealError, OSError):
        return False
