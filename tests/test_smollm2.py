"""A real model learns: SmolLM2-135M answers held-out requests exactly right more often, from the fetched adapter."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from burst_payload import seal
from jobs import burst

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def evaluate(python: str, folder: Path, *arguments: str) -> dict:
    command = [python, str(EXAMPLES / "evaluate.py"), "smollm2-135m", "--data", "heldout.jsonl", "--json", *arguments]
    result = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.payload
@pytest.mark.slow
def test_a_real_model_learns(tmp_path: Path, payload_python: str, payload_cache: Path) -> None:
    folder = tmp_path / "smollm2"
    shutil.copytree(EXAMPLES / "smollm2", folder, ignore=shutil.ignore_patterns("smollm2-135m", "adapters"))
    model = payload_cache / "smollm2-135m"
    subprocess.run([payload_python, str(folder / "prepare.py"), str(model)], check=True, env={**os.environ})
    (folder / "smollm2-135m").symlink_to(model)

    burst("train", "--name", "smol", cwd=folder, BURST_PYTHON=payload_python)
    home = folder / "adapters/smol"
    seal.verify_seal(home)
    before = evaluate(payload_python, folder)
    after = evaluate(payload_python, folder, "--adapter", str(home))
    print(f"exactly right before: {before['right']} of {before['rows']}, after: {after['right']} of {after['rows']}")
    assert after["right"] > before["right"]
    assert after["right"] >= after["rows"] // 2
