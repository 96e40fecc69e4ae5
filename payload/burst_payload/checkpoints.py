"""Checkpoints on disk: sealed folders ``out/checkpoints/step-N``, the newest whole one found, the older ones removed.

A checkpoint is written under a temporary name, hashed, sealed, read back, and only then given its name; an older one
goes when a newer one has been proved. Nothing in it is a pickle. Standard library only: what is in the files is in
``training_state``.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burst_payload import seal
from burst_payload.manifest import ManifestError, differences
from burst_payload.records import publish_directory, reach, read_json
from burst_payload.stop import ExitCode, Stop

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

FOLDER_NAME = "checkpoints"
STATE_NAME = "state.json"
FORMAT = 1
KEPT = 2
"""How many of the newest stay."""
SPARE_BYTES = 64 << 20
"""Disk that a checkpoint leaves free, for the log and the records."""

_NAME = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"\.step-\d+\.tmp-\d+")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every hash held when it was looked at. ``state`` is its ``state.json``."""

    folder: Path
    step: int
    state: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        value: dict[str, Any] = self.state["identity"]
        return value


class DiskFull(Exception):
    """There is no room for a checkpoint; the older ones stand."""


def write(output: Path, step: int, fill: Callable[[Path], None], bundle_id: str, need_bytes: int) -> Path:
    """Write and prove ``output/checkpoints/step-N``; ``fill`` writes the files into the folder it is given.

    Raises ``DiskFull`` where fewer than ``need_bytes`` are free, and ``Stop`` where it does not read back as written.
    A whole one of this step is left as it is.
    """
    root = output / FOLDER_NAME
    final = root / f"step-{step}"
    root.mkdir(parents=True, exist_ok=True)
    if final.exists():
        if _problem(final) is None:
            return final
        _set_aside(final)
    free = shutil.disk_usage(root).free
    if free < need_bytes + SPARE_BYTES:
        raise DiskFull(f"{free:,} bytes free, {need_bytes + SPARE_BYTES:,} needed")
    temporary = root / f".step-{step}.tmp-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        fill(temporary)
        reach("checkpoint filled")
        seal.write_seal(temporary, bundle_id)
        _prove(temporary, step)
        publish_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    reach("checkpoint proved")
    return final


def prune(output: Path, keep: Collection[int] = ()) -> None:
    """Remove all but the newest checkpoints and those of the steps in ``keep``. Call it after a newer one was proved."""
    found = _folders(output)
    for step, folder in found[KEPT:]:
        if step not in keep:
            doomed = folder.with_name(
                f".step-{step}.tmp-{os.getpid()}"
            )  # in one rename: never half of one under its name
            os.rename(folder, doomed)
            reach("checkpoint doomed")
            shutil.rmtree(doomed, ignore_errors=True)


def clear(output: Path) -> None:
    """Remove all checkpoints, whole or not: the adapter that they led to is sealed."""
    shutil.rmtree(output / FOLDER_NAME, ignore_errors=True)


def set_all_aside(output: Path) -> None:
    """Keep all checkpoints under another name, so that the next run starts anew."""
    root = output / FOLDER_NAME
    if root.exists():
        os.rename(root, _unused(root.with_name(f"{FOLDER_NAME}.old")))


def steps(output: Path) -> list[int]:
    """The steps that a checkpoint of this name exists of, newest first; nothing is verified."""
    return [step for step, _ in _folders(output)]


def newest(output: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose every hash holds, or None. Damaged ones are set aside, with a note; rests of a crash removed.

    Call it with the folder to oneself.
    """
    root = output / FOLDER_NAME
    if root.is_dir():
        for path in root.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
    for step, folder in _folders(output):
        problem = _problem(folder)
        if problem is None:
            return Checkpoint(folder, step, read_json(folder / STATE_NAME))
        aside = _set_aside(folder)
        note(f"checkpoint step-{step} is damaged ({problem}); moved to {aside.name}, trying the one before it")
    return None


def whole(output: Path, step: int) -> Checkpoint | None:
    """The checkpoint of one step, or None where there is none or it does not verify."""
    folder = output / FOLDER_NAME / f"step-{step}"
    return Checkpoint(folder, step, read_json(folder / STATE_NAME)) if _problem(folder) is None else None


def check_same(checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
    """Raise ``Stop``, naming every difference, where a checkpoint was made of another spec, data, bundle or libraries."""
    changed = changes(checkpoint.identity, identity)
    if changed:
        raise Stop(
            f"the checkpoint of step {checkpoint.step} does not belong to this bundle:\n" + "\n".join(changed),
            "put back what changed; or set the checkpoints aside and train anew: python train.py --fresh",
            ExitCode.INVALID,
        )


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two identities, one line each, as ``run.train.seed: 1 then, 2 now``."""
    old, new = dict(_flat(before)), dict(_flat(now))
    found = [
        f"{key}: {_short(old.get(key))} then, {_short(new.get(key))} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return found if len(found) < 2 else [line for line in found if not line.startswith("bundle_id:")]


def _flat(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path} {key}" if path == "files" else f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:16]}…"


def _folders(output: Path) -> list[tuple[int, Path]]:
    """The checkpoint folders, newest first."""
    root = output / FOLDER_NAME
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def _problem(folder: Path) -> str | None:
    """The first reason why a folder is not a whole checkpoint, or None."""
    try:
        found = differences(folder, seal.read_seal(folder).files)
        if not found and not (folder / STATE_NAME).is_file():
            found = [f"{STATE_NAME}: missing"]
        if not found and read_json(folder / STATE_NAME).get("format") != FORMAT:
            found = [f"{STATE_NAME}: not of format {FORMAT}"]
    except (seal.SealError, ManifestError) as error:
        found = error.problems
    except (OSError, ValueError) as error:
        found = [str(error)]
    return found[0] if found else None


def _prove(folder: Path, step: int) -> None:
    problem = _problem(folder)
    if problem is not None:
        raise Stop(
            f"the checkpoint of step {step} does not read back as it was written: {problem}",
            "check the disk; the checkpoint before it stands",
            ExitCode.VERIFICATION,
        )


def _set_aside(folder: Path) -> Path:
    aside = _unused(folder.with_name(f"{folder.name}.damaged"))
    os.rename(folder, aside)
    return aside


def _unused(path: Path) -> Path:
    number = 1
    while os.path.lexists(found := path.with_name(f"{path.name}-{number}")):
        number += 1
    return found
