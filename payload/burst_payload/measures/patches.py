"""Changes to live objects that can be taken back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_ABSENT = object()


class NotHere(Exception):
    """A measure finds, with the model before it, that it does not apply. The text says why."""


@dataclass
class Patches:
    """Attributes set on objects, in order; ``undo`` puts the former ones back, the last first."""

    detail: str = ""
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute on this object alone, so that its class and other objects stay as they are."""
        former = vars(owner).get(name, _ABSENT)

        def back() -> None:
            if former is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, former)

        setattr(owner, name, value)
        self._undo.append(back)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
