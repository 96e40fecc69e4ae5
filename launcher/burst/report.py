"""What ``burst check`` found: problems with their places, and what each split holds. Data only; ``screens`` shows it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from burst import split
from burst.dedupe import Duplicates

if TYPE_CHECKING:
    from burst.dataset import DataFile, FileFacts
    from burst.dedupe import Place
    from burst_payload.rows import Problem

EXAMPLES_PER_KIND = 5


@dataclass(frozen=True)
class Issue:
    """A problem at ``file:line`` (line 0: the whole file)."""

    kind: str
    file: str
    line: int
    what: str
    fix: str

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def blocks(self) -> bool:
        return not self.kind.startswith("note-")


class Issues:
    """All problems: counts of every kind, and the first few of each in full."""

    def __init__(self, keep: int | None = EXAMPLES_PER_KIND) -> None:
        self.counts: Counter[str] = Counter()
        self.shown: list[Issue] = []
        self._keep = keep

    def add(self, file: str, line: int, problem: Problem) -> None:
        self.counts[problem.kind] += 1
        if self._keep is None or self.counts[problem.kind] <= self._keep:
            self.shown.append(Issue(problem.kind, file, line, problem.what, problem.fix))

    @property
    def blocking(self) -> int:
        return sum(count for kind, count in self.counts.items() if not kind.startswith("note-"))


class Lengths:
    """A histogram of row lengths in tokens: exact quantiles, memory bounded by the number of different lengths."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.total = 0

    def add(self, length: int) -> None:
        self._counts[length] += 1
        self.total += length

    @property
    def rows(self) -> int:
        return self._counts.total()

    @property
    def squares(self) -> int:
        """Sum of the squared lengths, which attention's work grows with."""
        return sum(length * length * count for length, count in self._counts.items())

    def quantile(self, share: float) -> int:
        """The smallest length that at least ``share`` of the rows do not exceed."""
        rank = max(1, math.ceil(share * self.rows))
        for length in sorted(self._counts):
            rank -= self._counts[length]
            if rank <= 0:
                return length
        return 0

    def summary(self) -> dict[str, int]:
        return {
            "min": self.quantile(0),
            "median": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": self.quantile(1),
        }


@dataclass
class SplitReport:
    """What one split (train or eval) holds, before repeats."""

    rows: int = 0
    weighted_rows: int = 0
    lengths: Lengths = field(default_factory=Lengths)
    scored_tokens: int = 0
    weighted_tokens: int = 0
    overlong: int = 0
    longest: tuple[str, int] = ("", 0)


@dataclass
class Report:
    """The result of a check. ``tokenized`` is False where the model's tokenizer could not be had."""

    model: str
    max_length: int
    on_overlong: str
    issues: Issues
    files: list[tuple[DataFile, FileFacts]] = field(default_factory=list)
    train: SplitReport = field(default_factory=SplitReport)
    evaluation: SplitReport = field(default_factory=SplitReport)
    duplicates: Duplicates = field(default_factory=Duplicates)
    tokenized: bool = False
    rendering: str = ""
    turn_end: str | None = None
    sample: str = ""
    held_out: int = split.NOTHING
    """The rank (``split.rank``) up to which ``data.eval_split`` holds rows out."""

    @property
    def ok(self) -> bool:
        return self.issues.blocking == 0 and self.train.rows > 0

    def place(self, place: Place) -> str:
        return f"{self.files[place.file][0].name}:{place.line}"

    def to_json(self) -> dict[str, Any]:
        def split(part: SplitReport) -> dict[str, Any]:
            return {
                "rows": part.rows,
                "rows_per_epoch": part.weighted_rows,
                "tokens": part.lengths.total,
                "tokens_per_epoch": part.weighted_tokens,
                "scored_tokens": part.scored_tokens,
                "lengths": part.lengths.summary() if part.lengths.rows else None,
                "overlong_rows": part.overlong,
            }

        return {
            "ok": self.ok,
            "model": self.model,
            "max_length": self.max_length,
            "on_overlong": self.on_overlong,
            "files": [
                {
                    "path": f.name,
                    "split": f.split,
                    "format": x.format,
                    "rows": x.rows,
                    "repeat": f.repeat,
                    "ignored_columns": x.ignored_columns,
                }
                for f, x in self.files
            ],
            "train": split(self.train),
            "eval": split(self.evaluation),
            "tokenized": self.tokenized,
            "rendering": self.rendering,
            "end_of_turn": self.turn_end,
            "duplicate_rows": self.duplicates.repeated,
            "rows_in_train_and_eval": self.duplicates.leaked,
            "scored_sample": self.sample,
            "problems": [
                {"kind": i.kind, "where": i.where, "what": i.what, "fix": i.fix, "blocks": i.blocks}
                for i in self.issues.shown
            ],
            "problem_counts": dict(self.issues.counts),
        }
