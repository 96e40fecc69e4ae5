"""How the payload ends early: one exception for what a person can fix, and the exit codes. Standard library only."""

from __future__ import annotations

from enum import IntEnum


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


class Interrupted(Exception):
    """A signal asked the run to end."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, short enough for one screen line."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
