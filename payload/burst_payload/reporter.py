"""What happens in a run, told once: as an event, as a line of the log, and as the newest status."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from burst_payload import pulse, stop
from burst_payload.records import EventLog, reach, read_events, write_json

if TYPE_CHECKING:
    from pathlib import Path

STATUS_INTERVAL_S = 1.0
STATUS_NAME = "status.json"
EVENTS_NAME = "events.jsonl"


class Reporter:
    """Events, status file and log lines of one run: what happens, told once.

    ``pid`` is the process to stop it by; ``silent``: no log lines.
    """

    def __init__(self, output: Path, pid: int | None = None, *, silent: bool = False) -> None:
        output.mkdir(exist_ok=True)
        self.silent = silent
        self.events = EventLog(output / EVENTS_NAME)
        self.output = output
        self.phases: dict[str, float] = {}
        self._status: dict[str, Any] = {"state": "running", "pid": pid or os.getpid()}
        self._written = 0.0
        self._phase: tuple[str, float] | None = None

    def phase(self, name: str) -> None:
        """Enter a phase; the time of the former one is kept for metadata.json. Raises ``Interrupted``."""
        stop.check()
        now = time.monotonic()
        if self._phase is not None:
            self.phases[self._phase[0]] = round(self.phases.get(self._phase[0], 0.0) + now - self._phase[1], 3)
        self._phase = (name, now)
        pulse.beat(phase=name)
        self.emit("phase", name=name)
        reach(f"phase {name}")
        self.status(phase=name)

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.write(kind, **fields)
        if not self.silent:
            print(line_for(kind, fields), flush=True)
        if kind == "step":
            self.status(throttle=True, step=fields["step"], steps=fields["steps"], loss=fields["loss"])

    def status(self, throttle: bool = False, **fields: Any) -> None:
        self._status |= fields
        if throttle and time.monotonic() - self._written < STATUS_INTERVAL_S:
            return
        self._written = time.monotonic()
        write_json(self.output / STATUS_NAME, {**self._status, "time": round(time.time(), 3)})

    def end(self, state: str, code: int, **fields: Any) -> None:
        self.emit("end", state=state, exit_code=code, **fields)
        self.status(state=state, exit_code=code, **fields)


def segments(path: Path) -> list[dict[str, float]]:
    """The times at which a run was at work, from its event log: ``started`` (Unix) and ``seconds``, one a start.

    What was done again after a crash counts: it was worked, and paid, twice.
    """
    found: list[dict[str, float]] = []
    for event in read_events(path):
        if not found or (event["event"] == "phase" and event.get("name") == "verify"):
            found.append({"started": event["time"], "seconds": 0.0})
        found[-1]["seconds"] = round(event["time"] - found[-1]["started"], 3)
    return found


def line_for(kind: str, fields: dict[str, Any]) -> str:
    """An event as one line for people."""
    if kind == "step":
        rate = f"  {fields['tokens_per_s']:,.0f} tokens/s" if fields.get("tokens_per_s") else ""
        return f"step {fields['step']}/{fields['steps']}  loss {fields['loss']:.4f}{rate}"
    if kind == "phase":
        return f"phase: {fields['name']}"
    if kind == "note":
        return f"note: {fields['text']}"
    if kind == "eval":
        return f"evaluation loss {fields['loss']:.4f} at step {fields['step']}"
    return f"{kind}: " + "  ".join(f"{key}={_short(value)}" for key, value in fields.items() if value is not None)


def _short(value: Any) -> str:
    """A value on one line: numbers as they are read, line breaks in answers made visible."""
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) and not value.isprintable() else str(value)
