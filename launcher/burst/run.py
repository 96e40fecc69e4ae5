"""Runs: one folder each, with an atomic record, an event log and the artifacts.

What a run's state is, is decided from evidence (is its process alive, what did it write, is the adapter sealed), never
from what a launcher meant to do: the launcher may have been killed at any moment. ``settle`` is that decision, pure.
"""

from __future__ import annotations

import dataclasses
import datetime
import errno
import re
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from burst import paths
from burst.errors import BurstError, InvalidInput
from burst_payload import records, seal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORD_NAME = "run.json"
EVENTS_NAME = "events.jsonl"
LOG_NAME = "log.txt"
SPEC_NAME = "burst.yaml"
FORMAT = 1


class State(str, Enum):
    """CREATED → RUNNING → SEALED → ADOPTED, or FAILED or STOPPED on the way.

    SEALED: a whole adapter lies where the run ran. ADOPTED: it was verified here and stands at its destination.
    """

    CREATED = "created"
    RUNNING = "running"
    SEALED = "sealed"
    ADOPTED = "adopted"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def over(self) -> bool:
        return self not in (State.CREATED, State.RUNNING)


@dataclass(frozen=True)
class Process:
    """A process that cannot be confused with a later one of the same number."""

    pid: int
    started: float


@dataclass(frozen=True)
class Record:
    """What is known of a run. Times are Unix seconds."""

    name: str
    created: float
    state: State
    where: str
    model: str
    destination: str
    launcher: Process | None = None
    process: Process | None = None
    bundle_id: str | None = None
    seal_id: str | None = None
    ended: float | None = None
    error: str | None = None
    fix: str | None = None
    exit_code: int | None = None
    stop_asked: float | None = None
    """When ``burst stop`` was called: a process that then ends without a word was stopped, it did not fail."""
    cluster: str | None = None
    """SkyPilot's name of the rented machine; written before anything is billed."""
    request_id: str | None = None
    job_id: int | None = None
    hourly_usd: float | None = None
    launched: float | None = None
    idle_minutes: int | None = None
    """After how many idle minutes the machine deletes itself; None where it cannot."""
    gone: float | None = None
    """When the provider was seen to have the machine no more."""
    store: str | None = None
    """Where the machine saves the sealed adapter by itself."""

    @property
    def begun(self) -> bool:
        return self.process is not None or self.job_id is not None

    @property
    def billing(self) -> bool:
        """Whether a rented machine may still be there."""
        return self.cluster is not None and self.gone is None


@dataclass(frozen=True)
class Evidence:
    """What can be seen of a run now.

    ``status`` is the payload's status.json; ``sealed`` is the id of a complete seal, or None.
    """

    process_alive: bool = False
    launcher_alive: bool = False
    status: dict[str, Any] | None = None
    sealed: str | None = None


def settle(record: Record, evidence: Evidence, now: float) -> Record:
    """The record as the evidence has it. Pure, and idempotent; ADOPTED never changes, and a seal is never called a failure."""
    if record.state is State.ADOPTED:
        return record
    status = evidence.status or {}
    ended = next(time for time in (record.ended, status.get("time"), now) if time is not None)
    if evidence.process_alive:
        return dataclasses.replace(
            record, state=State.RUNNING, ended=None, error=None, fix=None, seal_id=evidence.sealed
        )
    if evidence.sealed is not None:
        return dataclasses.replace(
            record, state=State.SEALED, seal_id=evidence.sealed, ended=ended, error=None, fix=None
        )
    if record.state in (State.FAILED, State.STOPPED):
        return record
    if evidence.launcher_alive and record.stop_asked is None and not record.begun:
        return record
    if status.get("state") == "interrupted":
        return dataclasses.replace(record, state=State.STOPPED, ended=ended, exit_code=status.get("exit_code"))
    if status.get("state") == "failed":
        return dataclasses.replace(
            record,
            state=State.FAILED,
            ended=ended,
            error=status.get("error"),
            fix=status.get("fix"),
            exit_code=status.get("exit_code"),
        )
    if record.stop_asked is not None:
        return dataclasses.replace(record, state=State.STOPPED, ended=ended, error="stopped by burst stop")
    if record.state is State.CREATED:
        error = "the launcher ended before training started"
    else:
        during = f" during {status['phase']!r}" if status.get("phase") else ""
        error = f"the training process ended without a word{during}: it was killed, or the machine went down"
    return dataclasses.replace(record, state=State.FAILED, ended=ended, error=error)


