"""Small jobs and ways to run them, shared by the tests that start the payload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from burst_payload import manifest

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


def copy_bundle(made: Path, target: Path) -> Path:
    """A bundle again, without what was trained in it."""
    shutil.copytree(made, target, ignore=shutil.ignore_patterns("out", "__pycache__"))
    return target


def remake_manifest(bundle: Path) -> None:
    """Make the manifest true again after a test changed a file on purpose."""
    path = bundle / manifest.MANIFEST_NAME
    names = [item["path"] for item in json.loads(path.read_text())["files"]]
    entries = [manifest.Entry(n, (bundle / n).stat().st_size, manifest.sha256_file(bundle / n)) for n in names]
    path.write_text(json.dumps(manifest.to_json(entries)))


def change_run(bundle: Path, section: str, **values: object) -> None:
    run = json.loads((bundle / "run.json").read_text())
    run[section] |= values
    (bundle / "run.json").write_text(json.dumps(run))
    remake_manifest(bundle)
