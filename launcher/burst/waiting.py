"""Waiting for something that may never answer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of ``call``, or ``TimeoutError``: a thread that hangs in the network is left behind."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((True, call()))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not box:
        raise TimeoutError
    good, value = box[0]
    if not good:
        raise value
    result: T = value
    return result