class Run:
    """A run's folder. Writes go through ``update``, which holds the run's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def created(self) -> float:
        """Unix seconds; where the record is damaged, those of its file."""
        try:
            return self.read().created
        except BurstError:
            return (self.folder / RECORD_NAME).stat().st_mtime

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    @property
    def output(self) -> Path:
        return self.bundle / "out"

    @property
    def log(self) -> Path:
        return self.folder / LOG_NAME

    def read(self) -> Record:
        """The record as last written. Raises ``BurstError`` where it cannot be read."""
        try:
            value = records.read_json(self.folder / RECORD_NAME)
            return from_json(value)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BurstError(
                f"the record of run {self.name} cannot be read: {error}", f"look into {self.folder}"
            ) from error

    def write(self, record: Record) -> None:
        records.write_json(self.folder / RECORD_NAME, to_json(record))

    def update(self, **changes: Any) -> Record:
        """Change fields of the record, under the run's lock, and note a change of state in the event log."""
        with self.lock():
            before = self.read()
            after = dataclasses.replace(before, **changes)
            self._write_change(before, after)
        return after

    def refresh(self, evidence: Evidence) -> Record:
        """Settle the record by evidence and write it where it changed (and where the folder can be written)."""
        before = self.read()
        after = settle(before, evidence, time.time())
        if after == before:
            return after
        try:
            with self.lock():
                before = self.read()
                after = settle(before, evidence, time.time())
                if after != before:
                    self._write_change(before, after)
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
                raise
        return after

    def begin(self, start: Callable[[], Process]) -> Record:
        """Start the run's process under the lock. Raises ``BurstError`` where ``burst stop`` came first."""
        with self.lock():
            before = self.read()
            if before.stop_asked is not None:
                raise BurstError(f"run {self.name} was stopped before it started", "start it again with: burst train")
            after = dataclasses.replace(before, process=start())
            self._write_change(before, after)
        return after

    def note(self, event: str, **fields: Any) -> None:
        """Append to the launcher's own event log."""
        log = records.EventLog(self.folder / EVENTS_NAME)
        try:
            log.write(event, **fields)
        finally:
            log.close()

    def lock(self) -> FileLock:
        return FileLock(self.folder / ".lock", timeout=30)

    def sealed(self) -> str | None:
        """The id of the seal where the run ran, by name only: hashes are checked when it is fetched."""
        try:
            return seal.read_seal(self.output / "adapter").seal_id
        except seal.SealError:
            return None

    def payload_pid(self) -> int | None:
        """The process that the payload's status names."""
        pid = (self.status() or {}).get("pid")
        return pid if type(pid) is int and pid > 0 else None

    def status(self) -> dict[str, Any] | None:
        try:
            value = records.read_json(self.output / "status.json")
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def _write_change(self, before: Record, after: Record) -> None:
        self.write(after)
        if after.state is not before.state:
            self.note("state", state=after.state.value, before=before.state.value, error=after.error)


def create(name: str, *, where: str, model: str, destination: Path, launcher: Process) -> Run:
    """Make the folder and the durable record of a new run."""
    folder = paths.runs() / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise InvalidInput(f"a run is called {name} already", "give another --name") from None
    run = Run(folder)
    run.write(
        Record(
            name=name,
            created=time.time(),
            state=State.CREATED,
            where=where,
            model=model,
            destination=str(destination),
            launcher=launcher,
        )
    )
    run.note("created", where=where, model=model)
    return run


def all_runs() -> list[Run]:
    """Every run, oldest first."""
    try:
        folders = [path for path in paths.runs().iterdir() if (path / RECORD_NAME).is_file()]
    except FileNotFoundError:
        return []
    return sorted((Run(path) for path in folders), key=lambda run: (run.created, run.name))


def find(name: str | None) -> Run:
    """A run by name or unambiguous prefix; None is the newest. Raises ``InvalidInput``."""
    runs = all_runs()
    if not runs:
        raise InvalidInput(f"there are no runs in {paths.short(paths.runs())}", "start one with: burst train")
    if name is None:
        return runs[-1]
    matches = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise InvalidInput(
            f"{name!r} could be any of {', '.join(run.name for run in matches[:8])}", "type more of the name"
        )
    raise InvalidInput(f"no run is called {name!r}", "list them with: burst runs")


def new_name(model: str, rank: int) -> str:
    """A name that can be typed: model, rank and two words, unused so far."""
    from coolname import generate_slug

    base = re.sub(r"[^a-z0-9.]+", "-", model.rstrip("/").replace(":", "/").rpartition("/")[2].lower()).strip("-.")
    base = re.sub(r"-(instruct|it|chat|base)$", "", base)[:24] or "model"
    while True:
        name = f"{base}-r{rank}-{generate_slug(2)}"
        if not (paths.runs() / name).exists():
            return name


def check_name(name: str) -> str:
    """A name that a new run may have. Raises ``InvalidInput``."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise InvalidInput(f"{name!r} cannot name a run", "use letters, digits, '.', '_' and '-', at most 80")
    if (paths.runs() / name).exists():
        raise InvalidInput(f"a run is called {name} already", "give another --name")
    return name


def to_json(record: Record) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(record), "state": record.state.value}


def from_json(value: Any) -> Record:
    """A record from its JSON. Raises ``ValueError``, ``KeyError`` or ``TypeError`` where it is not one."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"not a record of format {FORMAT}")
    fields = {key: item for key, item in value.items() if key != "format"}
    fields["state"] = State(fields["state"])
    for name in ("launcher", "process"):
        if fields.get(name) is not None:
            fields[name] = Process(**fields[name])
    record = Record(**fields)
    for field in dataclasses.fields(record):
        if not _fits(getattr(record, field.name), field.type):
            raise ValueError(f"{field.name} is {getattr(record, field.name)!r}")
    return record


def _fits(value: Any, kind: Any) -> bool:
    """Whether a field's value has the type it is declared with (``str``, ``float | None``, ...)."""
    if value is None:
        return "None" in kind
    if isinstance(value, Process):
        return type(value.pid) is int and value.pid > 0 and isinstance(value.started, (int, float))
    known: dict[str, type | tuple[type, ...]] = {"str": str, "float": (int, float), "int": int, "State": State}
    return isinstance(value, known.get(kind.removesuffix(" | None"), ())) and not isinstance(value, bool)


def age(seconds: float) -> str:
    """A duration for people: the two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return str(datetime.timedelta(seconds=whole)).split(",")[0]
