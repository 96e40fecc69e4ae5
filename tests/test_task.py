"""The tasks as they reach SkyPilot, built offline for places that cost money, against small catalogs of the tests' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import json, sys
from pathlib import Path
from burst.offers import Limits, Offer
from burst.places import sky_client, sky_tasks
from burst.spec import Cloud
"""
BUILD = (
    PRELUDE
    + """
store = sys.argv[2] or None
offers = [Offer(infra, "A100:1", 2.0, not infra.startswith("slurm")) for infra in sys.argv[3:]]
cloud = Cloud(python="/opt/my python", store=store)
order = sky_tasks.Order(Path(sys.argv[1]), offers, Limits(1800, 7200, 15, 2.0, 3600, 600), cloud, {"HF_TOKEN": "hf_planted"})
task = sky_tasks.train_task(order, "burst/one", store)
print(json.dumps({
    "infra": [f"{str(r.cloud).lower()}/{r.region}" for r in task.resources],
    "accelerators": [r.accelerators for r in task.resources],
    "autostop": [
        r.autostop_config and [r.autostop_config.enabled, r.autostop_config.idle_minutes, r.autostop_config.down, r.autostop_config.wait_for.value]
        for r in task.resources
    ],
    "hooks": [r.hooks for r in task.resources],
    "ordered": type(task.resources).__name__,
    "envs": task.envs,
    "secrets": sorted(task.secrets),
    "mounts": task.file_mounts,
    "token": task.api_server_access,
    "shown": repr(task) + str(task.secrets) + repr(order),
    "setup": task.setup,
    "run": task.run,
}))
"""
)


def sky_script(tmp_path: Path, script: str, *arguments: str) -> dict:
    pytest.importorskip("sky", reason="the extra cloud is not installed")
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, text=True, capture_output=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def build(tmp_path: Path, *infra: str, store: str = "") -> dict:
    (tmp_path / "job.tar.gz").write_bytes(b"x")
    return sky_script(tmp_path, BUILD, str(tmp_path / "job.tar.gz"), store, *infra)


def test_price_order_autodown_limits_hooks_and_secrets(tmp_path: Path) -> None:
    places = ["lambda/us-east-1", "aws/us-east-1", "gcp/us-central1", "runpod/US"]
    task = build(tmp_path, *places, store="s3://mine/adapters")
    assert task["infra"] == places
    assert task["ordered"] == "list", "failover goes in the order of the quote"
    assert task["accelerators"] == [{"A100": 1}] * 4
    assert task["autostop"] == [[True, 15, True, "jobs"]] * 4
    hook = {"run": "bash ~/burst/one/job/save.sh", "events": ["down", "preemption"], "timeout": 600}
    assert task["hooks"] == [[hook]] * 4
    assert task["mounts"] == {"~/burst/one/job.tar.gz": str(tmp_path / "job.tar.gz")}
    assert task["envs"] == {
        "BURST_FOLDER": "burst/one",
        "BURST_PYTHON": "/opt/my python",
        "BURST_GPUS": "1",
        "BURST_CAPABILITY": "8.0",
        "BURST_CANARY": "",
        "BURST_STORE": "s3://mine/adapters",
        "BURST_SETUP_LIMIT_S": "1800",
        "BURST_RUN_LIMIT_S": "7200",
        "BURST_STORE_LIMIT_S": "600",
    }
    assert task["token"] is False
    assert task["secrets"] == ["HF_TOKEN"]
    assert "hf_planted" not in task["shown"]


def test_no_value_stands_in_the_shell_text(tmp_path: Path) -> None:
    task = build(tmp_path, "kubernetes/my-context")
    assert task["infra"] == ["kubernetes/my-context"]
    assert task["autostop"] == [[True, 15, True, "jobs"]]
    assert task["hooks"] == [None], "nothing to save without a store"
    for text in (task["setup"], task["run"]):
        assert "timeout -k 60" in text
        assert not any(value in text for value in ("my python", "burst/one", "7200", "hf_planted"))


def test_a_place_without_autodown_gets_none(tmp_path: Path) -> None:
    assert build(tmp_path, "slurm/lab")["autostop"] == [None]


EXPORT = (
    PRELUDE
    + """
task = sky_tasks.export_task("burst/one", 900, Cloud(python="/opt/my python"))
print(json.dumps({"envs": task.envs, "setup": task.setup, "run": task.run, "token": task.api_server_access}))
"""
)


def test_the_export_is_a_job_with_its_own_limit_and_nothing_on_stdin(tmp_path: Path) -> None:
    task = sky_script(tmp_path, EXPORT)
    assert task["envs"] == {
        "BURST_FOLDER": "burst/one",
        "BURST_PYTHON": "/opt/my python",
        "BURST_EXPORT_LIMIT_S": "900",
    }
    assert (task["setup"], task["token"]) == (None, False)
    assert 'timeout -k 60 "$BURST_EXPORT_LIMIT_S"' in task["run"]
    assert task["run"].rstrip().endswith("< /dev/null")


