"""``sky/train.yaml`` as a person uses it: a real SkyPilot launches a bundle on a real Slurm, and the adapter comes home."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from burst_payload import seal
from jobs import burst, write_job
from rig import slurm
from ruamel.yaml import YAML

TEMPLATE = Path(__file__).resolve().parents[1] / "sky/train.yaml"

pytestmark = [
    pytest.mark.payload,
    pytest.mark.slow,
    pytest.mark.skipif(slurm.missing() is not None, reason=f"the Slurm rig cannot run here: {slurm.missing()}"),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[slurm.Rig]:
    made = slurm.Rig(Path(tempfile.mkdtemp(prefix="burst-rig-")) / "slurm")  # short: sockets have short names
    try:
        made.up()
        yield made
    finally:
        made.down()


def write_task(folder: Path, **envs: str | int) -> None:
    """The template for the rig's one GPU. Plain Slurm has no autostop: there the partition's MaxTime is the limit."""
    task = YAML(typ="safe").load(TEMPLATE)
    task["resources"] = {"infra": f"slurm/{slurm.CLUSTER}", "accelerators": "A100:1"}
    task["envs"] |= envs
    with open(folder / "task.yaml", "w") as file:
        YAML(typ="safe").dump(task, file)


def sky(rig: slurm.Rig, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "sky", *arguments]
    environment = {**os.environ, **rig.environment(), "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )


def test_a_bundle_trains_through_skypilot_and_comes_home(rig: slurm.Rig, tmp_path: Path, payload_python: str) -> None:
    write_job(tmp_path)
    burst("bundle", "-o", "job.tar.gz", cwd=tmp_path)

    write_task(tmp_path, BURST_PYTHON=payload_python, BURST_RUN_LIMIT_S=1)
    hung = sky(rig, "launch", "-y", "-c", "one", "task.yaml", cwd=tmp_path)
    assert "Job finished (status: FAILED)" in hung.stdout + hung.stderr or hung.returncode != 0, hung.stdout[-3000:]
    queue = sky(rig, "queue", "one", cwd=tmp_path).stdout
    assert "FAILED" in queue, "a job that runs into its limit ends, with no client"

    write_task(tmp_path, BURST_PYTHON=payload_python)
    launched = sky(rig, "launch", "-y", "-c", "one", "task.yaml", cwd=tmp_path)
    assert launched.returncode == 0, (launched.stdout + launched.stderr)[-5000:]
    assert "sealed: seal_id=" in launched.stdout

    home = tmp_path / "adapter"
    remote_shell = " ".join(rig.ssh("one"))
    environment = {**os.environ, **rig.environment()}
    subprocess.run(
        ["rsync", "-a", "-e", remote_shell, "one:burst/job/out/adapter/", f"{home}/"], env=environment, check=True
    )
    assert seal.verify_seal(home).seal_id in launched.stdout

    assert sky(rig, "down", "-y", "one", cwd=tmp_path).returncode == 0
    assert "one" not in sky(rig, "status", "--refresh", cwd=tmp_path).stdout.split()
