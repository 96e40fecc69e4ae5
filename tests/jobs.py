"""Small jobs and ways to run them, shared by the tests that start the payload."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MINI_SPEC = """\
model: builtin:tiny
data: {train: rows.jsonl, max_length: 256}
adapter: {rank: 4}
train: {max_steps: 2, batch: 2, effective_batch: 4, warmup_steps: 0}
probes: {rows: 1, max_new_tokens: 4}
"""


def write_job(folder: Path, spec: str = MINI_SPEC, rows: int = 12) -> Path:
    """A spec with its data in ``folder``; returns the spec's path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": f"say {number}", "completion": f"{number}!"}) for number in range(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "burst.yaml").write_text(spec)
    return folder / "burst.yaml"


def burst(*arguments: str, cwd: Path, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in its own process."""
    result = subprocess.run(
        [sys.executable, "-m", "burst.cli", *arguments],
        cwd=cwd,
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert not check or result.returncode == 0, result.stdout + result.stderr
    return result


def run_payload(bundle: Path, python: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a bundle as someone without burst does: only the interpreter, the folder, and a clean environment."""
    clean = {
        key: os.environ[key] for key in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "BURST_CACHE") if key in os.environ
    }
    return subprocess.run(
        [python, "train.py", *arguments],
        cwd=bundle,
        text=True,
        capture_output=True,
        check=False,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
    )


def events(bundle: Path) -> list[dict]:
    return [json.loads(line) for line in (bundle / "out/events.jsonl").read_bytes().splitlines()]
