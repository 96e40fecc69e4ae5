"""Rented machines, with a real SkyPilot on a real Slurm: the template by hand, and ``burst train --where cloud``."""

from __future__ import annotations

import json
import os
import re
import signal
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
    pytest.mark.skipif(
        os.environ.get("BURST_RIG") == "off"
        or (slurm.missing() is not None and os.environ.get("BURST_RIG") != "required"),
        reason=f"the Slurm rig cannot run here: {slurm.missing() or 'it did not start'}",
    ),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[slurm.Rig]:
    assert slurm.missing() is None, slurm.missing()
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


def test_a_job_that_hangs_is_ended_by_its_limit(rig: slurm.Rig, tmp_path: Path, payload_python: str) -> None:
    """The template by hand, as its comment says, with a limit that nothing can meet: the job ends, with no client of burst's."""
    write_job(tmp_path)
    burst("bundle", "-o", "job.tar.gz", cwd=tmp_path)
    write_task(tmp_path, BURST_PYTHON=payload_python, BURST_RUN_LIMIT_S=1)
    launched = sky(rig, "launch", "-y", "-c", "one", "task.yaml", cwd=tmp_path)
    assert "end: state=checked" in launched.stdout, (launched.stdout + launched.stderr)[-3000:]
    assert "FAILED" in sky(rig, "queue", "one", cwd=tmp_path).stdout
    assert sky(rig, "down", "-y", "one", cwd=tmp_path).returncode == 0


CLOUD = """\
cloud: {{gpus: [A100], infra: [slurm/loopback], without_autodown: true, python: {python}}}
"""
TOKEN = "hf_" + "pLaNtEd0" * 5


@pytest.fixture
def job(rig: slurm.Rig, tmp_path: Path, payload_python: str) -> Path:
    path = write_job(tmp_path / "job")
    path.write_text(path.read_text() + CLOUD.format(python=payload_python))
    return path.parent


def on_rig(rig: slurm.Rig, *arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return burst(*arguments, cwd=cwd, check=check, HF_TOKEN=TOKEN, **rig.environment())


def runs(rig: slurm.Rig, job: Path) -> list[dict]:
    return json.loads(on_rig(rig, "runs", "--json", cwd=job).stdout)


def clusters(rig: slurm.Rig, cwd: Path) -> set[str]:
    return set(re.findall(r"burst-[a-z0-9-]+", sky(rig, "status", "--refresh", cwd=cwd).stdout))


def test_train_fetch_and_tear_down_in_this_order(rig: slurm.Rig, job: Path) -> None:
    refused = on_rig(rig, "train", "--where", "cloud", "--max-cost", "0.5", "--yes", cwd=job, check=False)
    assert (refused.returncode, "--max-cost" in refused.stderr.splitlines()[-1]) == (3, True)
    unasked = on_rig(rig, "train", "--where", "cloud", cwd=job, check=False)
    assert (unasked.returncode, unasked.stderr.splitlines()[-1]) == (1, "do this: launch it with: --yes")
    assert runs(rig, job) == []

    done = on_rig(rig, "train", "--where", "cloud", "--yes", "--max-cost", "2", "--name", "first", cwd=job)
    assert "$2.00" in done.stderr, "the worst case is stated before"
    record = runs(rig, job)[0]
    assert (record["state"], record["adapter"]) == ("adopted", "safe here")
    assert record["cost_usd"] == pytest.approx((record["gone"] - record["launched"]) / 3600 * slurm.HOURLY_USD)
    seal.verify_seal(job / "adapters/first")
    events = [json.loads(line) for line in (Path(record["folder"]) / "events.jsonl").read_bytes().splitlines()]
    order = [event["event"] for event in events if event["event"] != "state"]
    assert order == ["created", "bundled", "launching", "launched", "adopted", "machine gone"]
    assert clusters(rig, job) == set()

    planted = [path for root in (job, rig.home, Path(record["folder"])) for path in root.rglob("*") if path.is_file()]
    assert len(planted) > 100
    assert [path for path in planted if TOKEN.encode() in path.read_bytes()] == []


KILLER = """
import os, signal, sys
left = int(sys.argv.pop(1))
real = os.replace
def replace(*arguments):
    global left
    real(*arguments)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
os.replace = replace
from burst.cli import main
main()
"""


@pytest.mark.parametrize("step", ["machine named", "launch asked for", "job submitted"])
def test_launcher_killed(rig: slurm.Rig, job: Path, step: str) -> None:
    """SIGKILL right after the record of a step: another process finds the truth, the adapter if there is one, and ends it."""
    (job / "killer.py").write_text(KILLER)
    replaces = {"machine named": 4, "launch asked for": 5, "job submitted": 6}[step]
    launcher = subprocess.run(
        [sys.executable, "killer.py", str(replaces), "train", "--where", "cloud", "--yes", "--name", "cut"],
        cwd=job,
        env={**os.environ, **rig.environment()},
        text=True,
        capture_output=True,
        check=False,
    )
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    record = runs(rig, job)[0]
    assert record["cluster"].startswith("burst-cut-"), "the machine is on record before it is asked for"
    assert (record["request_id"] is not None, record["job_id"] is not None) == (
        step != "machine named",
        step == "job submitted",
    )
    on_rig(rig, "logs", "-f", "cut", cwd=job)
    fetched = on_rig(rig, "fetch", "cut", cwd=job, check=False)
    assert (fetched.returncode == 0) == (step != "machine named"), fetched.stderr
    on_rig(rig, "down", "cut", cwd=job)
    assert clusters(rig, job) == set()
    record = runs(rig, job)[0]
    assert record["gone"] is not None
    assert record["state"] == ("failed" if step == "machine named" else "adopted")
    if step != "machine named":
        seal.verify_seal(job / "adapters/cut")
    assert "gone" in on_rig(rig, "down", "cut", cwd=job).stdout, "gone already is success"


def test_ctrl_c_in_the_launch_leaves_nothing_behind(rig: slurm.Rig, job: Path) -> None:
    """Twice, as impatient people do: the launch is cancelled, the machine is ended, and it is gone."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "burst.cli", "train", "--where", "cloud", "--yes", "--name", "regret"],
        cwd=job,
        env={**os.environ, **rig.environment()},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    slurm.wait_until(lambda: (found := runs(rig, job)) and found[0]["request_id"], "the launch to be asked for", 120)
    for _ in range(2):
        launcher.send_signal(signal.SIGINT)
    shown, _ = launcher.communicate()
    assert launcher.returncode == 130, shown
    record = runs(rig, job)[0]
    assert (record["state"], record["gone"] is not None) == ("stopped", True)
    assert clusters(rig, job) == set()
