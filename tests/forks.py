"""Runs bundles in forks of one process that has imported torch already: a run costs a second instead of eight.

Runs under the payload's interpreter. Each line of its standard input is a JSON object: ``bundle`` (folder), ``arguments`` of
train.py, ``fault`` (what ``BURST_FAULT`` would be) and ``environment``; each line of its output is the exit status, negative for a signal. What a
run prints goes to ``log.txt`` in its bundle.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn


class Forks:
    """The other end: starts this file under an interpreter and hands it bundles."""

    def __init__(self, python: str) -> None:
        payload = Path(__file__).resolve().parents[1] / "payload"
        environment = {**os.environ, "PYTHONPATH": str(payload), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def run(
        self, bundle: Path, *arguments: str, fault: str | None = None, alone: bool = False, **environment: str
    ) -> int:
        """``alone``: the worker without its supervisor."""
        if alone:
            arguments = (*arguments, "--worker")
        assert self.process.stdin and self.process.stdout
        job = {"bundle": str(bundle), "arguments": arguments, "fault": fault, "environment": environment}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        self.process.communicate()


class Worker:
    """Of ``subprocess.Popen``, what the supervisor uses, for a fork."""

    def __init__(self, pid: int, stdin: object) -> None:
        self.pid, self.stdin, self.returncode = pid, stdin, None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 3600) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.005)
        return self.returncode


def start_worker(command: list[str], folder: Path, environment: dict[str, str], descriptor: int) -> Worker:
    """What ``supervisor.start_worker`` does, without a new interpreter."""
    theirs, ours = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(theirs, 0)
        os.close(ours)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ |= environment
        train(command[3:])
    os.close(theirs)
    return Worker(pid, os.fdopen(ours, "wb"))


def child(job: dict) -> None:
    os.chdir(job["bundle"])
    with open("log.txt", "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ |= job["environment"]
    if job["fault"]:
        os.environ["BURST_FAULT"] = job["fault"]
    from burst_payload import supervisor

    supervisor.start_worker = start_worker
    train(job["arguments"])


def train(arguments: list[str]) -> NoReturn:
    """``python train.py ARGUMENTS`` in this process."""
    from burst_payload import records

    records.plant(os.environ.get("BURST_FAULT"))
    sys.argv = ["train.py", *arguments]
    code: object = 1
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0)


def main() -> None:
    import torch
    from burst_payload import session  # noqa: F401 - with everything it imports

    torch.set_num_threads(1)  # forked children must not wait for threads that they do not have
    for line in sys.stdin:
        number = os.fork()
        if number == 0:
            child(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
