"""``train.py`` looks after the process that trains: it hears its pulse, ends it where it hangs, and starts it again.

The worker runs in a process group of its own, and only that group is ever ended. What is decided is in ``watchdog``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_payload import checkpoints, manifest, pulse, ranks, records, seal, watchdog
from burst_payload.ranks import Ranks
from burst_payload.reporter import Reporter
from burst_payload.stop import ExitCode
from burst_payload.watchdog import Death, Vitals
from burst_payload.worker import STACKS_VARIABLE, Died, failed, interrupted, standing

if TYPE_CHECKING:
    from collections.abc import Sequence

GRACE_S = 25.0
"""How long a worker that was asked to end may take to save a checkpoint."""
AT_ONCE_S = 2.0
"""How long it may take after a second signal."""
STALL_VARIABLE = "BURST_STALL_S"
_CRASHES = {
    getattr(signal, name) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE") if hasattr(signal, name)
}


class Asked:
    """The signals that asked this process to end; each is handed on to the worker."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.worker: Ranks | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _frame: Any) -> None:
        self.times.append(time.monotonic())
        if self.worker is not None:
            self.worker.send(number)

    def overdue(self, now: float) -> bool:
        """Whether the worker has had its time to end in order."""
        if len(self.times) > 1:
            return now - self.times[1] > AT_ONCE_S
        return bool(self.times) and now - self.times[0] > GRACE_S


def supervise(folder: Path, command: Sequence[str], *, fresh: bool = False, processes: int = 1) -> int:
    """Run ``command`` (the worker, one process a GPU) until it has a result, restarting it by rule.

    Returns the exit code of ``train.py``.
    """
    output = folder / "out"
    records.plant(None)  # a planted fault is the worker's
    asked = Asked()
    deaths: list[Death] = []
    tight: list[str] = []
    if fresh:
        checkpoints.set_all_aside(output)
    while True:
        seal.recover(output, manifest.listed_id(folder))
        if (output / seal.ADAPTER_NAME).exists():
            if deaths:
                Reporter(output).end("sealed", ExitCode.SEALED)
            print(f"already sealed: {output / seal.ADAPTER_NAME}", flush=True)
            return ExitCode.SEALED
        if asked.times:
            return interrupted(Reporter(output))
        ended = look_after(folder, [*command, *tight], asked, len(deaths), processes)
        if isinstance(ended, int):
            return ended
        reporter = Reporter(output)
        if asked.times:  # it did not end in time: what was saved before stands
            return interrupted(reporter)
        if not watchdog.another_start(ended, deaths):
            return failed(reporter, *last_words(ended, deaths, output))
        deaths.append(ended)
        if ended.kind == "gpu memory":
            tight = ["--tight"]
        reporter.emit("death", cause=ended.kind, code=ended.code, phase=ended.phase, step=ended.step)
        steps = checkpoints.steps(output)
        where = f"the checkpoint of step {steps[0]}" if steps else "the beginning"
        reporter.emit("note", text=f"{ended.what}; going on from {where}")
        reporter.events.close()


def look_after(folder: Path, command: list[str], asked: Asked, restarts: int, processes: int) -> int | Death:
    """Start a worker and stay with it to its end: an exit code that is a result, or how it died."""
    ear, mouth = os.pipe()
    stacks = folder / "out" / f"stacks-{restarts + 1}.txt"
    environment = os.environ | {pulse.VARIABLE: str(mouth)}
    if restarts and records.FAULT_ALWAYS_VARIABLE not in environment:
        environment.pop(records.FAULT_VARIABLE, None)  # a planted fault happens once
    kills = host_memory_kills()
    worker = Ranks(
        [
            start_worker(command, folder, environment | of_rank | {STACKS_VARIABLE: f"{stacks}{rank or ''}"}, mouth)
            for rank, of_rank in enumerate(ranks.environments(processes))
        ]
    )
    os.close(mouth)
    asked.worker = worker
    if asked.times:
        worker.send(signal.SIGTERM)
    vitals = Vitals(time.monotonic())
    try:
        why = listen(worker, ear, vitals, asked, stacks)
    finally:
        asked.worker = None
        os.close(ear)
        worker.close()
        for path in stacks.parent.glob(f"{stacks.name}*"):
            if path.stat().st_size == 0:
                path.unlink()
    code = worker.wait()
    if why is None and code in set(ExitCode):
        return int(code)
    return death(code, why, vitals, memory_killed=host_memory_kills() > kills)


def start_worker(
    command: list[str], folder: Path, environment: dict[str, str], descriptor: int
) -> subprocess.Popen[bytes]:
    """The worker as a process of its own group, with its end of the pulse; it dies with the other end of its standard input."""
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, pass_fds=(descriptor,), start_new_session=True
    )


