"""What burst adds to SkyPilot, side by side in one run on the Slurm rig: launches, and bytes that come home.

    python benchmarks/cloud_overhead.py [--repeats 3] [--size-mb 500]

Needs what the rig needs (``tests/rig/slurm.py``) and the training environment (``burst env``). A bare launch is the same task with
``sky launch``, which shows the log to the job's end, and ``sky down``; burst's is ``burst train --where cloud --yes``, which
also quotes, watches, fetches, verifies and proves that the machine is gone. Goals: under 10 s and under 10 % more; a fetch at
0.9 or better of ``rsync`` over the same ssh. Nothing asserts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from ruamel.yaml import YAML  # noqa: E402

import jobs  # noqa: E402
from rig import slurm  # noqa: E402

BIN = Path(sys.executable).parent
CLOUD = "cloud: {{gpus: [A100], infra: [slurm/loopback], without_autodown: true, python: {python}}}\n"

# Run with burst's environment and the name of a run whose machine holds a large sealed adapter.
FETCH = """
import json, sys, time
from pathlib import Path
from typing import TYPE_CHECKING
from burst import fetch, launch, run
found = run.find(sys.argv[1])
place = launch.place_of(found.read())
began = time.perf_counter()
fetched = fetch.fetch(lambda path, at: place.open(found, path, at), Path(sys.argv[2]), bundle_id=None)
print(json.dumps({"s": time.perf_counter() - began, "bytes": fetched.pulled_bytes}))
"""
# Run on the machine, in the run's output folder: an adapter of random bytes under a seal of its own.
GROW = """
import os, shutil, sys
sys.path.insert(0, os.path.abspath(".."))
from pathlib import Path
from typing import TYPE_CHECKING
from burst_payload import records, seal
shutil.rmtree("large", ignore_errors=True)
shutil.copytree("adapter", "large")
header = b'{"weights": {"dtype": "U8", "shape": [%d], "data_offsets": [0, %d]}}' % ((int(sys.argv[1]),) * 2)
with open("large/adapter_model.safetensors", "wb") as file:
    file.write(len(header).to_bytes(8, "little") + header)
    for _ in range(int(sys.argv[1]) // 1_000_000):
        file.write(os.urandom(1_000_000))
seal.write_seal(Path("large"), seal.read_seal(Path("adapter")).bundle_id)
shutil.rmtree("adapter")
os.rename("large", "adapter")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size-mb", type=int, default=500)
    options = parser.parse_args()
    if reason := slurm.missing():
        sys.exit(f"the rig cannot run here: {reason}")
    python = subprocess.run([BIN / "burst", "env"], text=True, capture_output=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="burst-bench-") as folder:
        rig = slurm.Rig(Path(folder) / "slurm")
        rig.up()
        try:
            job = jobs.write_job(Path(folder) / "job")
            job.write_text(job.read_text() + CLOUD.format(python=python))
            environment = {**os.environ, **rig.environment(), "BURST_HOME": f"{folder}/home", "NO_COLOR": "1"}
            measure(job.parent, environment, python, options.repeats, options.size_mb * 1_000_000)
        finally:
            rig.down()


def measure(job: Path, environment: dict[str, str], python: str, repeats: int, size_bytes: int) -> None:
    def call(*command: object) -> str:
        done = subprocess.run(
            [str(word) for word in command], cwd=job, env=environment, text=True, capture_output=True, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{command[0]} {command[1]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    call(BIN / "burst", "bundle", "-o", "job.tar.gz")
    task = YAML(typ="safe").load(ROOT / "sky/train.yaml")
    task["resources"] = {"infra": f"slurm/{slurm.CLUSTER}", "accelerators": "A100:1"}
    task["envs"] |= {"BURST_PYTHON": python, "BURST_CANARY": "without-gpu"}
    with open(job / "task.yaml", "w") as file:
        YAML(typ="safe").dump(task, file)
    call(BIN / "sky", "check")  # starts SkyPilot's server, which stays

    bare, ours = [], []
    for turn in range(repeats):
        bare.append(timed(lambda turn=turn: call(BIN / "sky", "launch", "-y", "-c", f"bare{turn}", "task.yaml")))
        bare[-1] += timed(lambda turn=turn: call(BIN / "sky", "down", "-y", f"bare{turn}"))
        shutil.rmtree(Path(environment["HOME"]) / "burst", ignore_errors=True)
        ours.append(timed(lambda: call(BIN / "burst", "train", "--where", "cloud", "--yes", "--again")))
    one, other = statistics.median(bare), statistics.median(ours)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"bare sky launch + down   {one:7.1f} s   {', '.join(f'{value:.1f}' for value in bare)}")
    print(f"burst train              {other:7.1f} s   {', '.join(f'{value:.1f}' for value in ours)}")
    print(f"burst adds {other - one:+.1f} s, {(other / one - 1) * 100:+.1f} % (goal: under 10 s and under 10 %)")

    call(BIN / "burst", "train", "--where", "cloud", "--yes", "--again", "--detach", "--name", "large")
    call(BIN / "burst", "logs", "-f", "large")
    cluster = json.loads(call(BIN / "burst", "show", "large", "--json"))["cluster"]
    there = Path(environment["HOME"]) / f"burst/{cluster}/job/out"
    if not there.is_dir():
        there = Path.home() / f"burst/{cluster}/job/out"
    call("sh", "-c", f'cd "{there}" && exec "{python}" -c "$1" {size_bytes}', "sh", GROW)
    rates: dict[str, list[float]] = {"rsync": [], "burst": []}
    key = Path(environment["HOME"]) / f".sky/generated/ssh-keys/{cluster}.key"
    ssh = f"ssh -F {environment['HOME']}/.ssh/config -o IdentityFile={key} -o LogLevel=ERROR"
    for turn in range(repeats + 1):  # the first warms caches and connections
        took = timed(
            lambda turn=turn: call("rsync", "-a", "-e", ssh, f"{cluster}:burst/{cluster}/job/out/adapter/", f"r{turn}/")
        )
        fetched = json.loads(call(sys.executable, "-c", FETCH, "large", str(job / f"b{turn}")))
        if turn:
            rates["rsync"].append(size_bytes / 1e6 / took)
            rates["burst"].append(fetched["bytes"] / 1e6 / fetched["s"])
        shutil.rmtree(job / f"r{turn}")
        shutil.rmtree(job / f"b{turn}")
    for name, values in rates.items():
        print(f"{name:6} {statistics.median(values):7.1f} MB/s   {', '.join(f'{value:.1f}' for value in values)}")
    ratio = statistics.median(rates["burst"]) / statistics.median(rates["rsync"])
    print(f"burst fetches at {ratio:.2f} of rsync, verified (goal: 0.9 or better)")
    call(BIN / "burst", "down", "large", "--force")


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
