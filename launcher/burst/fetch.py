"""Bringing an adapter home: pull, verify, adopt.

A file only counts when its size and hash are those of the seal. What was pulled before a cut is kept and continued; an
adapter that is already there and good stays as it is, and a good one is never replaced by a bad one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from filelock import FileLock

from burst import paths
from burst.errors import BurstError, InvalidInput, VerificationFailed
from burst_payload import records, seal

if TYPE_CHECKING:
    from pathlib import Path

    from burst_payload.manifest import Entry

OpenFile = Callable[[str, int], BinaryIO]
"""Opens a file of a run's output folder, such as ``adapter/NAME``, at a byte offset."""


@dataclass(frozen=True)
class Fetched:
    """An adapter at its destination. ``pulled_bytes`` is 0 where it was there already; ``replaced``: a changed copy was."""

    folder: Path
    seal: seal.Seal
    pulled_bytes: int
    replaced: bool = False


def fetch(
    open_file: OpenFile, destination: Path, *, bundle_id: str | None, progress: Callable[[int], None] | None = None
) -> Fetched:
    """Pull a sealed adapter into ``destination`` and verify it there.

    Args:
        open_file: where the files come from.
        destination: the adapter's folder here.
        bundle_id: the bundle that must have made it; None accepts any.
        progress: is told the bytes of each chunk.

    Raises:
        BurstError: the adapter is not sealed yet, or the source broke off (run it again: it continues).
        VerificationFailed: what arrived is not what was sealed; the destination is as it was before.
        InvalidInput: the destination is a folder of something else.
    """
    destination = destination.absolute()
    with _lock(destination):
        return _fetch(open_file, destination, bundle_id, progress)


def _fetch(
    open_file: OpenFile, destination: Path, bundle_id: str | None, progress: Callable[[int], None] | None
) -> Fetched:
    raw, sealed = _pull_seal(open_file)
    if bundle_id is not None and sealed.bundle_id != bundle_id:
        raise VerificationFailed(
            f"the adapter was made by bundle {sealed.bundle_id[:12]}, not by this run's {bundle_id[:12]}",
            "look at the run's folder: another run wrote into it",
        )
    recover(destination)
    replaced = destination.is_dir() and any(destination.iterdir())
    if destination.exists() or destination.is_symlink():
        if _is_good(destination, sealed):
            return Fetched(destination, sealed, 0)
        refuse_foreign(destination, sealed)
    partial = destination.with_name(f".{destination.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    pulled = pull(
        lambda path, offset: open_file(f"{seal.ADAPTER_NAME}/{path}", offset), sealed.files, partial, progress
    )
    records.write_atomic(partial / seal.SEAL_NAME, raw)
    _remove_strangers(partial, sealed)
    try:
        verified = seal.verify_seal(partial)
    except seal.SealError as error:
        raise VerificationFailed(
            f"what was fetched is not what was sealed: {error}",
            "run burst fetch again; what is at the destination was left alone",
        ) from error
    _swap(partial, destination)
    return Fetched(destination, verified, pulled, replaced)


def check_destination(destination: Path) -> None:
    """Raise ``InvalidInput`` where an adapter could not be put: asked before training, not after it."""
    if os.path.lexists(destination):
        refuse_foreign(destination, None)
    parent = destination.absolute().parent
    above = parent if parent.exists() else parent.parent  # ./adapters itself is made when there is something to put
    try:
        above.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{above} cannot be made: {error.strerror}", "give another -o") from None
    if not os.access(above, os.W_OK | os.X_OK):
        raise InvalidInput(f"{above} cannot be written", "give another -o")


def _lock(destination: Path) -> FileLock:
    """One fetch at a time into a destination; the lock lies with burst's own files."""
    folder = paths.home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{records.sha256_bytes(os.fsencode(destination))[:16]}.lock")


def recover(destination: Path) -> None:
    """Finish a swap that was killed half-way: an adapter that was moved aside goes back where no new one stands."""
    for aside in destination.parent.glob(f".{destination.name}.old-*"):
        if not destination.exists():
            with suppress(OSError):
                os.rename(aside, destination)
                continue
        shutil.rmtree(aside, ignore_errors=True)


def verify(folder: Path) -> seal.Seal:
    """Check an adapter folder against its seal. Raises ``VerificationFailed``."""
    try:
        return seal.verify_seal(folder)
    except seal.SealError as error:
        raise VerificationFailed(f"{folder} does not verify: {error}", "fetch it again: burst fetch RUN") from error


