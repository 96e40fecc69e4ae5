"""The manifest of a bundle: path, size and sha256 of every file, and one id for the whole.

The id is the sha256 of the sorted ``path``, ``size`` and ``sha256`` lines, so equal content has an equal id whatever
the archive or the clock says. Standard library only.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from burst_payload.records import read_json, sha256_file

MANIFEST_NAME = "MANIFEST.json"
FORMAT = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestError(Exception):
    """The files are not those that the manifest names. Carries every difference, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Entry:
    path: str
    size_bytes: int
    sha256: str


def bundle_id(entries: list[Entry]) -> str:
    """64 hex digits that name the content, independent of file order and time stamps."""
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda entry: entry.path):
        digest.update(f"{entry.path}\0{entry.size_bytes}\0{entry.sha256}\n".encode())
    return digest.hexdigest()


def to_json(entries: list[Entry]) -> dict[str, Any]:
    ordered = sorted(entries, key=lambda entry: entry.path)
    return {
        "format": FORMAT,
        "bundle_id": bundle_id(ordered),
        "files": [{"path": e.path, "size_bytes": e.size_bytes, "sha256": e.sha256} for e in ordered],
    }


def parse(value: Any) -> tuple[str, list[Entry]]:
    """The bundle id and entries of a manifest. Raises ``ManifestError`` for anything malformed or unsafe."""
    problems: list[str] = []
    entries: list[Entry] = []
    if not isinstance(value, dict) or value.get("format") != FORMAT or not isinstance(value.get("files"), list):
        raise ManifestError([f"{MANIFEST_NAME}: not a manifest of format {FORMAT}"])
    for item in value["files"]:
        try:
            entry = Entry(item["path"], item["size_bytes"], item["sha256"])
        except (TypeError, KeyError):
            problems.append(f"{MANIFEST_NAME}: malformed entry {item!r}")
            continue
        if not isinstance(entry.path, str) or not is_safe_path(entry.path):
            problems.append(f"{MANIFEST_NAME}: unsafe path {entry.path!r}")
        elif not isinstance(entry.size_bytes, int) or isinstance(entry.size_bytes, bool) or entry.size_bytes < 0:
            problems.append(f"{MANIFEST_NAME}: {entry.path}: size_bytes is not a size")
        elif not isinstance(entry.sha256, str) or not _SHA256.fullmatch(entry.sha256):
            problems.append(f"{MANIFEST_NAME}: {entry.path}: sha256 is not 64 hex digits")
        else:
            entries.append(entry)
    paths = [entry.path for entry in entries]
    problems += [
        f"{MANIFEST_NAME}: {path} is listed twice" for path in sorted({p for p in paths if paths.count(p) > 1})
    ]
    if not problems and value.get("bundle_id") != bundle_id(entries):
        problems.append(f"{MANIFEST_NAME}: bundle_id does not match the files it lists")
    if problems:
        raise ManifestError(problems)
    return value["bundle_id"], entries


def verify(folder: Path) -> str:
    """Check every listed file of ``folder`` by size and hash and return the bundle id.

    Files that are not listed (outputs, caches) do not matter. Raises ``ManifestError`` with every difference.
    """
    try:
        value = read_json(folder / MANIFEST_NAME)
    except FileNotFoundError:
        raise ManifestError([f"{MANIFEST_NAME} is missing from {folder}"]) from None
    except ValueError as error:
        raise ManifestError([f"{MANIFEST_NAME} is not JSON: {error}"]) from None
    identifier, entries = parse(value)
    problems = differences(folder, entries)
    if problems:
        raise ManifestError(problems)
    return identifier


def listed_id(folder: Path) -> str | None:
    """The bundle id that a folder's manifest names, without checking the files; None where there is no sound manifest."""
    try:
        return parse(read_json(folder / MANIFEST_NAME))[0]
    except (OSError, ValueError, ManifestError):
        return None


def differences(folder: Path, entries: list[Entry]) -> list[str]:
    """What of ``entries`` is not in ``folder`` as listed, one sentence each; empty when all is well."""
    problems: list[str] = []
    for entry in entries:
        path = folder / entry.path
        if not path.is_file():
            problems.append(f"{entry.path}: missing")
        elif (size := path.stat().st_size) != entry.size_bytes:
            problems.append(f"{entry.path}: {size} bytes instead of {entry.size_bytes}")
        elif sha256_file(path) != entry.sha256:
            problems.append(f"{entry.path}: content differs from its sha256")
    return problems


def is_safe_path(path: str) -> bool:
    """True for a relative POSIX path that stays inside its folder on every system."""
    if not path or "\\" in path or "\0" in path or ":" in path:
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and str(pure) == path and path != "."
