"""Every test has its own home and cache; the payload's interpreter is found once, before that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "burst", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150
)
settings.load_profile("burst")


@pytest.fixture(scope="session")
def payload_python() -> str:
    """The interpreter that trains: ``BURST_PYTHON``, or the cached environment, built if it is not there."""
    if python := os.environ.get("BURST_PYTHON"):
        return python
    result = subprocess.run(
        [sys.executable, "-m", "burst.cli", "env", "--quiet"], text=True, capture_output=True, check=True
    )
    return result.stdout.strip()


@pytest.fixture(scope="session")
def payload_cache() -> Path:
    """The real cache folder, for what is too large to make in every test."""
    from burst import paths

    return paths.models_cache()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_HOME", str(tmp_path / "burst-home"))
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "burst-cache"))
