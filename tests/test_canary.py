"""What is found on a rented machine in its first cents."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from burst import paths
from jobs import burst, write_job

sys.path.insert(0, str(paths.payload()))
import canary  # noqa: E402

A100, H100, V100 = (8, 0), (9, 0), (7, 0)


@pytest.mark.parametrize(
    ("found", "promised", "count", "kernels", "said"),
    [
        ([A100], (8, 0), 1, ["sm_80", "sm_90"], []),
        ([(8, 9)], (8, 0), 1, ["sm_80", "sm_90"], []),
        ([A100], (9, 0), 1, ["sm_80"], ["compute capability 8.0, 9.0 was promised"]),
        ([A100], (8, 0), 4, ["sm_80"], ["1 GPUs are there, 4 were asked for"]),
        ([V100], (7, 0), 1, ["sm_75", "sm_80"], ["no kernels for compute capability 7.0, only sm_75, sm_80"]),
        ([H100], (9, 0), 1, ["sm_80", "compute_80"], []),
        ([A100], (8, 0), 1, ["sm_86", "sm_90a", "compute_90"], ["no kernels"]),
        ([V100, A100], (8, 0), 3, ["sm_80"], ["2 GPUs", "7.0, 8.0 was", "no kernels for compute capability 7.0"]),
    ],
)
def test_what_was_promised(found: list, promised: tuple, count: int, kernels: list, said: list[str]) -> None:
    problems = canary.promise_problems(found, promised, count, kernels)
    assert len(problems) == len(said)
    for (what, fix), part in zip(problems, said, strict=True):
        assert part in what
        assert fix


def test_the_disk_holds_model_and_run() -> None:
    assert canary.disk_problems(60_000_000_000, 70_000_000_000) == []
    what, _ = canary.disk_problems(60_000_000_000, 60_000_000_000)[0]
    assert what == "60.0 GB of disk are free, the model and the run need 65.4 GB"


NF4 = """
import sys; sys.path.insert(0, sys.argv[1])
import canary
from bitsandbytes import functional
print(canary.nf4_problems("cpu"))
right = functional.dequantize_4bit
functional.dequantize_4bit = lambda *arguments: right(*arguments) * 1.1
print(canary.nf4_problems("cpu"))
"""


@pytest.mark.payload
def test_wrong_4_bit_arithmetic_is_seen(payload_python: str) -> None:
    done = subprocess.run(
        [payload_python, "-c", NF4, str(paths.payload())], text=True, capture_output=True, check=False
    )
    right, wrong = done.stdout.splitlines()
    assert right == "[]", done.stderr
    assert "4-bit arithmetic is wrong on this machine: relative error 0.09" in wrong


class Hub(BaseHTTPRequestHandler):
    """Stands in for the hub, which cannot be reached here: one open model, one gated, by the hub's own error codes."""

    def do_GET(self) -> None:
        allowed = self.headers.get("authorization") == "Bearer hf_good"
        if "/gated/" in self.path and not allowed:
            self._answer(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif "/lost/" in self.path:
            self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
        else:
            siblings = [{"rfilename": "model.safetensors", "size": 10**15}, {"rfilename": "config.json", "size": 5}]
            self._answer(200, {"id": "open/model", "siblings": siblings})

    def _answer(self, code: int, value: dict, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        for name, item in {
            **(headers or {}),
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
        }.items():
            self.send_header(name, item)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import sys; sys.path.insert(0, sys.argv[1])
import canary
from burst_payload.config import Model
class Config: model = Model(sys.argv[2], "hub", "main")
print(canary.hub_problems(Config))
"""


@pytest.mark.parametrize(
    ("model", "token", "said"),
    [
        ("gated/model", "hf_bad", "gated/model is gated and this token has no access"),
        ("gated/model", "hf_good", "GB of disk are free, the model and the run need 1000005.4 GB"),
        ("open/model", "hf_bad", "GB of disk are free"),
        ("lost/model", "hf_good", "not on the hub, or it is private"),
    ],
)
def test_the_hub_is_asked_before_the_download(hub: str, model: str, token: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(paths.payload()), model],
        env={"HF_ENDPOINT": hub, "HF_TOKEN": token, "HOME": "/nowhere"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert said in done.stdout, done.stderr
    assert token not in done.stdout + done.stderr


@pytest.mark.payload
def test_a_machine_without_a_gpu_fails_in_its_set_up_with_the_reason(tmp_path: Path, payload_python: str) -> None:
    write_job(tmp_path)
    burst("bundle", "-o", "bundle", cwd=tmp_path)
    done = subprocess.run(
        [payload_python, "canary.py"], cwd=tmp_path / "bundle", text=True, capture_output=True, check=False,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 3
    status = json.loads((tmp_path / "bundle/out/status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert status["error"].startswith("no GPU can be used: ")
    assert status["error"] in done.stderr
