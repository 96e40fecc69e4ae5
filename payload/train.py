# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "peft==0.21.2",
#     "trl==1.16.0",
#     "accelerate==1.15.0",
#     'bitsandbytes==0.50.2; sys_platform != "darwin"',
#     "tokenizers==0.23.3",
#     "safetensors==0.8.0",
#     "huggingface-hub==2.4.0",
#     "jinja2==3.1.6",
#     "datasets==5.2.0",
#     "filelock",
# ]
# ///
"""Train one LoRA adapter from this folder: ``python train.py`` (or ``uv run train.py``).

The folder is a bundle made by burst; burst itself is not needed. Reads, beside this file:

    MANIFEST.json       size and sha256 of every file here; checked first
    run.json            the resolved settings
    data/*.jsonl        the rows
    requirements.lock   the pinned libraries (this header names the direct ones)

Writes into out/:

    adapter/            the result, in PEFT's layout: adapter_model.safetensors, adapter_config.json, tokenizer files,
                        chat template, metadata.json (versions, hashes, steps, losses, times) and SEALED.json (size and
                        sha256 of all of them). It appears in one rename, complete, or not at all. One that was changed
                        afterwards is moved to adapter.unsealed-N before a new run.
    events.jsonl        one JSON object a line, append-only, with sequence numbers
    status.json         the newest state: running, sealed, failed or interrupted, with phase and step
    checkpoints/step-N  sealed like the adapter: adapter, optimizer, schedule, random states and position in the data.
                        Every train.save_steps steps, else every five minutes; at SIGTERM and SIGINT too. A new start
                        goes on from the newest one whose hashes hold, to the same result as if nothing had happened.

Options: --model FOLDER  the base model, where run.json names a local one
         --check         verify, build every configuration, tokenize every row, and stop before loading the model
         --fresh         set the checkpoints aside and train from the beginning

Exit codes: 0 sealed (or it was already), 1 failed, 2 the bundle or its settings are invalid, 3 it does not fit into
memory, 4 a verification failed, 130 interrupted by a signal. The last line on stderr says what to do.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from burst_payload import checkpoints, libraries, manifest, seal, stop  # noqa: E402
from burst_payload import config as run_config  # noqa: E402
from burst_payload.reporter import Reporter  # noqa: E402
from burst_payload.stop import ExitCode, Stop, first_line  # noqa: E402

OUTPUT = HERE / "out"
ADAPTER = OUTPUT / seal.ADAPTER_NAME


def main() -> int:
    options = parse_options()
    stop.listen()
    missing = libraries.missing(HERE / "requirements.lock")
    if missing:
        print(
            f"error: not installed: {', '.join(missing)}\n"
            "do this: pip install -r requirements.lock, or start with: uv run train.py",
            file=sys.stderr,
        )
        return ExitCode.INVALID
    OUTPUT.mkdir(exist_ok=True)
    from filelock import FileLock, Timeout

    try:
        with FileLock(OUTPUT / ".lock", timeout=0):
            return supervise(options)
    except Timeout:
        print(f"error: another process trains in {OUTPUT}\ndo this: wait for it, or stop it", file=sys.stderr)
        return ExitCode.FAILED


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one LoRA adapter from this bundle.")
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        default=os.environ.get("BURST_MODEL"),
        help="the base model, where run.json names a local one",
    )
    parser.add_argument("--check", action="store_true", help="stop before the model is loaded")
    parser.add_argument("--fresh", action="store_true", help="set checkpoints aside and train from the beginning")
    return parser.parse_args()


def supervise(options: argparse.Namespace) -> int:
    """Run, and turn every way in which it can end into a final event, a status and an exit code."""
    seal.recover(OUTPUT, manifest.listed_id(HERE))
    if ADAPTER.exists():
        print(f"already sealed: {ADAPTER}")
        return ExitCode.SEALED
    if options.fresh:
        checkpoints.set_all_aside(OUTPUT)
    reporter = Reporter(OUTPUT)
    try:
        return run(options, reporter)
    except BaseException as error:
        if stop.was_asked():  # first: a library may have given the interruption another name
            stop.ignore()
            reporter.end("interrupted", ExitCode.INTERRUPTED)
            print(f"interrupted: {standing()}\ndo this: start it again", file=sys.stderr)
            return ExitCode.INTERRUPTED
        if isinstance(error, Stop):
            return failed(reporter, error.what, error.fix, error.code)
        if type(error).__name__ == "OutOfMemoryError":  # torch's; naming the class would import torch
            return failed(
                reporter,
                f"out of GPU memory: {first_line(error)}",
                "lower data.max_length, train.batch or adapter.rank, or take a larger card",
                ExitCode.NOTHING_FITS,
            )
        traceback.print_exc()
        return failed(
            reporter,
            f"{type(error).__name__}: {first_line(error)}",
            "this is a bug or a broken library: the traceback is above",
            ExitCode.FAILED,
        )


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    """From the bundle to a sealed adapter. Raises ``Stop`` for whatever a person can fix."""
    reporter.phase("verify")
    try:
        bundle_id = manifest.verify(HERE)
        config = run_config.load(HERE)
    except manifest.ManifestError as error:
        raise Stop(f"the bundle is damaged: {error}", "copy it again", ExitCode.VERIFICATION) from error
    except run_config.ConfigError as error:
        raise Stop(str(error), "make the bundle anew with burst bundle", ExitCode.INVALID) from error
    reporter.phase("libraries")
    for name, wanted, found in libraries.differences(HERE / "requirements.lock"):
        reporter.emit("note", text=f"{name} {found} instead of the pinned {wanted}")
    use_one_gpu()
    hush()
    from burst_payload import prepare, session  # imports torch: only now, with one GPU visible

    reporter.phase("prepare")
    prepared = prepare.prepare(HERE, config, options.model, reporter)
    if not options.check:
        session.train_and_seal(prepared, bundle_id, reporter)
    reporter.end("checked" if options.check else "sealed", ExitCode.SEALED)
    return ExitCode.SEALED


def standing() -> str:
    """What is safe on this disk, for the last words of a run that ended early."""
    if seal.is_sealed(ADAPTER):
        return f"after the adapter was sealed: {ADAPTER}"
    steps = checkpoints.steps(OUTPUT)
    return f"the checkpoint of step {steps[0]} is saved" if steps else "nothing was saved yet"


def hush() -> None:
    """Keep out of the log what libraries say to their developers; what matters to a run is reported as events."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def use_one_gpu() -> None:
    """Leave one GPU visible, in PCI order, unless the environment already chooses."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")


def failed(reporter: Reporter, what: str, fix: str, code: ExitCode) -> int:
    reporter.end("failed", code, error=what, fix=fix or None)
    print(f"error: {what}", file=sys.stderr)
    if fix:
        print(f"do this: {fix}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
