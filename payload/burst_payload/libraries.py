"""Which pinned libraries are installed here. Standard library only; imports none of them.

Run as a script it answers for the interpreter that runs it, as JSON: ``python libraries.py requirements.lock``.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path

CORE = (
    "torch",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "bitsandbytes",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "jinja2",
    "datasets",
)
"""The libraries that shape the result. Their own dependencies may differ without harm."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)\s*(?:;\s*([^#]*))?")


def pins(lock: Path) -> dict[str, str]:
    """Pinned version by normalized name, for the core libraries of a lock file that apply to this system."""
    found = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        match = _PIN.match(line.strip())
        if match and normalized(match[1]) in CORE and not _excluded(match[3]):
            found[normalized(match[1])] = match[2]
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> str | None:
    """The installed version without its local part (``2.13.0+cpu`` is ``2.13.0``), or None."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def differences(lock: Path) -> list[tuple[str, str, str | None]]:
    """``(name, pinned, installed)`` wherever the two differ."""
    return [(name, wanted, found) for name, wanted in pins(lock).items() if (found := installed(name)) != wanted]


def missing(lock: Path) -> list[str]:
    return [name for name, _, found in differences(lock) if found is None]


def _excluded(marker: str | None) -> bool:
    """The one marker that the direct pins use; the rest of a lock's markers concern its indirect ones."""
    return bool(marker and "sys_platform != 'darwin'" in marker.replace('"', "'") and sys.platform == "darwin")


if __name__ == "__main__":
    json.dump({"python": list(sys.version_info[:3]), "differences": differences(Path(sys.argv[1]))}, sys.stdout)
