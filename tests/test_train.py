"""``burst train`` and what follows it, through the real command line and real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from burst_payload import seal
from jobs import MINI_SPEC, burst, write_job

pytestmark = pytest.mark.payload


@pytest.fixture
def job(tmp_path: Path, payload_python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small spec; burst uses the ready environment."""
    monkeypatch.setenv("BURST_PYTHON", payload_python)
    return write_job(tmp_path / "a job").parent


def all_runs(job: Path) -> list[dict]:
    return json.loads(burst("runs", "--json", cwd=job).stdout)


def wait_for(job: Path, done, what: str) -> dict:
    """Poll the newest run until ``done(record)``; bounded, and it fails with the record."""
    record: dict = {}
    for _ in range(600):
        found = all_runs(job)
        if found and done(record := found[0] | {"count": len(found)}):
            return record
        time.sleep(0.1)
    raise AssertionError(f"never {what}: {record}")


def test_from_jsonl_to_a_sealed_adapter_at_home(job: Path) -> None:
    result = burst("train", "--name", "first", "--json", cwd=job)
    record = json.loads(result.stdout)
    assert (record["name"], record["state"], record["adapter"]) == ("first", "adopted", "safe here")
    home = job / "adapters/first"
    assert Path(record["destination"]) == home
    assert seal.verify_seal(home).seal_id == record["seal_id"]
    assert "where   this machine: CPU" in result.stderr

    shown = burst("show", "first", cwd=job).stdout
    assert "loss by step" in shown
    assert "safe here" in shown
    assert "asked" in shown
    assert "phase: train" in burst("logs", "first", cwd=job).stdout
    again = json.loads(burst("fetch", "first", "--json", cwd=job).stdout)
    assert again["pulled_bytes"] == 0
    elsewhere = json.loads(burst("fetch", "fir", "-o", "copy", "--json", cwd=job).stdout)
    assert elsewhere["pulled_bytes"] == elsewhere["size_bytes"]
    assert seal.verify_seal(job / "copy").seal_id == record["seal_id"]

    # a good file is never replaced by a bad one: damage the source, the adapter at home stays as it is
    weights = Path(record["folder"]) / "bundle/out/adapter/adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    broken = burst("fetch", "first", "-o", "other", cwd=job, check=False)
    assert broken.returncode == 4
    assert not (job / "other").exists()
    seal.verify_seal(home)

    twice = burst("train", cwd=job, check=False)
    assert twice.returncode == 1
    assert "this very job was trained already: run first, adapter in" in twice.stderr
    assert [run["name"] for run in all_runs(job)] == ["first"]


def test_detached_run_outlives_its_launcher_and_is_fetched_later(job: Path) -> None:
    started = burst("train", "--detach", "--name", "away", cwd=job)
    assert started.stdout == "away\n"
    assert not (job / "adapters").exists()
    record = wait_for(job, lambda record: record["state"] == "sealed", "sealed")
    assert record["adapter"] == "sealed, not fetched"
    followed = burst("logs", "-f", cwd=job)
    assert "sealed: seal_id=" in followed.stdout
    burst("fetch", cwd=job)
    assert seal.is_sealed(job / "adapters/away")
    assert all_runs(job)[0]["adapter"] == "safe here"


def test_stop_and_the_truth_afterwards(job: Path) -> None:
    (job / "burst.yaml").write_text(MINI_SPEC.replace("max_steps: 2", "max_steps: 100000"))
    burst("train", "--detach", "--name", "long", cwd=job)
    record = wait_for(job, lambda record: record["state"] == "running", "running")
    pid = record["process"]["pid"]
    assert burst("stop", cwd=job).stdout == "long: stopped\n"
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert burst("stop", cwd=job).stdout == "nothing to stop: no run is at work\n", "stopping twice is no error"
    assert burst("stop", "long", cwd=job).stdout == "long: nothing to stop, it is stopped\n"
    fetched = burst("fetch", cwd=job, check=False)
    assert fetched.returncode == 1
    assert "run long has no adapter" in fetched.stderr


