"""Rented machines, with a real SkyPilot on a real Slurm: the template by hand, and ``burst train --where cloud``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
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
    task["envs"] |= {"BURST_CANARY": "without-gpu", **envs}
    with open(folder / "task.yaml", "w") as file:
        YAML(typ="safe").dump(task, file)


def sky(rig: slurm.Rig, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "sky", *arguments]
    environment = {**os.environ, **rig.environment(), "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, text=True, capture_output=True, check=False, stdin=subprocess.DEVNULL
    )


def test_a_job_that_hangs_is_ended_by_its_limit(rig: slurm.Rig, tmp_path: Path, payload_python: str) -> None:
    """The template by hand, as its comment says, with limits that nothing can meet: job and set-up end, with no client of burst's."""
    write_job(tmp_path)
    burst("bundle", "-o", "job.tar.gz", cwd=tmp_path)
    write_task(tmp_path, BURST_PYTHON=payload_python, BURST_RUN_LIMIT_S=1)
    launched = sky(rig, "launch", "-y", "-c", "one", "task.yaml", cwd=tmp_path)
    assert "end: state=checked" in launched.stdout, (launched.stdout + launched.stderr)[-3000:]
    assert re.search(r"FAILED\b", sky(rig, "queue", "one", cwd=tmp_path).stdout)
    write_task(tmp_path, BURST_PYTHON=payload_python, BURST_SETUP_LIMIT_S=1)
    sky(rig, "launch", "-y", "-c", "one", "task.yaml", cwd=tmp_path)
    assert "FAILED_SETUP" in sky(rig, "queue", "one", cwd=tmp_path).stdout
    assert sky(rig, "down", "-y", "one", cwd=tmp_path).returncode == 0


CLOUD = """\
cloud:
  {{gpus: [A100], infra: [slurm/loopback], without_autodown: true, python: {python}, store: "file://{store}",
    secrets: [HF_TOKEN, WANDB_API_KEY]}}
"""
TOKEN, KEY = "hf_" + "pLaNtEd0" * 5, "wandb" + "pLaNtEd1" * 5
PYTHON = """\
#!/bin/sh
printf %s "$HF_TOKEN$WANDB_API_KEY" | sha256sum >> {seen}
exec {python} "$@"
"""


@pytest.fixture
def job(rig: slurm.Rig, tmp_path: Path, payload_python: str) -> Path:
    path = write_job(tmp_path / "job")
    python = path.with_name("python")  # notes that the secrets arrived, by their hash
    python.write_text(PYTHON.format(python=payload_python, seen=path.with_name("seen")))
    python.chmod(0o755)
    path.write_text(path.read_text() + CLOUD.format(python=python, store=tmp_path / "store"))
    return path.parent


