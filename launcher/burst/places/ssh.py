"""Talking to a machine of SkyPilot's over ssh, and what of it may be written down."""

from __future__ import annotations

import functools
import io
import os
import pwd
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from burst.errors import BurstError

if TYPE_CHECKING:
    from typing_extensions import Self


class Scrubbed(io.TextIOBase):
    """A text file that replaces secrets in what is written to it."""

    def __init__(self, file: IO[str], secrets: list[str]) -> None:
        self._file = file
        self._secrets = secrets

    def write(self, text: str) -> int:
        for secret in self._secrets:
            text = text.replace(secret, "(secret)")
        return self._file.write(text)

    def flush(self) -> None:
        self._file.flush()


class Stream:
    """The output of an ssh command as a file; an end that is not its end raises ``BurstError``."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        self._file: IO[bytes] = process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._file.close()
        self._process.wait()

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        if not chunk and (code := self._process.wait()):
            if code == 44:
                raise FileNotFoundError("not there on the machine")
            raise BurstError("the connection to the machine broke", "run burst fetch again: it continues")
        return chunk


def command(cluster: str) -> list[str]:
    """The ssh command with SkyPilot's entry for a machine. OpenSSH takes ``~`` from the password database, SkyPilot takes HOME."""
    home = Path.home()
    control = Path(tempfile.gettempdir()) / f"burst-ssh-{os.getuid()}"
    control.mkdir(mode=0o700, exist_ok=True)
    options = ["-o", "ControlMaster=auto", "-o", f"ControlPath={control}/%C", "-o", "ControlPersist=60"]
    options += [
        "-o",
        "BatchMode=yes",
        "-o",
        "ServerAliveInterval=15",
        "-o",
        "ConnectTimeout=30",
        "-o",
        "LogLevel=ERROR",
    ]
    if home != Path(pwd.getpwuid(os.getuid()).pw_dir):
        options += ["-F", str(home / ".ssh/config")]
    key = home / ".sky/generated/ssh-keys" / f"{cluster}.key"
    if not key.exists():
        _write_entry(cluster)
    if key.exists():
        options += ["-o", f"IdentityFile={key}"]
    return ["ssh", *options]


@functools.cache
def _write_entry(cluster: str) -> None:
    """Only SkyPilot's command line writes the ssh entry and key of a machine that its SDK launched; once a process will do."""
    sky = Path(sys.executable).parent / "sky"
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [sky, "status", cluster], capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=120
        )
