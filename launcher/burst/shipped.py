"""Data files that ship inside the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "data"


def read(name: str) -> Any:
    """A JSON file of ``burst/data``."""
    return json.loads((FOLDER / name).read_bytes())
