"""``burst check``: can this data be trained on, and what is in it. Needs neither torch nor a GPU.

Reads every row as training will, renders it with the model's chat template, counts with the model's tokenizer, and
reports everything that is wrong at once.
"""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from burst import dataset, models
from burst.dedupe import Duplicates, Finder, Place
from burst.errors import BurstError, InvalidInput
from burst_payload import chat, tokens
from burst_payload.rows import Problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from burst.dataset import DataFile, DataRow, FileFacts
    from burst.spec import Spec

EXAMPLES_PER_KIND = 5
BATCH_CHARACTERS = 400_000
"""Text tokenized in one call: large enough to use all cores, small enough to hold two of them."""


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


def check(
    spec: Spec, folder: Path, *, every_problem: bool = False, progress: Callable[[int], None] | None = None
) -> Report:
    """Check the data of a spec whose paths are relative to ``folder``. ``progress`` is told the bytes read so far."""
    issues = Issues(None if every_problem else EXAMPLES_PER_KIND)
    report = Report(spec.model, spec.data.max_length, spec.data.on_overlong, issues)
    renderer = _renderer(spec, folder, report)
    counter = _Counter(report, renderer)
    finder = Finder()
    for index, file in enumerate(_locate(spec, folder, issues)):
        facts = dataset.FileFacts(None)
        report.files.append((file, facts))
        _check_file(file, index, facts, spec, issues, counter, finder, progress)
    counter.finish()
    report.duplicates = finder.finish()
    _conclude(report)
    return report


def data_files(spec: Spec, folder: Path) -> list[DataFile]:
    """The data files of a spec. Raises ``InvalidInput`` for the first that cannot be used."""
    files = [dataset.locate(folder, source.path, "train", source.repeat) for source in spec.data.training_sources]
    return files + ([dataset.locate(folder, spec.data.eval, "eval")] if spec.data.eval is not None else [])


def template_source(spec: Spec, folder: Path, facts: tokens.TokenizerFacts) -> str | None:
    """The chat template that a spec asks for; None is raw text. Raises ``InvalidInput``."""
    if spec.data.chat_template == "none":
        return None
    if spec.data.chat_template == "model":
        return facts.chat_template
    path = dataset.locate(folder, spec.data.chat_template, "template").path
    return path.read_text(encoding="utf-8")


def _locate(spec: Spec, folder: Path, issues: Issues) -> list[DataFile]:
    """The files that can be read; the others are problems."""
    found = []
    wanted = [(source.path, "train", source.repeat) for source in spec.data.training_sources]
    if spec.data.eval is not None:
        wanted.append((spec.data.eval, "eval", 1))
    for name, split, repeat in wanted:
        try:
            found.append(dataset.locate(folder, name, split, repeat))
        except InvalidInput as error:
            issues.add(name, 0, Problem("no-file", error.what, error.fix))
    return found


def _renderer(spec: Spec, folder: Path, report: Report) -> chat.Renderer | None:
    try:
        facts = tokens.load(models.resolve(spec, folder).folder)
        template = template_source(spec, folder, facts)
        renderer = chat.Renderer(facts, template, spec.data.score, spec.data.chat_template_kwargs)
    except BurstError as error:
        report.issues.add(f"model {spec.model}", 0, Problem("model", error.what, error.fix))
        return None
    except (tokens.TokenizerError, chat.TemplateRefusal) as error:
        report.issues.add(f"model {spec.model}", 0, Problem("tokenizer", str(error), "fix the model's tokenizer files"))
        return None
    report.tokenized = True
    report.turn_end = renderer.turn_end
    report.rendering = "the model's chat template" if spec.data.chat_template == "model" else spec.data.chat_template
    if template is None:
        report.rendering = "raw text, no chat template"
    if renderer.turn_end is not None and facts.special[renderer.turn_end] not in facts.eos_ids:
        report.issues.add(
            f"model {spec.model}",
            0,
            Problem(
                "note-stop",
                f"answers end with {renderer.turn_end!r}, which the model's generation config does not stop at",
                f"serve the adapter with {renderer.turn_end!r} as a stop token",
            ),
        )
    return renderer


def _check_file(
    file: DataFile,
    index: int,
    facts: FileFacts,
    spec: Spec,
    issues: Issues,
    counter: _Counter,
    finder: Finder,
    progress: Callable[[int], None] | None,
) -> None:
    def report(source: DataFile, line: int, problem: Problem) -> None:
        issues.add(source.name, line, problem)

    evaluation = file.split == "eval"
    for number, row in enumerate(dataset.read(file, spec.data.format, facts, report), 1):
        content = orjson.dumps(row.row)
        finder.add(content, Place(index, row.number), evaluation)
        counter.add(row)
        if progress is not None and number % 1000 == 0:
            progress(len(content) * 1000)
    for column, count in facts.ignored_columns.items():
        issues.add(
            file.name,
            0,
            Problem("note-column", f"the column {column!r} ({count:,} rows) is not used", "no need to act"),
        )


