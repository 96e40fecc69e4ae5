"""What can end a command, for people.

    BurstError                something a person can fix: what, and what to do
    ├── InvalidInput          spec, data or usage (exit code 2)
    ├── NothingFits           no place can run this (exit code 3)
    └── VerificationFailed    files are not what they should be (exit code 4)

Anything else that reaches the top is a bug and shows its traceback.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    INVALID = 2
    NOTHING_FITS = 3
    VERIFICATION = 4
    INTERRUPTED = 130


class BurstError(Exception):
    """A problem that the user can act on.

    Args:
        what: what is wrong, and where; several lines where there are several problems.
        fix: what to do about it, or the command that helps.
    """

    code = ExitCode.FAILED

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.fix = fix


class InvalidInput(BurstError):
    code = ExitCode.INVALID


class NothingFits(BurstError):
    code = ExitCode.NOTHING_FITS


class VerificationFailed(BurstError):
    code = ExitCode.VERIFICATION
