"""Files that are whole or absent, and an append-only event log.

Every file that matters is written beside its final name, fsynced and renamed, and then its folder is fsynced, so that
a reader (or the next process after a power cut) never meets half of it. Standard library only.

Each step on the way is a named point (``reach``). Tests set ``BURST_FAULT`` to make a process die, hang or run out of
disk at one of them; without that variable a point costs one comparison.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import json
import math
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHUNK_BYTES = 1 << 20
FAULT_ALWAYS_VARIABLE = "BURST_FAULT_ALWAYS"
FAULT_VARIABLE = "BURST_FAULT"
"""``ACTION:PATTERN[:N]``: at the N-th point (default the first) whose name matches, ``kill``, ``segv``, ``term``,
``hang``, ``full`` (the disk) or ``error``. A restarted worker is spared, unless ``BURST_FAULT_ALWAYS`` is set."""


class _Fault:
    """The planted fault of this process, if any. The points passed are counted, so that a test can name the n-th."""

    def __init__(self, text: str | None) -> None:
        self.action, self.pattern, count = (*(text or "").split(":"), "", "", "")[:3]
        self.left = int(count or 1)
        rank = os.environ.get("RANK", "0")
        self.prefix = f"rank {rank} " if rank != "0" else ""

    def reach(self, point: str) -> None:
        if not fnmatch.fnmatchcase(self.prefix + point, self.pattern):
            return
        self.left -= 1
        if self.left != 0:
            return
        signals = {"kill": "SIGKILL", "segv": "SIGSEGV", "term": "SIGTERM"}
        if self.action in signals:
            os.kill(os.getpid(), getattr(signal, signals[self.action]))
        elif self.action == "error":
            raise RuntimeError("planted")
        elif self.action == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
        elif self.action == "hang":
            while True:
                time.sleep(3600)
        else:
            raise ValueError(f"{FAULT_VARIABLE}: no action is called {self.action!r}")


_fault: _Fault | None = None


def plant(text: str | None) -> None:
    """Plant a fault, as ``BURST_FAULT`` does at the start of a process; None takes it away."""
    global _fault  # noqa: PLW0603 - a process has one set of faults
    _fault = _Fault(text) if text else None


plant(os.environ.get(FAULT_VARIABLE))


def reach(point: str) -> None:
    """A step of something that must survive its own death; see ``BURST_FAULT``."""
    if _fault is not None:
        _fault.reach(point)


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that the final name only ever holds a complete file.

    Raises ``OSError`` (for example on a full disk) and then leaves the former file, if any, as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            reach(f"write {path.name}")
            file.write(data)
            file.flush()
            reach(f"sync {path.name}")
            os.fsync(file.fileno())
        reach(f"rename {path.name}")
        os.replace(temporary, path)
        reach(f"renamed {path.name}")
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically. Not-a-number values are refused (``ValueError``)."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def fsync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Make renames inside ``path`` durable. Does nothing where folders cannot be opened (Windows)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some network file systems refuse fsync on a folder; the rename itself has happened
    finally:
        os.close(descriptor)


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename a finished folder into place after fsyncing all that is in it. ``final`` must not exist."""
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            reach(f"sync {final.name}/{path.name}")
            fsync_file(path)
        else:
            fsync_directory(path)
    fsync_directory(temporary)
    reach(f"rename {final.name}")
    os.rename(temporary, final)
    reach(f"renamed {final.name}")
    fsync_directory(final.parent)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class EventLog:
    """``events.jsonl``: one JSON object a line, each with a sequence number ``seq`` and a Unix time ``time``.

    Lines are only ever appended. A line cut off by a crash is closed by the next writer and skipped by readers.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._seq = 0
        for event in read_events(path):
            self._seq = max(self._seq, int(event["seq"]) + 1)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the log
        if torn:
            self._file.write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one event. Not-a-number values become ``null``: JSON has no word for them."""
        with self._lock:
            event = {"seq": self._seq, "time": round(time.time(), 3), "event": kind, **fields}
            try:
                line = json.dumps(event, ensure_ascii=False, allow_nan=False)
            except ValueError:
                line = json.dumps(_without_nan(event), ensure_ascii=False, allow_nan=False)
            self._file.write(line.encode() + b"\n")
            self._seq += 1

    def close(self) -> None:
        self._file.close()


def read_events(path: Path, offset_bytes: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the complete events of a log from a byte offset on; torn or foreign lines are passed over."""
    try:
        with open(path, "rb") as file:
            file.seek(offset_bytes)
            for line in file:
                if line.endswith(b"\n") and (event := parse_event(line)) is not None:
                    yield event
    except FileNotFoundError:
        return


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One log line as an event, or None where it is not one (torn by a crash)."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if isinstance(event, dict) and isinstance(event.get("seq"), int) and isinstance(event.get("event"), str):
        return event
    return None


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
