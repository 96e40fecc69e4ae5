"""The process that trains, from the bundle to the sealed adapter. Its supervisor is ``supervisor``."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from enum import IntEnum
from typing import TYPE_CHECKING

from burst_payload import checkpoints, libraries, manifest, pulse, ranks, seal, stop
from burst_payload import config as run_config
from burst_payload.records import reach
from burst_payload.reporter import Reporter
from burst_payload.stop import ExitCode, Stop, first_line

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

STACKS_VARIABLE = "BURST_STACKS"
"""The file for the stacks of all threads, written at SIGUSR1."""
PR_SET_PDEATHSIG = 1


class Died(IntEnum):
    """How a worker says to its supervisor that it ended without a result; nobody else sees these codes."""

    ERROR = 70
    GPU_MEMORY = 71


def main(folder: Path, options: argparse.Namespace) -> int:
    """Train the bundle in ``folder``, and turn every way in which it can end into events, a status and an exit code."""
    supervisor = os.getppid()
    end_with(supervisor)
    if rank := ranks.mine():
        stop.ignore()  # the first rank decides where they stop; the others end with it
    else:
        stop.listen()
    faulthandler.enable()
    if (path := os.environ.get(STACKS_VARIABLE)) is not None and hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=open(path, "w"), all_threads=True)  # noqa: SIM115 - until the end
    number = os.environ.get(pulse.VARIABLE)
    descriptor = int(number) if number else None
    pulse.open_to(None if rank else descriptor)
    output = folder / "out"
    reporter = Reporter(output / f"rank-{rank}", silent=True) if rank else Reporter(output, pid=supervisor)
    try:
        return run(folder, options, reporter)
    except BaseException as error:
        if stop.was_asked():  # first: a library may have given the interruption another name
            stop.ignore()
            return interrupted(reporter)
        if isinstance(error, Stop):
            return failed(reporter, error.what, error.fix, error.code)
        traceback.print_exc()
        pulse.open_to(descriptor)
        pulse.beat(error=f"{type(error).__name__}: {first_line(error)}")
        # torch's; naming the class would import torch
        return Died.GPU_MEMORY if type(error).__name__ == "OutOfMemoryError" else Died.ERROR


def run(folder: Path, options: argparse.Namespace, reporter: Reporter) -> int:
    """From the bundle to a sealed adapter. Raises ``Stop`` for whatever a person can fix."""
    reporter.phase("verify")
    try:
        bundle_id = manifest.verify(folder)
        config = run_config.load(folder)
    except manifest.ManifestError as error:
        raise Stop(f"the bundle is damaged: {error}", "copy it again", ExitCode.VERIFICATION) from error
    except run_config.ConfigError as error:
        raise Stop(str(error), "make the bundle anew with burst bundle", ExitCode.INVALID) from error
    reporter.phase("libraries")
    for name, wanted, found in libraries.differences(folder / "requirements.lock"):
        reporter.emit("note", text=f"{name} {found} instead of the pinned {wanted}")
    use_gpus(ranks.count())
    hush()
    from burst_payload import prepare, session  # imports torch: only now, with the right GPUs visible

    reporter.phase("prepare")
    prepared = prepare.prepare(folder, config, options.model, reporter)
    if not options.check:
        session.train_and_seal(prepared, bundle_id, reporter, tight=options.tight)
    reporter.end("checked" if options.check else "sealed", ExitCode.SEALED)
    reach("end")
    return ExitCode.SEALED


def end_with(supervisor: int) -> None:
    """Die when the supervisor does, however it dies: two workers must never write into one folder."""

    def wait() -> None:
        while os.read(0, 1):  # the other end of standard input is the supervisor's, and it writes nothing
            continue
        os.killpg(os.getpgid(0), signal.SIGKILL)

    if sys.platform == "linux":  # the kernel does it, even where no thread gets to run
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os.kill(os.getpid(), signal.SIGKILL)
    if os.getpgid(0) == os.getpid():
        threading.Thread(target=wait, daemon=True, name="lifeline").start()


def hush() -> None:
    """Keep out of the log what libraries say to their developers; what matters to a run is reported as events."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def use_gpus(number: int) -> None:
    """Leave as many GPUs visible as there are processes, in PCI order, unless the environment already chooses."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))


def interrupted(reporter: Reporter) -> int:
    """The last words of a run that was asked to end."""
    reporter.end("interrupted", ExitCode.INTERRUPTED)
    print(f"interrupted: {standing(reporter.output)}\ndo this: start it again", file=sys.stderr)
    return ExitCode.INTERRUPTED


def standing(output: Path) -> str:
    """What is safe on this disk, for the last words of a run that ended early."""
    adapter = output / seal.ADAPTER_NAME
    if seal.is_sealed(adapter):
        return f"after the adapter was sealed: {adapter}"
    steps = checkpoints.steps(output)
    return f"the checkpoint of step {steps[0]} is saved" if steps else "nothing was saved yet"


def failed(reporter: Reporter, what: str, fix: str, code: ExitCode) -> int:
    """The last words of a run that cannot go on."""
    reporter.end("failed", code, error=what, fix=fix or None)
    print(f"error: {what}", file=sys.stderr)
    if fix:
        print(f"do this: {fix}", file=sys.stderr)
    return code
