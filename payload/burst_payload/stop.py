"""How the payload ends early: one exception for what a person can fix, and the exit codes. Standard library only."""

from __future__ import annotations

import contextlib
import signal
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


class ExitCode(IntEnum):
    """The exit codes of ``train.py``; the same numbers mean the same thing for ``burst``."""

    SEALED = 0
    FAILED = 1
    INVALID = 2
    NOTHING_FITS = 3
    VERIFICATION = 4
    INTERRUPTED = 130


class Stop(Exception):
    """The run cannot go on, for a reason that a person can act on.

    Args:
        what: what is wrong, one sentence.
        fix: what to do about it.
        code: how the process ends.
    """

    def __init__(self, what: str, fix: str = "", code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix
        self.code = code


class Interrupted(BaseException):
    """A signal asked the run to end. Not an ``Exception``: libraries catch those and give them another name."""


_asked = 0
_deferred = False


def listen() -> None:
    """From now on SIGTERM and SIGINT raise ``Interrupted``, wherever the main thread is; see ``deferred``."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: Any) -> None:
    global _asked  # noqa: PLW0603 - a process has one set of signal handlers
    _asked += 1
    if not _deferred or _asked > 1:
        raise Interrupted


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Inside, the first signal only leaves word for ``check``: weights are never left half moved. The second one raises."""
    global _deferred  # noqa: PLW0603
    check()
    _deferred = True
    try:
        yield
    finally:
        _deferred = False


def ignore() -> None:
    """Let the end be written down in peace."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def was_asked() -> bool:
    """Whether a signal came, whatever became of the exception."""
    return _asked > 0


def at_once() -> bool:
    """Whether a second signal said not to wait for anything."""
    return _asked > 1


def check() -> None:
    """Raise ``Interrupted`` where a signal came: deferred, or its exception was lost, as in a destructor or a C callback."""
    if _asked:
        raise Interrupted


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, short enough for one screen line."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