def on_rig(rig: slurm.Rig, *arguments: str, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    return burst(*arguments, cwd=cwd, check=check, HF_TOKEN=TOKEN, WANDB_API_KEY=KEY, **rig.environment())


def runs(rig: slurm.Rig, job: Path) -> list[dict]:
    return json.loads(on_rig(rig, "runs", "--json", cwd=job).stdout)


def clusters(rig: slurm.Rig, cwd: Path) -> set[str]:
    return set(re.findall(r"burst-[a-z0-9-]+", sky(rig, "status", "--refresh", cwd=cwd).stdout))


def test_train_fetch_and_tear_down_in_this_order(rig: slurm.Rig, job: Path) -> None:
    refused = on_rig(rig, "train", "--where", "cloud", "--max-cost", "0.5", "--yes", cwd=job, check=False)
    assert (refused.returncode, "--max-cost" in refused.stderr.splitlines()[-1]) == (3, True)
    unasked = on_rig(rig, "train", "--where", "cloud", cwd=job, check=False)
    assert (unasked.returncode, unasked.stderr.splitlines()[-1]) == (1, "do this: launch it with: --yes --max-cost USD")
    assert runs(rig, job) == []

    done = on_rig(rig, "train", "--where", "cloud", "--yes", "--max-cost", "3", "--name", "first", cwd=job)
    assert "$3.00" in done.stderr, "the worst case is stated before"
    record = runs(rig, job)[0]
    assert (record["state"], record["adapter"]) == ("adopted", "safe here")
    assert record["cost_usd"] == pytest.approx((record["gone"] - record["launched"]) / 3600 * slurm.HOURLY_USD)
    seal.verify_seal(job / "adapters/first")
    events = [json.loads(line) for line in (Path(record["folder"]) / "events.jsonl").read_bytes().splitlines()]
    order = [event["event"] for event in events if event["event"] != "state"]
    assert order == ["created", "bundled", "launching", "launched", "adopted", "machine gone"]
    assert clusters(rig, job) == set()

    assert hashlib.sha256((TOKEN + KEY).encode()).hexdigest() in (job / "seen").read_text(), "they arrived"
    roots = (job, rig.home, Path(record["folder"]), job.parent / "store")
    planted = [path for root in roots for path in root.rglob("*") if path.is_file()]
    assert len(planted) > 100
    assert [path for path in planted for secret in (TOKEN, KEY) if secret.encode() in path.read_bytes()] == []

    shutil.rmtree(job / "adapters")  # the machine is gone, and so is the adapter here: the store has it
    fetched = on_rig(rig, "fetch", "first", cwd=job)
    assert "fetched, every hash verified" in fetched.stdout
    seal.verify_seal(job / "adapters/first")


KILLER = """
import json, os, signal, sys
from burst_payload import records
step, real = sys.argv.pop(1), records.write_json
def write_json(path, value):
    real(path, value)
    if path.name == "run.json" and value[step] not in (None, "created", "running", "sealed"):
        os.kill(os.getpid(), signal.SIGKILL)
records.write_json = write_json
from burst.cli import main
main()
"""
STEPS = {"machine named": "cluster", "launch asked for": "request_id", "job submitted": "job_id", "adopted": "state"}


@pytest.mark.parametrize("step", STEPS)
def test_launcher_killed(rig: slurm.Rig, job: Path, step: str) -> None:
    """SIGKILL right after the record of a step: another process finds the truth, the adapter if there is one, and ends it."""
    (job / "killer.py").write_text(KILLER)
    launcher = subprocess.run(
        [
            sys.executable,
            "killer.py",
            STEPS[step],
            "train",
            "--where",
            "cloud",
            "--yes",
            "--max-cost",
            "9",
            "--name",
            "cut",
        ],
        cwd=job,
        env={**os.environ, **rig.environment(), "HF_TOKEN": TOKEN, "WANDB_API_KEY": KEY},
        text=True,
        capture_output=True,
        check=False,
    )
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    record = runs(rig, job)[0]
    assert record["cluster"].startswith("burst-cut-"), "the machine is on record before it is asked for"
    assert (record["request_id"] is not None, record["job_id"] is not None) == (
        step != "machine named",
        step in ("job submitted", "adopted"),
    )
    assert (record["adapter"] == "safe here") == (step == "adopted")
    if step == "job submitted":
        sky(rig, "api", "stop", cwd=job)  # the server may die as well: whoever asks next starts it
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
        [
            sys.executable,
            "-m",
            "burst.cli",
            "train",
            "--where",
            "cloud",
            "--yes",
            "--max-cost",
            "9",
            "--name",
            "regret",
        ],
        cwd=job,
        env={**os.environ, **rig.environment(), "HF_TOKEN": TOKEN, "WANDB_API_KEY": KEY},
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


BROKEN_SSH = """
import os, signal, sys
from burst import launch, run
from burst.errors import BurstError
found = run.find("gone")
stream = launch.place_of(found.read()).open(found, "adapter/adapter_model.safetensors", 0)
os.kill(stream._process.pid, signal.SIGKILL)
try:
    while stream.read(1):
        pass
except BurstError as error:
    print(error.what)
"""


def test_a_node_that_goes_has_saved_its_adapter(rig: slurm.Rig, job: Path) -> None:
    """Nobody is there when the job ends, ssh breaks, the node is lost: the adapter comes home, and the run knows the rest."""
    on_rig(rig, "train", "--where", "cloud", "--yes", "--max-cost", "9", "--detach", "--name", "gone", cwd=job)
    on_rig(rig, "logs", "-f", "gone", cwd=job)
    before = runs(rig, job)[0]
    assert (before["state"], before["adapter"]) == ("sealed", "only on the machine")
    seen = on_rig(rig, "doctor", "--json", cwd=job, check=False)
    machine = [finding for finding in json.loads(seen.stdout) if finding["part"] == "machine"]
    assert [(finding["state"], finding["do"]) for finding in machine] == [("bad", "burst down gone")]
    broken = subprocess.run(
        [sys.executable, "-c", BROKEN_SSH],
        cwd=job,
        env={**os.environ, **rig.environment()},
        text=True,
        capture_output=True,
        check=False,
    )
    assert broken.stdout == "the connection to the machine broke\n", broken.stderr

    slurm.output(
        "scancel", "--full", "--user=root", env={**os.environ, "SLURM_CONF": str(rig.folder / "etc/slurm.conf")}
    )
    slurm.wait_until(lambda: not clusters(rig, job), "SkyPilot to see that the node is gone", 120)
    warned = on_rig(rig, "show", "gone", cwd=job)
    assert "gone" in warned.stdout
    on_rig(rig, "fetch", "gone", cwd=job)
    seal.verify_seal(job / "adapters/gone")
    record = runs(rig, job)[0]
    assert (record["state"], record["adapter"], record["gone"] is not None) == ("adopted", "safe here", True)