def test_payload_killed_is_a_failed_run_that_says_so(job: Path) -> None:
    (job / "burst.yaml").write_text(MINI_SPEC.replace("max_steps: 2", "max_steps: 100000"))
    with subprocess.Popen(
        [sys.executable, "-m", "burst.cli", "train", "--name", "victim"],
        cwd=job,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        record = wait_for(job, lambda record: record["process"] is not None, "started")
        os.kill(record["process"]["pid"], signal.SIGKILL)
        _, stderr = launcher.communicate()
    assert launcher.returncode == 1
    assert "the training process ended without a word" in stderr
    assert "burst logs victim" in stderr.splitlines()[-1]
    assert all_runs(job)[0]["state"] == "failed"
    assert not (job / "adapters").exists()


def test_stop_and_resume(job: Path) -> None:
    """Stopped in the middle, gone on with from the step it had reached, and brought home."""
    (job / "burst.yaml").write_text(MINI_SPEC.replace("max_steps: 2", "max_steps: 60"))
    burst("train", "--detach", "--name", "paused", cwd=job)
    assert "is at work" in burst("resume", cwd=job, check=False).stderr
    wait_for(job, lambda _: (json.loads(burst("show", "--json", cwd=job).stdout))["progress"]["step"] >= 2, "at step 2")
    assert burst("stop", cwd=job).stdout == "paused: stopped\n"
    done = json.loads(burst("show", "--json", cwd=job).stdout)
    assert done["progress"]["step"] < 60
    resumed = burst("resume", "paused", "--json", cwd=job)
    assert "going on with paused from step" in resumed.stderr
    record = json.loads(resumed.stdout)
    assert (record["state"], record["adapter"], record["error"]) == ("adopted", "safe here", None)
    metadata = json.loads((job / "adapters/paused/metadata.json").read_text())
    assert [step for step, _ in metadata["losses"]] == list(range(1, 61)), "nothing twice, nothing left out"
    assert len(metadata["segments"]) == 2
    assert "is trained to its end" in burst("resume", "paused", cwd=job, check=False).stderr


def test_ctrl_c_stops_the_run(job: Path) -> None:
    (job / "burst.yaml").write_text(MINI_SPEC.replace("max_steps: 2", "max_steps: 100000"))
    with subprocess.Popen(
        [sys.executable, "-m", "burst.cli", "train", "--name", "cut"],
        cwd=job,
        text=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as launcher:
        record = wait_for(job, lambda record: record["process"] is not None, "started")
        launcher.send_signal(signal.SIGINT)
        launcher.communicate()
    assert launcher.returncode == 130
    assert all_runs(job)[0]["state"] == "stopped"
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(record["process"]["pid"]).status() == psutil.STATUS_ZOMBIE


KILLER = """
import os, signal, sys
left = int(sys.argv.pop(1))
def counted(function):
    def call(*arguments, **keywords):
        global left
        result = function(*arguments, **keywords)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return result
    return call
for name in ("replace", "rename"):
    setattr(os, name, counted(getattr(os, name)))
from burst.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [0, 1, 2, 3, 4, 5, 6, 7, 8, 10])
def test_launcher_killed_after_each_durable_step(job: Path, kill_at: int) -> None:
    """SIGKILL to the launcher after its n-th rename: the record, the bundle, the start, the adoption, ...

    Whatever happened, the list tells the truth, nothing half-made has a final name, and fetch or a new train ends well.
    """
    script = job / "killer.py"
    script.write_text(KILLER)
    launcher = subprocess.run(
        [sys.executable, str(script), str(kill_at), "train", "--name", "cut"],
        cwd=job,
        text=True,
        capture_output=True,
        check=False,
    )
    assert launcher.returncode in (-signal.SIGKILL, 0), launcher.stderr
    if launcher.returncode == 0:
        assert kill_at > 6, "a run has at least the record, three updates, the manifest, the bundle and the state"
    found = all_runs(job)
    if found:
        record = wait_for(job, lambda record: record["state"] in ("sealed", "adopted", "failed"), "over")
    if found and record["state"] != "failed":
        burst("fetch", "cut", cwd=job)
    else:
        burst("train", "--name", "second", cwd=job)
    homes = list((job / "adapters").iterdir())
    assert [home.name for home in homes if not home.name.startswith(".")] in (["cut"], ["second"])
    assert all(seal.is_sealed(home) for home in homes if not home.name.startswith("."))
    newest = all_runs(job)[-1 if not found else 0]
    assert newest["state"] in ("adopted", "failed")
    assert any(run["adapter"] == "safe here" for run in all_runs(job))
