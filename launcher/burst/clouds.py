"""Which clouds can be rented from, asked of SkyPilot in a process of its own, and remembered."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burst import paths
from burst_payload import records

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 2.0
FRESH_S, USABLE_S = 600.0, 86_400.0
"""An answer older than the first is asked for anew, for the next time; one older than the second is waited for."""


@dataclass(frozen=True)
class Question:
    """Asked beside other work. ``answer`` waits for the rest of the time limit, not longer; the process goes on."""

    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    known: tuple[str, ...] | None = None

    def answer(self) -> tuple[str, ...] | None:
        """The clouds; None where SkyPilot did not say in time."""
        if self.process is None or self.known is not None:
            return self.known
        try:
            self.process.wait(max(0.0, LIMIT_S - (time.monotonic() - self.started)))
        except subprocess.TimeoutExpired:
            return None  # what it writes is there for the next plan
        return _remembered(USABLE_S)


def ask() -> Question:
    """Start asking, unless SkyPilot is not installed or has just said it."""
    if importlib.util.find_spec("sky") is None or sys.platform == "win32":
        return Question(known=())
    if (fresh := _remembered(FRESH_S)) is not None:
        return Question(known=fresh)
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "burst.places.sky_enabled", str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Question(time.monotonic(), process, _remembered(USABLE_S))


def _file() -> Path:
    return paths.cache() / "clouds.json"


def _remembered(at_most_s: float) -> tuple[str, ...] | None:
    try:
        value = records.read_json(_file())
        age = time.time() - float(value["time"])
        return tuple(map(str, value["clouds"])) if 0 <= age <= at_most_s else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
