"""Where a bundle can run. A place starts a run's bundle, says what can be seen of it, and gives its files back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import BinaryIO

    from burst.run import Evidence, Run


class Place(Protocol):
    """One kind of machine. Every method takes the run, so that any later process can go on where one ended."""

    def start(self, run: Run) -> None:
        """Start the run's bundle and record the process. Raises ``BurstError`` where it cannot start."""

    def evidence(self, run: Run) -> Evidence:
        """What can be seen of the run now."""

    def stop(self, run: Run) -> None:
        """Ask the run to end, and end it if it does not. Returns when it is over."""

    def open(self, run: Run, path: str, offset_bytes: int) -> BinaryIO:
        """A file of the run's output folder from an offset on. Raises ``OSError``."""
