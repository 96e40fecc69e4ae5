"""How long the rows of a spec are, in tokens: counted as training counts them, or, of much data, from a sample.

Counting 200 MB takes most of a minute, a plan a second: above ``EXACT_BYTES`` every row is read, but only the longest ones
and a random sample are tokenized. Without the model's tokenizer, tokens are estimated from characters.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from burst import check, dataset, models
from burst.errors import BurstError, InvalidInput
from burst.waiting import within
from burst_payload import chat, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from burst.dataset import DataRow
    from burst.spec import Spec

EXACT_BYTES = 4_000_000
LONGEST_ROWS, SAMPLE_ROWS = 48, 300
CHARACTERS_PER_TOKEN = 3.0
"""For planning without the tokenizer; English prose has about four, so this errs upwards."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a spec's rows, after cutting. ``squared``: the sum of squares over an epoch; ``scored`` an epoch's too."""

    longest: int
    longest_scored: int
    tokens: int
    squared: int
    rows: int
    scored: int
    eval_tokens: int


def measure(spec: Spec, folder: Path, unknown: list[str], limit_s: float) -> Lengths:
    """The lengths of a spec's rows; what could not be counted is added to ``unknown``.

    Raises ``InvalidInput`` where the data cannot be trained on.
    """
    try:
        within(limit_s, lambda: models.resolve(spec, folder))
    except TimeoutError:
        unknown.append(f"the tokenizer of {spec.model}: the hub does not answer; lengths are estimated from characters")
        return _estimated(spec, folder, None, unknown)
    except InvalidInput:
        raise
    except BurstError as error:
        unknown.append(f"{error.what}; lengths are estimated from characters")
        return _estimated(spec, folder, None, unknown)
    if _size(spec, folder) > EXACT_BYTES:
        return _estimated(spec, folder, _renderer(spec, folder), unknown)
    return _counted(spec, folder)


def _counted(spec: Spec, folder: Path) -> Lengths:
    report = check.check(spec, folder)
    if not report.tokenized or not report.ok:
        problems = [issue for issue in report.issues.shown if issue.blocks]
        raise InvalidInput(
            f"the data cannot be trained on: {problems[0].where}: {problems[0].what}" if problems else "no row is left",
            "see everything with: burst check",
        )
    train, evaluation = report.train, report.evaluation
    share = train.weighted_tokens / max(1, train.lengths.total)
    longest = max(part.lengths.summary()["max"] for part in (train, evaluation) if part.rows)
    return Lengths(
        longest=longest,
        longest_scored=longest,
        tokens=train.weighted_tokens,
        squared=int(train.lengths.squares * share),
        rows=train.weighted_rows,
        scored=int(train.scored_tokens * share),
        eval_tokens=evaluation.lengths.total,
    )


@dataclass
class _Sample:
    """The longest rows and a random few, and the size of every row by itself."""

    sizes: list[tuple[int, int]] = field(default_factory=list)
    eval_bytes: int = 0
    longest: list[tuple[int, int, DataRow]] = field(default_factory=list)
    some: list[DataRow] = field(default_factory=list)
    seen: int = 0

    def add(self, row: DataRow, chance: random.Random) -> None:
        size = len(row.content)
        if row.file.split == "eval":
            self.eval_bytes += size
        else:
            self.sizes.append((size, row.file.repeat))
        self.seen += 1
        push = heapq.heappush if len(self.longest) < LONGEST_ROWS else heapq.heappushpop
        push(self.longest, (size, self.seen, row))
        if len(self.some) < SAMPLE_ROWS:
            self.some.append(row)
        elif (place := chance.randrange(self.seen)) < SAMPLE_ROWS:
            self.some[place] = row


def _estimated(spec: Spec, folder: Path, renderer: chat.Renderer | None, unknown: list[str]) -> Lengths:
    sample, chance = _Sample(), random.Random(spec.train.seed)
    for row in _rows(spec, folder):
        sample.add(row, chance)
    if not sample.sizes:
        raise InvalidInput("no row is left to train on", "see everything with: burst check")
    per_byte, scored_share = 1 / CHARACTERS_PER_TOKEN, 0.5
    longest = max(size for size, _ in sample.sizes) / CHARACTERS_PER_TOKEN
    if renderer is not None:
        encoded = [(len(row.content), renderer.encode(row.row)[0]) for row in sample.some]
        usable = [(size, example) for size, example in encoded if example is not None]
        if not usable:
            raise InvalidInput("no row of a sample can be trained on", "see everything with: burst check")
        counted = sum(len(example.input_ids) for _, example in usable)
        per_byte = counted / sum(size for size, _ in usable)
        scored_share = sum(label != chat.IGNORED_LABEL for _, e in usable for label in e.labels) / counted
        longest = max(
            (len(e.input_ids) for _, _, row in sample.longest if (e := renderer.encode(row.row)[0]) is not None),
            default=int(longest),
        )
        unknown.append(
            f"{len(usable):,} of {sample.seen:,} rows were counted, and the {len(sample.longest)} longest: lengths are close, not exact"
        )
    cut, kept = spec.data.max_length, 1.0 - (spec.data.eval_split or 0.0)
    lengths = [(min(cut, size * per_byte), repeat) for size, repeat in sample.sizes]
    total = sum(length * repeat for length, repeat in lengths)
    rows = sum(repeat for _, repeat in lengths)
    return Lengths(
        longest=max(1, min(cut, int(longest))),
        longest_scored=max(1, min(cut, int(longest))),
        tokens=max(1, int(total * kept)),
        squared=max(1, int(sum(length * length * repeat for length, repeat in lengths) * kept)),
        rows=max(1, round(rows * kept)),
        scored=int(total * kept * scored_share),
        eval_tokens=int(sample.eval_bytes * per_byte + total * (1 - kept)),
    )


def _rows(spec: Spec, folder: Path) -> Iterator[DataRow]:
    wanted = [(source.path, "train", source.repeat) for source in spec.data.training_sources]
    wanted += [(spec.data.eval, "eval", 1)] if spec.data.eval else []
    for name, part, repeat in wanted:
        file = dataset.locate(folder, name, part, repeat)
        yield from dataset.read(file, spec.data.format, dataset.FileFacts(None), lambda *_: None)


def _size(spec: Spec, folder: Path) -> int:
    names = [source.path for source in spec.data.training_sources] + ([spec.data.eval] if spec.data.eval else [])
    return sum(dataset.locate(folder, name, "train").path.stat().st_size for name in names)


def _renderer(spec: Spec, folder: Path) -> chat.Renderer:
    try:
        facts = tokens.load(models.resolve(spec, folder).folder)
        template = check.template_source(spec, folder, facts)
        return chat.Renderer(facts, template, spec.data.score, spec.data.chat_template_kwargs)
    except (tokens.TokenizerError, chat.TemplateRefusal) as error:
        raise InvalidInput(f"model {spec.model}: {error}", "fix the model's tokenizer files") from error