def _pull_seal(open_file: OpenFile) -> tuple[bytes, seal.Seal]:
    """The seal as it lies at the source and as a value, read once: what is verified is what is kept."""
    try:
        with open_file(f"adapter/{seal.SEAL_NAME}", 0) as file:
            raw = b"".join(iter(lambda: file.read(records.CHUNK_BYTES), b""))
        return raw, seal.parse_seal(json.loads(raw))
    except FileNotFoundError:
        raise BurstError("there is no sealed adapter yet", "watch the run with: burst logs -f") from None
    except (ValueError, seal.SealError) as error:
        raise VerificationFailed(f"the seal cannot be used: {error}", "look at the run's folder") from error


def pull(
    open_file: OpenFile, entries: list[Entry], partial: Path, progress: Callable[[int], None] | None = None
) -> int:
    """Pull files into ``partial``, each continuing what is there and checked by its hash. Returns the bytes that came over.

    Raises ``VerificationFailed`` for a file that is not there, or not as its entry says.
    """
    return sum(_pull(open_file, entry, partial, progress) for entry in entries)


def _pull(open_file: OpenFile, entry: Entry, partial: Path, progress: Callable[[int], None] | None) -> int:
    path = partial / entry.path
    path.parent.mkdir(parents=True, exist_ok=True)
    for fresh in (False, True):
        have = path.stat().st_size if path.is_file() and not fresh else 0
        if have > entry.size_bytes:
            have = 0
        pulled, sha256 = _copy(open_file, entry, path, have, progress)
        if sha256 == entry.sha256:
            return pulled
    path.unlink()
    raise VerificationFailed(
        f"{entry.path} arrived with another size or hash than it was recorded with",
        "run burst fetch again; what is at the destination was left alone",
    )


def _copy(
    open_file: OpenFile, entry: Entry, path: Path, offset: int, progress: Callable[[int], None] | None
) -> tuple[int, str]:
    """Pull a file's bytes from ``offset`` on. Returns how many came over, and the sha256 of all of it, taken on the way."""
    copied, digest = 0, hashlib.sha256()
    with open(path, "r+b" if offset else "wb") as target:
        while target.tell() < offset:
            digest.update(target.read(min(records.CHUNK_BYTES, offset - target.tell())))
        if offset < entry.size_bytes or offset == 0:
            try:
                with open_file(entry.path, offset) as source:
                    while chunk := source.read(records.CHUNK_BYTES):
                        target.write(chunk)
                        digest.update(chunk)
                        copied += len(chunk)
                        if progress is not None:
                            progress(len(chunk))
            except FileNotFoundError as error:
                raise VerificationFailed(
                    f"{entry.path} is recorded but not there", "look at the run's folder"
                ) from error
        target.truncate()
        target.flush()
        os.fsync(target.fileno())
    return copied, digest.hexdigest()


def _is_good(destination: Path, sealed: seal.Seal) -> bool:
    try:
        return seal.verify_seal(destination).seal_id == sealed.seal_id
    except (seal.SealError, OSError):
        return False


def refuse_foreign(destination: Path, sealed: seal.Seal | None) -> None:
    """Only an empty folder, or a damaged copy of the adapter ``sealed``, may be replaced. Raises ``InvalidInput``."""
    if destination.is_symlink() or not destination.is_dir():
        raise InvalidInput(f"{destination} is not a folder", "give another -o")
    inside = {path.relative_to(destination).as_posix() for path in destination.rglob("*") if not path.is_dir()}
    if not inside:
        return
    try:
        there = seal.read_seal(destination)
    except seal.SealError:
        there = None
    if there is None:
        what = "something that burst did not put there"
    elif sealed is None or there.seal_id != sealed.seal_id:
        what = "another adapter"
    elif strangers := inside - {entry.path for entry in there.files} - {seal.SEAL_NAME}:
        what = f"files beside a damaged copy of the adapter: {', '.join(sorted(strangers)[:3])}"
    else:
        return
    raise InvalidInput(f"{destination} holds {what}", "give another -o, or move it away")


def _remove_strangers(partial: Path, sealed: seal.Seal) -> None:
    wanted = {entry.path for entry in sealed.files} | {seal.SEAL_NAME}
    for path in partial.rglob("*"):
        if path.is_file() and path.relative_to(partial).as_posix() not in wanted:
            path.unlink()


def _swap(partial: Path, destination: Path) -> None:
    """Put a verified folder in place; the former one goes only after the new one stands."""
    aside = destination.with_name(f".{destination.name}.old-{uuid.uuid4().hex[:8]}")
    if destination.exists():
        os.rename(destination, aside)
    records.publish_directory(partial, destination)
    shutil.rmtree(aside, ignore_errors=True)
