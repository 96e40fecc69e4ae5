"""Which base model a folder holds, told from its small files. Needs no library."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from burst_payload import records
from burst_payload.tokens import TOKENIZER_FILES

if TYPE_CHECKING:
    from pathlib import Path


def fingerprint(folder: Path) -> str:
    """One sha256 over what of a model folder shapes rows and architecture: config, tokenizer, chat template, stops."""
    digest = hashlib.sha256()
    for name in sorted(TOKENIZER_FILES):
        path = folder / name
        digest.update(f"{name}\0{records.sha256_file(path) if path.is_file() else ''}\n".encode())
    return digest.hexdigest()
