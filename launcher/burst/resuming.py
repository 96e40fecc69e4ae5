"""``burst resume``: the same bundle in the same folder, started again as it was started before.

The payload finds its newest whole checkpoint itself, so that a run goes on in the same way without burst.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from burst import gpus, launch
from burst.errors import BurstError, InvalidInput
from burst.places.local import Local, this_process
from burst.run import EVENTS_NAME, State
from burst_payload import checkpoints, records

if TYPE_CHECKING:
    from burst.run import Run


def resume(a_run: Run) -> Local:
    """Start a stopped or failed local run again. Raises ``BurstError`` where it cannot go on."""
    record = launch.refresh(a_run)
    if record.where != "local":
        raise BurstError(
            f"run {a_run.name} was on a rented machine; only runs on this machine are gone on with",
            "train it again: burst train --where cloud",
        )
    if record.state is State.RUNNING or record.state is State.CREATED:
        raise BurstError(f"run {a_run.name} is at work", f"watch it with: burst logs -f {a_run.name}")
    if record.state in (State.SEALED, State.ADOPTED):
        raise InvalidInput(f"run {a_run.name} is trained to its end", f"burst fetch {a_run.name}")
    command = started_with(a_run)
    if command is None or not (a_run.bundle / "train.py").is_file():
        raise BurstError(f"run {a_run.name} never started training", "start a new one with: burst train")
    python, model = Path(command[0]), _option(command, "--model")
    for path, what in ((python, "interpreter"), (model, "base model")):
        if path is not None and not path.exists():
            raise BurstError(f"the {what} of run {a_run.name} is gone: {path}", "put it back, or: burst train --again")
    (a_run.output / "status.json").unlink(missing_ok=True)  # the last words of the former process
    a_run.update(
        state=State.CREATED,
        launcher=this_process(),
        process=None,
        ended=None,
        error=None,
        fix=None,
        exit_code=None,
        stop_asked=None,
    )
    gpu = gpus.choose(gpus.detect(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    place = Local(python, model, gpu.uuid if gpu else None)
    place.start(a_run)
    a_run.refresh(place.evidence(a_run))
    return place


def from_where(a_run: Run) -> str:
    """Where a run would go on, in words; the payload checks every hash and may fall back."""
    steps = checkpoints.steps(a_run.output)
    return f"from step {steps[0]}" if steps else "from the beginning: it has no checkpoint yet"


def started_with(a_run: Run) -> list[str] | None:
    """The command that last started a run's payload, or None."""
    found = None
    for event in records.read_events(a_run.folder / EVENTS_NAME):
        if event["event"] == "starting":
            found = event.get("command")
    return found if isinstance(found, list) and found else None


def _option(command: list[str], name: str) -> Path | None:
    return Path(command[command.index(name) + 1]) if name in command else None
