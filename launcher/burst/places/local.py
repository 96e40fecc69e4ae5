"""This machine: the bundle as a process of its own session, which outlives the launcher and its terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import BinaryIO

import psutil

from burst import paths
from burst.run import Evidence, Process, Run

GRACE_S = 30.0
"""How long a stopped run may take to end by itself; the payload gives a last checkpoint 25 s."""


class Local:
    """Runs bundles on this machine.

    Args:
        python: the payload's interpreter; only needed to start.
        model: the folder of a local base model, which does not travel in the bundle.
        gpu: the UUID of the GPU to use, or None.
    """

    def __init__(self, python: Path | None = None, model: Path | None = None, gpu: str | None = None) -> None:
        self.python = python
        self.model = model
        self.gpu = gpu
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, run: Run) -> None:
        assert self.python is not None
        command = [str(self.python), "-u", "train.py"] + (["--model", str(self.model)] if self.model else [])
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "BURST_"))}
        environment["BURST_CACHE"] = str(paths.cache())
        if self.gpu is not None:
            environment |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": self.gpu}
        run.note("starting", command=command)

        def spawn() -> Process:
            with open(run.log, "ab") as log:
                self._child = subprocess.Popen(
                    command,
                    cwd=run.bundle,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            return Process(self._child.pid, psutil.Process(self._child.pid).create_time())  # unreaped, so it is there

        run.begin(spawn)

    def evidence(self, run: Run) -> Evidence:
        if self._child is not None:
            self._child.poll()  # reap it: a zombie is not alive
        record, status = run.read(), run.status()
        process = record.process or identify(run.payload_pid())  # the launcher may have been killed in between
        alive = process is not None and is_alive(process) and _works_in(process.pid, run.bundle)
        return Evidence(
            process_alive=alive,
            launcher_alive=record.launcher is not None and is_alive(record.launcher),
            status=status,
            sealed=run.sealed(),
        )

    def stop(self, run: Run) -> None:
        """SIGTERM to the run's process group, then SIGKILL after a grace."""
        process = run.read().process or identify(run.payload_pid())
        for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
            if process is None or not is_alive(process) or not _works_in(process.pid, run.bundle):
                return
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and is_alive(process):
                if self._child is not None:
                    self._child.poll()
                time.sleep(0.05)

    def open(self, run: Run, path: str, offset_bytes: int) -> BinaryIO:
        file = open(run.output / path, "rb")  # noqa: SIM115 - the caller closes it
        file.seek(offset_bytes)
        return file


def identify(pid: int | None) -> Process | None:
    """The process of this number now, or None."""
    try:
        return None if pid is None else Process(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def this_process() -> Process:
    return Process(os.getpid(), psutil.Process().create_time())


def is_alive(process: Process) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    try:
        found = psutil.Process(process.pid)
        return abs(found.create_time() - process.started) < 1.0 and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _works_in(pid: int, folder: Path) -> bool:
    """Whether the process works in this folder, where that can be seen: numbers are used again after a reboot."""
    try:
        return Path(psutil.Process(pid).cwd()).resolve() == folder.resolve()
    except psutil.NoSuchProcess:
        return False
    except (psutil.AccessDenied, OSError):
        return True
