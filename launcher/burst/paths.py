"""Where burst keeps things, and where its own data files are."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def home() -> Path:
    """Runs and settings: ``BURST_HOME``, else the platform's data folder."""
    return Path(os.environ.get("BURST_HOME") or platformdirs.user_data_path("burst", appauthor=False)).absolute()


def runs() -> Path:
    return home() / "runs"


def cache() -> Path:
    """What can be made again: environments, built-in models. ``BURST_CACHE``, else the platform's cache folder."""
    return Path(os.environ.get("BURST_CACHE") or platformdirs.user_cache_path("burst", appauthor=False)).absolute()


def models_cache() -> Path:
    return cache() / "models"


def payload() -> Path:
    """The folder with ``train.py`` and its lock: inside the installed package, or ``payload/`` of a checkout."""
    return _shipped("payload")


def sky_templates() -> Path:
    return _shipped("sky")


def _shipped(name: str) -> Path:
    package = Path(__file__).resolve().parent
    installed = package / "share" / name
    return installed if installed.is_dir() else package.parents[1] / name


def payload_package() -> Path:
    """The folder of the ``burst_payload`` package."""
    import burst_payload

    return Path(burst_payload.__file__).resolve().parent


def short(path: Path) -> str:
    """``path`` for people: relative to here where that is shorter, with ``~`` for the home folder."""
    try:
        return str(path.relative_to(Path.cwd())) or "."
    except ValueError:
        pass
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)
