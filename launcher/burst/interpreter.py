"""The Python that runs the payload: the one asked for, this one, or a cached environment that is built once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from burst import paths
from burst.errors import BurstError, InvalidInput
from burst_payload import libraries, records

MINIMUM = (3, 11)
"""transformers 5.24 needs Python 3.11."""
READY_NAME = "READY.json"
PYTORCH_INDEX = "https://download.pytorch.org/whl/"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Interpreter:
    """A Python that has the payload's libraries. ``differs`` names pinned versions that it has otherwise."""

    path: Path
    why: str
    differs: tuple[str, ...] = ()


def find(explicit: str | None, say: Say, *, torch_backend: str | None = None) -> Interpreter:
    """The interpreter for the payload: ``explicit``, else this one if it satisfies the lock, else the cached one.

    ``say`` is told what happens while an environment is built. Raises ``BurstError``.
    """
    lock = paths.payload() / "requirements.lock"
    if explicit:
        return _explicit(Path(explicit).expanduser(), lock)
    if sys.version_info >= MINIMUM and not libraries.differences(lock):
        return Interpreter(Path(sys.executable), "this environment has the pinned libraries")
    return Interpreter(build(say, torch_backend=torch_backend), "the cached environment of this version's lock")


def cached_folder() -> Path:
    """The environment of the current lock, built or not."""
    lock = (paths.payload() / "requirements.lock").read_bytes()
    return paths.cache() / "envs" / hashlib.sha256(lock).hexdigest()[:16]


def build(say: Say, *, torch_backend: str | None = None) -> Path:
    """Build the cached environment if it is not there and return its interpreter. Raises ``BurstError``.

    Uses uv where it is installed (it picks the torch build for this machine's driver), else venv and pip, which take
    the torch build that pip is configured for. ``torch_backend`` (``cpu``, ``cu126``, ...) chooses explicitly.
    """
    folder = cached_folder()
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if (folder / READY_NAME).is_file() and python.exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        log = folder.with_suffix(".log")
        say(f"building the training environment in {paths.short(folder)} (once; log: {paths.short(log)})")
        lock = paths.payload() / "requirements.lock"
        for command in _commands(folder, python, lock, torch_backend):
            _run(command, log, say)
        answer = _ask(python, lock)
        if answer["differences"]:
            raise BurstError(f"the new environment lacks {_named(answer['differences'])}", f"read {log}")
        records.write_json(folder / READY_NAME, {"lock": records.sha256_file(lock), "python": answer["python"]})
        say("the training environment is ready")
    return python


def _commands(folder: Path, python: Path, lock: Path, torch_backend: str | None) -> list[list[str]]:
    uv = shutil.which("uv")
    if uv and os.environ.get("BURST_ENV_TOOL", "uv") == "uv":
        return [
            [uv, "venv", "--quiet", "--python", f">={MINIMUM[0]}.{MINIMUM[1]},<3.14", str(folder)],
            [
                uv,
                "pip",
                "install",
                "--python",
                str(python),
                "--torch-backend",
                torch_backend or "auto",
                "-r",
                str(lock),
            ],
        ]
    index = ["--extra-index-url", PYTORCH_INDEX + torch_backend] if torch_backend else []
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *index]
    return [[_base_python(), "-m", "venv", str(folder)], [*pip, "-r", str(lock)]]


def _base_python() -> str:
    """A Python that is new enough for the payload: this one, or one on the PATH."""
    if sys.version_info >= MINIMUM:
        return sys.executable
    for name in ("python3.13", "python3.12", "python3.11"):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return found
    raise BurstError(
        f"the training libraries need Python {MINIMUM[0]}.{MINIMUM[1]} or newer, and there is none on the PATH",
        "install one (or uv, which brings its own), or give --python",
    )


def _run(command: list[str], log: Path, say: Say) -> None:
    """Run one step, its output into ``log``; the names of packages go to ``say``."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            file.write(line)
            last = line.strip() or last
            if line.startswith(("Collecting ", "Downloading ", "Installing collected", "Resolved ", "Prepared ")):
                say(line.strip().split(" (from")[0][:100])
        if process.wait() != 0:
            raise BurstError(
                f"the training environment could not be built: {last[:300]}",
                f"read {log}; then try again, or give --python with the libraries of requirements.lock",
            )


def _explicit(python: Path, lock: Path) -> Interpreter:
    found = shutil.which(str(python)) or str(python)
    if not Path(found).is_file():
        raise InvalidInput(f"--python {python} does not exist", "give the path of a Python interpreter")
    answer = _ask(Path(found), lock)
    missing = [name for name, _, version in answer["differences"] if version is None]
    if missing:
        raise InvalidInput(f"{python} lacks {', '.join(missing)}", f"install them: {python} -m pip install -r {lock}")
    differs = tuple(f"{name} {version} (pinned: {wanted})" for name, wanted, version in answer["differences"])
    return Interpreter(Path(found).absolute(), "given with --python", differs)


def _ask(python: Path, lock: Path) -> dict[str, list[tuple[str, str, str | None]]]:
    script = paths.payload_package() / "libraries.py"
    result = subprocess.run([str(python), "-I", str(script), str(lock)], capture_output=True, text=True, check=False)
    try:
        answer: dict[str, list[tuple[str, str, str | None]]] = json.loads(result.stdout)
    except ValueError:
        raise InvalidInput(f"{python} does not run: {result.stderr.strip()[-300:]}", "give another --python") from None
    return answer


def _named(differences: list[tuple[str, str, str | None]]) -> str:
    return ", ".join(f"{name}=={wanted}" for name, wanted, _ in differences)