def listen(worker: Ranks, ear: int, vitals: Vitals, asked: Asked, stacks: Path) -> str | None:
    """Hear a worker's pulse until it has ended. Returns why it was ended, where this process did that."""
    stall_s = float(os.environ.get(STALL_VARIABLE) or watchdog.STALL_S)
    activity, rest, why = Activity(worker.pids), b"", None
    tick = min(1.0, stall_s / 4)
    while worker.poll() is None:
        ready, _, _ = select.select([ear], [], [], tick)
        now = time.monotonic()
        if ready:
            data = os.read(ear, 1 << 16)
            if not data:  # it has closed its end: it is ending
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.wait(tick)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    vitals.hear(json.loads(line), now)
        if asked.times:
            if asked.overdue(now):
                worker.send(signal.SIGKILL)
            continue
        if not vitals.has_pace and now - vitals.heard > stall_s / 4:
            activity.look(now)
        why = watchdog.stall(vitals, now, activity.last, stall_s)
        if why is not None:
            take_stacks(worker, vitals, why, stacks)
            worker.send(signal.SIGKILL)
            why = f"{why}; stacks in out/{stacks.name}"
            break
    worker.wait()
    return why


def death(code: int, why: str | None, vitals: Vitals, *, memory_killed: bool) -> Death:
    """What a worker died of, told from its exit code, the signal, and the kernel's count of out-of-memory kills."""
    at = f"step {vitals.step}" if vitals.step is not None else repr(vitals.phase)
    where = (vitals.phase, vitals.step)
    if why is not None:
        return Death("stalled", code, *where, f"the worker stalled: {why}")
    if code == Died.GPU_MEMORY:
        return Death("gpu memory", code, *where, f"out of GPU memory at {at}: {vitals.error}")
    if code >= 0:
        return Death("error", code, *where, f"{vitals.error or f'the worker ended with code {code}'} at {at}")
    name = signal.Signals(-code).name
    if -code in _CRASHES:
        return Death("crashed", code, *where, f"the worker crashed at {at} ({name})")
    if memory_killed:
        return Death("host memory", code, *where, f"the system killed the worker at {at} for want of memory")
    return Death("killed", code, *where, f"the worker was killed at {at} ({name})")


def last_words(ended: Death, past: Sequence[Death], output: Path) -> tuple[str, str, ExitCode]:
    """What happened, what to do and the exit code, where a worker is not started again."""
    times = 1 + sum((item.kind, item.step) == (ended.kind, ended.step) for item in past)
    what = ended.what + (f" ({times} times there)" if times > 1 else "")
    safe = standing(output)
    if ended.kind == "gpu memory":
        return what, "lower data.max_length, train.batch or adapter.rank, or take a larger card", ExitCode.NOTHING_FITS
    if ended.kind == "host memory":
        return what, f"take a machine with more memory, or end other processes; {safe}", ExitCode.NOTHING_FITS
    if ended.kind == "error":
        return what, f"this is a bug or a broken library: the traceback is above; {safe}", ExitCode.FAILED
    return what, f"look at the log and the device, then start it again; {safe}", ExitCode.FAILED


class Activity:
    """When processes and their children last used the CPU or moved bytes through files."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = pids
        self.last = time.monotonic()
        self._looked = self.last
        self._used = (0.0, 0)

    def look(self, now: float) -> None:
        """Two hundredths of the time on a CPU, or a byte, is activity: what sleeps uses neither."""
        each = [used(pid) for pid in self.pids]
        cpu_s, moved = sum(one[0] for one in each), sum(one[1] for one in each)
        if moved > self._used[1] or cpu_s - self._used[0] > 0.02 * (now - self._looked) + 0.02:
            self.last = now
            self._used, self._looked = (cpu_s, moved), now


def used(pid: int) -> tuple[float, int]:
    """CPU seconds and bytes read and written so far by a process and its children."""
    import psutil

    cpu_s, moved = 0.0, 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error, AttributeError):
                times = process.cpu_times()
                cpu_s += times.user + times.system
                counted = process.io_counters()
                moved += counted.read_chars + counted.write_chars
    return cpu_s, moved


def take_stacks(worker: Ranks, vitals: Vitals, why: str, path: Path) -> None:
    """Write down what a stalled worker was doing: the stacks of its threads, seen from inside and outside, and the GPU."""
    if hasattr(signal, "SIGUSR1"):
        worker.send(signal.SIGUSR1, group=False)
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not (path.exists() and path.stat().st_size):
            time.sleep(0.05)
        time.sleep(0.2)  # it is written line by line
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"\n{why}\nphase {vitals.phase}, step {vitals.step}, process {worker.pids[0]}\n")
        for tool in (["py-spy", "dump", "--pid", str(worker.pids[0])], ["nvidia-smi"]):
            if shutil.which(tool[0]) is None:
                continue
            file.write(f"\n$ {' '.join(tool)}\n")
            with contextlib.suppress(subprocess.SubprocessError, OSError):
                file.write(subprocess.run(tool, text=True, capture_output=True, timeout=20, check=False).stdout)


def host_memory_kills() -> int:
    """How often the kernel has killed a process for memory: of this control group, else of the machine."""
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def command_of(script: Path, arguments: Sequence[str]) -> list[str]:
    """The worker's command: the same interpreter and script."""
    return [sys.executable, "-u", str(script), *arguments, "--worker"]
