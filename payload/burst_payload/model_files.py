"""Which base model a folder holds, told from its small files. Standard library only."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def fingerprint(folder: Path) -> str:
    """One sha256 over a model folder's config and tokenizer: cheap to compute, and it names the architecture."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"\0")
    return digest.hexdigest()