COLUMNS = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"
CATALOGS = {
    "lambda": [
        "gpu_1x_a100,A100,1,30,200,1.29,us-east-1,,",
        "gpu_1x_a100,A100,1,30,200,9.99,europe-central-1,,",
    ],
    "runpod": ["1x_A100-80GB_SECURE,A100-80GB,1,8,80,1.64,US,,,US-1", "1x_A100-80GB_SECURE,A100-80GB,1,8,80,1.70,CA,,,CA-1"],
    "aws": ["p4d.24xlarge,A100,8,96,1152,32.77,us-east-1,,,us-east-1a", "p4d.24xlarge,A100,8,96,1152,36.0,eu-west-1,,,eu-west-1a"],
    "gcp": [
        "a2-highgpu-1g,,,12,85,0.9,us-central1,,,us-central1-a",
        ",A100,1,,,2.93,us-central1,,,us-central1-a",
    ],
}  # fmt: skip
PRICED = (
    PRELUDE
    + """
cloud = Cloud(gpus=sys.argv[1].split(","), infra=sys.argv[2:] or None)
print(json.dumps([vars(offer) for offer in sky_tasks.priced(cloud, ["aws", "gcp", "lambda", "runpod"])]))
"""
)


@pytest.fixture
def catalogs(tmp_path: Path) -> Path:
    """Small catalogs where SkyPilot looks for its own, new enough not to be asked for again."""
    for name, rows in CATALOGS.items():
        folder = tmp_path / "home/.sky/catalogs/v8" / name
        folder.mkdir(parents=True)
        zones = "" if name == "lambda" else ",AvailabilityZone"  # Lambda has none
        (folder / "vms.csv").write_text("\n".join([COLUMNS + zones, *rows]) + "\n")
        (folder / "images.csv").write_text("Tag,Region,OS,OSVersion,ImageId,CreationDate\n")
    return tmp_path


def test_each_priced_region_is_an_offer_of_its_own(catalogs: Path) -> None:
    found = [*sky_script(catalogs, PRICED, "A100,A100-80GB"), *sky_script(catalogs, PRICED, "A100:8")]
    prices = {(offer["infra"], offer["accelerators"]): offer["hourly_usd"] for offer in found}
    assert prices == {
        ("lambda/us-east-1", "A100:1"): 1.29,
        ("lambda/europe-central-1", "A100:1"): 9.99,
        ("runpod/US", "A100-80GB:1"): 1.64,
        ("runpod/CA", "A100-80GB:1"): 1.70,
        ("aws/us-east-1", "A100:8"): 32.77,
        ("aws/eu-west-1", "A100:8"): 36.0,
        ("gcp/us-central1", "A100:1"): pytest.approx(3.83),
    }
    assert all(offer["autodown"] for offer in found)


def test_infra_narrows_the_places(catalogs: Path) -> None:
    assert {offer["infra"] for offer in sky_script(catalogs, PRICED, "A100", "lambda/us-east-1")} == {
        "lambda/us-east-1"
    }
    assert sky_script(catalogs, PRICED, "A100", "kubernetes") == [], "what is not enabled offers nothing"


ERRORS = (
    PRELUDE
    + """
from sky import exceptions as known
errors = {
    "quota": known.ResourcesUnavailableError(
        "\\x1b[31mFailed to acquire resources in all zones.\\x1b[0m\\nTask: ...",
        failover_history=[RuntimeError("us-east-1: quota is 0"), RuntimeError("eu-west-1: no capacity"), RuntimeError("eu-west-1: no capacity")],
    ),
    "clouds": known.NoCloudAccessError("none"),
    "version": known.APIVersionMismatchError("client 1 and server 2"),
    "server": known.ApiServerConnectionError("http://127.0.0.1:1"),
    "login": known.ApiServerAuthenticationError("http://127.0.0.1:1"),
    "network": ConnectionError("name resolution failed"),
    "other": RuntimeError(""),
}
shown = {name: sky_client.explained(error) for name, error in errors.items()}
print(json.dumps({name: [error.what, error.fix, int(error.code)] for name, error in shown.items()}))
"""
)


def test_errors_people_meet_are_one_sentence_and_what_to_do(tmp_path: Path) -> None:
    found = sky_script(tmp_path, ERRORS)
    what, fix, code = found["quota"]
    assert what.splitlines() == [
        "no machine was to be had: Failed to acquire resources in all zones.",
        "  us-east-1: quota is 0",
        "  eu-west-1: no capacity",
    ]
    assert (code, "quota" in fix) == (3, True)
    assert {name: code for name, (_, _, code) in found.items() if name != "quota"} == {
        "clouds": 3, "version": 1, "server": 1, "login": 1, "network": 1, "other": 1,
    }  # fmt: skip
    assert found["other"][0] == "the launch failed: RuntimeError"
    for what, fix, _ in found.values():
        assert fix
        assert "\x1b" not in what