def _conclude(report: Report) -> None:
    """Problems that only the whole data can show."""
    if report.train.rows == 0 and report.issues.blocking == 0:
        report.issues.add(
            "data", 0, Problem("no-rows", "no row is left to train on", "add rows, or raise data.max_length")
        )
    for row, other in report.duplicates.repeated_examples[:EXAMPLES_PER_KIND]:
        report.issues.add(
            report.files[row.file][0].name,
            row.line,
            Problem(
                "note-duplicate",
                f"equals {report.place(other)}",
                "remove it, or use sources with repeat if it is meant",
            ),
        )
    for row, other in report.duplicates.leaked_examples[:EXAMPLES_PER_KIND]:
        report.issues.add(
            report.files[row.file][0].name,
            row.line,
            Problem("note-leak", f"also stands in train at {report.place(other)}", "remove it from one of them"),
        )
    report.issues.counts["note-duplicate"] = report.duplicates.repeated
    report.issues.counts["note-leak"] = report.duplicates.leaked
    report.issues.counts = +report.issues.counts


class _Counter:
    """Renders rows and counts their tokens; tokenizing runs beside reading, in one worker that releases the GIL."""

    def __init__(self, report: Report, renderer: chat.Renderer | None) -> None:
        self.report = report
        self.renderer = renderer
        self._batch: list[tuple[DataRow, chat.Rendered]] = []
        self._characters = 0
        self._pool = ThreadPoolExecutor(1)
        self._pending: list[tuple[list[tuple[DataRow, chat.Rendered]], Future[list[Any]]]] = []

    def add(self, row: DataRow) -> None:
        if self.renderer is None:
            split = self._split(row)
            split.rows += 1
            split.weighted_rows += row.file.repeat
            return
        rendered, problems = self.renderer.render(row.row)
        for problem in problems:
            self.report.issues.add(row.file.name, row.number, problem)
        if rendered is None:
            return
        if self._batch and self._batch[0][1].add_special_tokens != rendered.add_special_tokens:
            self._submit()
        self._batch.append((row, rendered))
        self._characters += len(rendered.text)
        if self._characters >= BATCH_CHARACTERS:
            self._submit()

    def finish(self) -> None:
        self._submit()
        while self._pending:
            self._collect()
        self._pool.shutdown()

    def _submit(self) -> None:
        if self._batch:
            self._pending.append((self._batch, self._pool.submit(self._encode, self._batch)))
            self._batch, self._characters = [], 0
        if len(self._pending) > 1:
            self._collect()

    def _encode(self, batch: list[tuple[DataRow, chat.Rendered]]) -> list[Any]:
        assert self.renderer is not None
        encodings: list[Any] = self.renderer.facts.tokenizer.encode_batch(
            [rendered.text for _, rendered in batch], add_special_tokens=batch[0][1].add_special_tokens
        )
        return encodings

    def _collect(self) -> None:
        batch, future = self._pending.pop(0)
        for (row, rendered), encoding in zip(batch, future.result(), strict=True):
            self._count(row, rendered, encoding)

    def _count(self, row: DataRow, rendered: chat.Rendered, encoding: Any) -> None:
        renderer = self.renderer
        assert renderer is not None
        ids = encoding.ids
        slices = chat.scored_slices(encoding, rendered.spans)
        scored = sum(stop - first for first, stop in slices)
        length = len(ids)
        if rendered.append_eos and ids[-1:] != [renderer.facts.eos_id]:
            length, scored = length + 1, scored + 1
        problems = renderer.token_problems(ids[:2], scored > 0)
        split = self._split(row)
        if length > self.report.max_length:
            split.overlong += 1
            problems += self._overlong(length, slices)
        for problem in problems:
            self.report.issues.add(row.file.name, row.number, problem)
        if length > split.longest[1]:
            split.longest = (f"{row.file.name}:{row.number}", length)
        if any(not problem.kind.startswith("note-") for problem in problems):
            return
        if length > self.report.max_length and self.report.on_overlong == "drop":
            return
        split.rows += 1
        split.weighted_rows += row.file.repeat
        split.lengths.add(min(length, self.report.max_length))
        split.scored_tokens += scored
        split.weighted_tokens += min(length, self.report.max_length) * row.file.repeat
        if not self.report.sample and slices:
            first, stop = slices[-1]
            self.report.sample = renderer.facts.tokenizer.decode(ids[first:stop], skip_special_tokens=False)

    def _overlong(self, length: int, slices: list[tuple[int, int]]) -> list[Problem]:
        limit, action = self.report.max_length, self.report.on_overlong
        if action == "refuse":
            return [
                Problem(
                    "overlong",
                    f"{length:,} tokens, more than data.max_length {limit:,}",
                    "raise data.max_length, or set data.on_overlong to drop or truncate",
                )
            ]
        if action == "truncate" and all(first >= limit for first, _ in slices):
            return [
                Problem(
                    "nothing-scored",
                    f"cut to {limit:,} of {length:,} tokens nothing scored is left",
                    "raise data.max_length, or set data.on_overlong: drop",
                )
            ]
        verb = "dropped" if action == "drop" else f"cut to {limit:,}"
        return [Problem("note-overlong", f"{length:,} tokens: {verb}", "raise data.max_length to keep it whole")]

    def _split(self, row: DataRow) -> SplitReport:
        return self.report.evaluation if row.file.split == "eval" else self.report.train
