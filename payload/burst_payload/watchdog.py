"""Is a worker alive, and what to do about one that died: decisions, without a clock or a process of their own.

Two kinds of silence are told apart. Between micro-steps a run knows how long they take, so silence is judged by its own
step times. In every other phase (libraries, download, load, compilation, the first steps, saving) there is nothing to compare
with: there a worker is alive as long as its processes use the CPU or move bytes.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

STALL_S = 120.0
"""The shortest silence that is ever called a stall (``BURST_STALL_S``)."""
STEP_FACTOR = 10.0
"""A silence of so many times the longest of the last micro-steps is a stall."""
IDLE_FACTOR = 2.5
"""Outside of micro-steps, ``STALL_S`` times this, without any use of the CPU or of files, is a stall."""
BUSY_LIMIT_S = 7200.0
"""A worker that only computes, for so long without a word, is one too: twice the longest compilation that was reported."""
KNOWN_STEPS = 3
"""So many micro-steps must have been timed before they say anything: the first ones compile."""

RESTARTS = 5
"""How often one start of train.py restarts its worker, whatever happens."""
SAME_PLACE = {"stalled": 3, "killed": 3, "crashed": 2, "host memory": 2, "gpu memory": 2, "error": 2}
"""How many deaths of a kind at one step are enough to give up: a worker that always dies there will do so again."""

SLOW_FACTOR = 4.0
SLOW_MIN_S = 0.5
"""Steps shorter than this are never called slow: they are measured with noise."""

Kind = Literal["stalled", "killed", "crashed", "host memory", "gpu memory", "error"]


@dataclass
class Vitals:
    """What was last heard of a worker. Times are seconds of one monotonic clock."""

    heard: float
    phase: str = "start"
    step: int | None = None
    stepping: bool = False
    """Whether the last sign was one of a row of micro-steps, which have a pace."""
    took: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    error: str | None = None

    def hear(self, beat: dict[str, Any], now: float) -> None:
        """Take in one beat: ``phase``, ``micro`` (the step it belongs to), ``batch`` (of an evaluation), ``busy`` or ``error``."""
        if "error" in beat:
            self.error = str(beat["error"])
            return
        if "phase" in beat:
            self.phase, self.stepping = str(beat["phase"]), False
            self.took.clear()
        elif "micro" in beat or "batch" in beat:
            if self.stepping:
                self.took.append(now - self.heard)
            self.step = beat.get("micro", self.step)
            self.stepping = True
        else:
            self.stepping = False
        self.heard = now

    @property
    def has_pace(self) -> bool:
        return self.stepping and len(self.took) >= KNOWN_STEPS


def stall(vitals: Vitals, now: float, active: float, stall_s: float = STALL_S) -> str | None:
    """Why a silent worker counts as stalled at ``now``, or None. ``active`` is when it last used CPU or files."""
    silent = now - vitals.heard
    if vitals.has_pace:
        longest = max(vitals.took)
        if silent > max(stall_s, STEP_FACTOR * longest):
            return f"no progress for {silent:.0f} s at step {vitals.step}, where steps took at most {longest:.1f} s"
        return None
    idle = now - max(active, vitals.heard)
    if idle > IDLE_FACTOR * stall_s:
        return (
            f"no progress for {silent:.0f} s in {vitals.phase!r}, and for {idle:.0f} s neither CPU nor files were used"
        )
    if silent > BUSY_LIMIT_S:
        return f"no progress for {silent:.0f} s in {vitals.phase!r}"
    return None


@dataclass(frozen=True)
class Death:
    """How a worker ended that did not say so itself. ``code`` is its exit code, negative for a signal."""

    kind: Kind
    code: int
    phase: str
    step: int | None
    what: str


def another_start(death: Death, past: Sequence[Death]) -> bool:
    """Whether to start a worker again after ``death``; ``past`` are the earlier ones of this run, oldest first.

    An exception before the first step would come again, as would one at the same step: one more try is for what passes, such
    as an error of the device.
    """
    if len(past) >= RESTARTS or (death.kind == "error" and death.step is None):
        return False
    here = [
        item
        for item in (*past, death)
        if item.kind == death.kind and (item.phase, item.step) == (death.phase, death.step)
    ]
    return len(here) < SAME_PLACE[death.kind]


@dataclass
class Pace:
    """Finds steps that suddenly take a multiple: memory that spills to the host, or another process on the GPU."""

    usual: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    slow: bool = False

    def step(self, seconds: float, tokens: int) -> str | None:
        """Take in one micro-step. A sentence where the pace has just become a slow one."""
        pace = seconds / max(tokens, 1)
        if len(self.usual) < 20:
            self.usual.append(pace)
            return None
        self.recent.append(pace)
        times = statistics.median(self.recent) / statistics.median(self.usual[KNOWN_STEPS:])
        if len(self.recent) < 10 or (self.slow and times > SLOW_FACTOR / 2):
            return None
        was, self.slow = self.slow, times > SLOW_FACTOR and seconds > SLOW_MIN_S
        if self.slow and not was:
            return (
                f"steps take {times:.1f} times as long as before: GPU memory may be spilling to system memory, "
                "or another process uses the device"
            )
        return None
