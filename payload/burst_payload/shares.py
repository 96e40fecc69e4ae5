"""Rows shared among processes: every optimizer step sees the rows that it would see with one process.

accelerate deals out whole batches in turn, and fills the last round with rows from the beginning, which would then count twice.
Here the last round is filled with a blank row, of which nothing is scored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Sampler, SequentialSampler

from burst_payload.chat import IGNORED_LABEL, Example

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def blank(examples: Sequence[Example]) -> Example:
    """A row like the shortest one, with nothing scored."""
    ids = min((example.input_ids for example in examples), key=len)
    return Example(ids, [IGNORED_LABEL] * len(ids))


class Filled(Sampler[int]):
    """The order of ``rows`` rows, filled with row number ``rows`` (the blank one) to a multiple of ``round_rows``.

    With a ``seed`` the order is the one that accelerate gives a single process, epoch by epoch; without, that of the file.
    """

    def __init__(self, rows: int, round_rows: int, seed: int | None = None) -> None:
        self.rows = rows
        self.fill = -rows % round_rows
        numbers = range(rows)
        self.order = SequentialSampler(numbers) if seed is None else SeedableRandomSampler(numbers, data_seed=seed)

    def __iter__(self) -> Iterator[int]:
        yield from self.order
        yield from [self.rows] * self.fill

    def __len__(self) -> int:
        return self.rows + self.fill

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.order, SeedableRandomSampler):
            self.order.set_epoch(epoch)
