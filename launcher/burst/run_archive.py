"""A run's record as one file, so that another computer can fetch its adapter and end its machine.

The record and what was seen of the run travel; weights, data and keys do not.
"""

from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from pathlib import Path

from burst import paths, run
from burst.errors import InvalidInput
from burst.run import Run
from burst_payload import records, seal

FILES = (
    run.SPEC_NAME,
    run.EVENTS_NAME,
    run.LOG_NAME,
    "bundle/out/events.jsonl",
    "bundle/out/status.json",
    f"bundle/out/{seal.ADAPTER_NAME}/{seal.SEAL_NAME}",
)
"""What travels beside the record, where it is there."""
LIMIT_BYTES = 256 << 20
"""The most that one file of an archive may unpack to: events of months fit."""


def export(a_run: Run, output: Path) -> None:
    """Write a rented run's record to a ``.tar.gz``. Raises ``InvalidInput`` for a run of this machine."""
    record = a_run.read()
    if record.cluster is None:
        raise InvalidInput(
            f"run {a_run.name} is on this machine: another one could not reach it",
            f"copy its adapter instead: {record.destination}",
        )
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        # processes mean nothing elsewhere, and a number could be another's
        _add(tar, run.RECORD_NAME, json.dumps(run.to_json(dataclasses.replace(record, launcher=None, process=None))))
        for name in FILES:
            if (a_run.folder / name).is_file():
                _add(tar, name, (a_run.folder / name).read_bytes())
    records.write_atomic(output, raw.getvalue())


def take(archive: Path, destination: Path | None = None) -> Run:
    """Make the run of an exported record known here. Its adapter will go to ``destination``, else to ./adapters/RUN.

    Raises ``InvalidInput`` where it is not such a file, or where a run has that name already.
    """
    try:
        contents = _contents(archive)
        record = run.from_json(json.loads(contents.pop(run.RECORD_NAME)))
    except FileNotFoundError:
        raise InvalidInput(f"{archive} does not exist", "make it with: burst runs export RUN") from None
    except (OSError, tarfile.TarError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{archive} is not an exported run: {error}", "make it with: burst runs export RUN"
        ) from None
    run.check_name(record.name)
    home = (destination or Path("adapters") / record.name).absolute()
    folder = paths.runs() / record.name
    folder.mkdir(parents=True)
    new = Run(folder)
    for name, content in contents.items():
        records.write_atomic(folder / name, content)
    state = run.State.SEALED if record.state is run.State.ADOPTED else record.state  # adopted there is not adopted here
    new.write(dataclasses.replace(record, destination=str(home), state=state))
    new.note("imported")
    return new


def _add(tar: tarfile.TarFile, name: str, content: str | bytes) -> None:
    data = content.encode() if isinstance(content, str) else content
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, io.BytesIO(data))


def _contents(archive: Path) -> dict[str, bytes]:
    """The files of an archive by name. Raises ``ValueError`` where it holds anything that an export does not."""
    with tarfile.open(archive, "r:gz") as tar:
        found = {}
        for member in tar:
            if member.name not in (run.RECORD_NAME, *FILES) or not member.isfile() or member.size > LIMIT_BYTES:
                raise ValueError(f"it holds {member.name}, {member.size} bytes")
            file = tar.extractfile(member)
            found[member.name] = file.read() if file else b""
    if run.RECORD_NAME not in found:
        raise ValueError("it holds no record")
    return found
