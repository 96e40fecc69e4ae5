"""A worker's sign of life: one short JSON line to its supervisor at each phase, micro-step and save. Standard library only.

Without a supervisor (``open_to`` was not called) a beat costs one comparison. A pipe that is full or closed loses beats, and
never holds up training.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

VARIABLE = "BURST_PULSE_FD"
"""The number of the pipe's end that a worker inherits."""

_descriptor: int | None = None


def open_to(descriptor: int | None) -> None:
    """Beat into this pipe from now on; None is nowhere."""
    global _descriptor  # noqa: PLW0603 - a process has one pulse
    _descriptor = descriptor
    if descriptor is not None:
        os.set_blocking(descriptor, False)


def beat(**fields: Any) -> None:
    if _descriptor is not None:
        with contextlib.suppress(OSError):
            os.write(_descriptor, json.dumps(fields).encode() + b"\n")
