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
    stacks-N.txt        what every thread of a worker was doing that had to be ended because it stalled
    status.json         the newest state: running, sealed, failed or interrupted, with phase and step
    checkpoints/step-N  sealed like the adapter: adapter, optimizer, schedule, random states and position in the data.
                        Every train.save_steps steps, else every five minutes; at SIGTERM and SIGINT too. A new start
                        goes on from the newest one whose hashes hold, to the same result as if nothing had happened.

The training itself is a worker process that this one looks after. A worker that makes no progress for ten times its longest
step (at least BURST_STALL_S, 120 seconds), that is killed or that crashes is ended and started again from its newest whole checkpoint,
a bounded number of times. SIGTERM or SIGINT: a checkpoint is saved within 25 seconds. A second one: at once.

Options: --model FOLDER  the base model, where run.json names a local one
         --gpus N        GPUs of this machine to train on together; train.effective_batch is of all of them
         --check         verify, build every configuration, tokenize every row, and stop before loading the model
         --fresh         set the checkpoints aside and train from the beginning

Exit codes: 0 sealed (or it was already), 1 failed, 2 the bundle or its settings are invalid, 3 it does not fit into
memory, 4 a verification failed, 130 interrupted by a signal. The last line on stderr says what to do.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from burst_payload import libraries, ranks, supervisor, worker  # noqa: E402
from burst_payload.stop import ExitCode  # noqa: E402

OUTPUT = HERE / "out"


def main() -> int:
    options = parse_options()
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

    # a worker whose supervisor was killed is about to die; another supervisor is not
    name, patience_s = (f".worker-{ranks.mine()}.lock", 30) if options.worker else (".lock", 0)
    try:
        with FileLock(OUTPUT / name, timeout=patience_s):
            if options.worker:
                return worker.main(HERE, options)
            command = supervisor.command_of(Path(__file__), sys.argv[1:])
            processes = 1 if options.check else options.gpus
            return supervisor.supervise(HERE, command, fresh=options.fresh, processes=processes)
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
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        default=int(os.environ.get("BURST_GPUS") or 1),
        help="GPUs to train on together, one process each (without a GPU: processes)",
    )
    parser.add_argument("--check", action="store_true", help="stop before the model is loaded")
    parser.add_argument("--fresh", action="store_true", help="set checkpoints aside and train from the beginning")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # the process that trains
    parser.add_argument("--tight", action="store_true", help=argparse.SUPPRESS)  # it ran out of memory before
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
