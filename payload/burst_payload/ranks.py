"""One process for each GPU of a machine, told apart by the variables that torchrun sets. No torch.

The supervisor holds them as one worker: they live and end together. Only the first one reports, saves and seals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

RANK, LOCAL_RANK, WORLD_SIZE = "RANK", "LOCAL_RANK", "WORLD_SIZE"
LAST_WORDS_S = 5.0
"""How long the others may take to end by themselves once one has ended."""


class Process(Protocol):
    """Of ``subprocess.Popen``, what is needed of a rank."""

    pid: int
    returncode: int | None
    stdin: IO[bytes] | None

    def poll(self) -> int | None: ...


def mine() -> int:
    """This process's rank; 0 where it is the only one."""
    return int(os.environ.get(RANK) or 0)


def local() -> int:
    """The number of this process's GPU among the visible ones."""
    return int(os.environ.get(LOCAL_RANK) or 0)


def count() -> int:
    """How many processes train together."""
    return int(os.environ.get(WORLD_SIZE) or 1)


def environments(processes: int) -> list[dict[str, str]]:
    """What each process finds in its environment: nothing where there is one, else what torchrun would set on one machine."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), WORLD_SIZE: str(processes)}
    return [meeting | {RANK: str(rank), LOCAL_RANK: str(rank)} for rank in range(processes)]


class Ranks:
    """The processes of one worker, as one."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes = processes
        self.pids = [process.pid for process in processes]
        self.returncode: int | None = None
        self._ended: float | None = None
        self._first: int | None = None

    def poll(self) -> int | None:
        """The exit code once all have ended: of the first rank, or of the rank whose end came first where that was no success.

        The others get a moment for their last words; then they are killed, for they would wait for it for ever.
        """
        codes = [process.poll() for process in self.processes]
        if self._first is None:
            self._first = next((code for code in codes if code), codes[0])
            self._ended = time.monotonic()
        if self._first is None:
            return None
        if None in codes:
            assert self._ended is not None
            if time.monotonic() - self._ended < LAST_WORDS_S:
                return None
            self.send(signal.SIGKILL)
        else:
            # what the first rank has to say is a result; a rank that lost its peer only knows that it lost it
            self.returncode = codes[0] if codes[0] is not None and 0 <= codes[0] < 70 else self._first
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end. Raises ``subprocess.TimeoutExpired``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the worker", timeout_s or 0.0)
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send(self, number: int, *, group: bool = True) -> None:
        """A signal to every process, or to each one's whole group; those that have ended are left alone."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    (os.killpg if group else os.kill)(process.pid, number)

    def close(self) -> None:
        """Let go of the lifelines, which end whatever is still there."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
