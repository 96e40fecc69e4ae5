"""JSON without its loopholes: no key twice, no NaN or Infinity. Standard library only."""

from __future__ import annotations

import json
from typing import Any, NoReturn


class DuplicateKeyError(ValueError):
    """A key stands twice in one object: readers would keep one of the two values without a word."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} stands twice in one object")
        self.key = key


def loads(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ``ValueError``, also for what only nests too deep."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKeyError(key)
            seen.add(key)
    return result


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
