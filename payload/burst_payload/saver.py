"""When a checkpoint is due, and how it is taken: the policy between the training loop and the disk."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

from burst_payload import checkpoints, pulse, training_state
from burst_payload.checkpoints import DiskFull

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from burst_payload.training_state import Boundary

INTERVAL_S = 300.0
INTERVAL_SAVES = 150
"""Without ``save_steps`` a checkpoint is due every five minutes, and never so often that saving takes 1 in 150 seconds."""


class Saver:
    """Takes the checkpoints of one run.

    Args:
        output: the run's ``out``.
        bundle_id: goes into each checkpoint's seal.
        identity: what a checkpoint must have been made of to be gone on with.
        every_steps: ``train.save_steps``.
        emit: where events go.
    """

    def __init__(
        self,
        output: Path,
        bundle_id: str,
        identity: dict[str, Any],
        every_steps: int | None,
        emit: Callable[..., None],
    ) -> None:
        self.output = output
        self.bundle_id = bundle_id
        self.identity = identity
        self.every_steps = every_steps
        self.emit = emit
        self.keep: set[int] = set()
        """Steps whose checkpoints stay: the best one by evaluation."""
        self._saved_at = time.monotonic()
        self._save_s = 0.0

    def due(self, step: int, last_step: int) -> bool:
        """Whether to save after ``step``. The last step always: evaluation and sealing are still to come."""
        if step >= last_step:
            return True
        if self.every_steps is not None:
            return step % self.every_steps == 0
        return time.monotonic() - self._saved_at > max(INTERVAL_S, INTERVAL_SAVES * self._save_s)

    def save(self, trainer: Any, boundary: Boundary, progress: dict[str, Any]) -> bool:
        """Write and prove a checkpoint, then let older ones go. A full disk is said and is no reason to stop training."""
        pulse.beat(busy="checkpoint")
        started = time.monotonic()
        need = training_state.size_bytes(trainer)
        extra = {"identity": self.identity, "optim": str(trainer.args.optim.value), "progress": progress}
        try:
            folder = checkpoints.write(
                self.output,
                boundary.step,
                lambda target: training_state.write(target, trainer, boundary, extra),
                self.bundle_id,
                need,
            )
        except (DiskFull, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.emit("note", text=f"no checkpoint of step {boundary.step}: {error}; the one before it stands")
            return False
        finally:
            self._saved_at = time.monotonic()
            self._save_s = self._saved_at - started
        checkpoints.prune(self.output, self.keep)
        size = sum(path.stat().st_size for path in folder.iterdir())
        self.emit("checkpoint", step=boundary.step, size_bytes=size, seconds=round(self._save_s, 3))
        return True
