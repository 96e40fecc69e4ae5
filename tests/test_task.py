"""The task as it reaches SkyPilot, built offline for places that cost money."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
from burst.offers import Limits, Offer
from burst.places import skypilot
archive = Path(sys.argv[1])
offers = [Offer(infra, "A100:1", 2.0, not infra.startswith("slurm")) for infra in sys.argv[2:]]
task = skypilot.build_task(archive, "burst/one", offers, Limits(1800, 7200, 15, 2.0), "/opt/my python", {"HF_TOKEN": "hf_planted"})
print(json.dumps({
    "infra": [f"{str(r.cloud).lower()}/{r.region}" for r in task.resources],
    "accelerators": [r.accelerators for r in task.resources],
    "autostop": [
        r.autostop_config and [r.autostop_config.enabled, r.autostop_config.idle_minutes, r.autostop_config.down, r.autostop_config.wait_for.value]
        for r in task.resources
    ],
    "ordered": type(task.resources).__name__,
    "envs": task.envs,
    "mounts": task.file_mounts,
    "token": task.api_server_access,
    "shown": repr(task) + str(task.secrets),
    "setup": task.setup,
    "run": task.run,
}))
"""


def build(tmp_path: Path, *infra: str) -> dict:
    pytest.importorskip("sky", reason="the extra cloud is not installed")
    (tmp_path / "job.tar.gz").write_bytes(b"x")
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "job.tar.gz"), *infra],
        env=environment,
        text=True,
        capture_output=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_price_order_autodown_limits_and_secrets(tmp_path: Path) -> None:
    places = ["lambda/us-east-1", "aws/us-east-1", "gcp/us-central1", "runpod/US"]
    task = build(tmp_path, *places)
    assert task["infra"] == places
    assert task["ordered"] == "list", "failover goes in the order of the quote"
    assert task["accelerators"] == [{"A100": 1}] * 4
    assert task["autostop"] == [[True, 15, True, "jobs"]] * 4
    assert task["mounts"] == {"~/burst/one/job.tar.gz": str(tmp_path / "job.tar.gz")}
    assert task["envs"] == {
        "BURST_FOLDER": "burst/one",
        "BURST_PYTHON": "/opt/my python",
        "BURST_SETUP_LIMIT_S": "1800",
        "BURST_RUN_LIMIT_S": "7200",
    }
    assert task["token"] is False
    assert "hf_planted" not in task["shown"]


def test_no_value_stands_in_the_shell_text(tmp_path: Path) -> None:
    task = build(tmp_path, "kubernetes/my-context")
    assert task["infra"] == ["kubernetes/my-context"]
    assert task["autostop"] == [[True, 15, True, "jobs"]]
    for text in (task["setup"], task["run"]):
        assert "timeout -k 60" in text
        assert not any(value in text for value in ("my python", "burst/one", "7200"))


def test_a_place_without_autodown_gets_none(tmp_path: Path) -> None:
    assert build(tmp_path, "slurm/lab")["autostop"] == [None]
