"""``burst check``: can this data be trained on, and what is in it. Needs neither torch nor a GPU.

Reads every row as training will, renders it with the model's chat template, counts with the model's tokenizer, and
reports everything that is wrong at once.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from burst import dataset, models, secret_scan, split
from burst.dedupe import Finder, Place
from burst.errors import BurstError, InvalidInput
from burst.report import EXAMPLES_PER_KIND, Issues, Report, SplitReport
from burst_payload import chat, tokens
from burst_payload.rows import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from burst.dataset import DataFile, DataRow, FileFacts
    from burst.spec import Spec

SCAN_BYTES = 1 << 20
BATCH_CHARACTERS = 400_000
"""Text tokenized in one call: large enough to use all cores, small enough to hold two of them."""


def check(
    spec: Spec,
    folder: Path,
    *,
    every_problem: bool = False,
    allow_secrets: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Check the data of a spec whose paths are relative to ``folder``. ``progress`` is told the bytes read so far.

    What looks like a credential is a problem, or with ``allow_secrets`` a note.
    """
    issues = Issues(None if every_problem else EXAMPLES_PER_KIND)
    report = Report(spec.model, spec.data.max_length, spec.data.on_overlong, issues)
    renderer = _renderer(spec, folder, report)
    files = _locate(spec, folder, issues)
    report.held_out = split.threshold(_contents(spec, files), spec.data.eval_split, spec.train.seed)
    counter = _Counter(report, renderer)
    finder = Finder()
    for index, file in enumerate(files):
        facts = dataset.FileFacts(None)
        report.files.append((file, facts))
        secrets = _Secrets(file, issues, "note-secret" if allow_secrets else "secret")
        _check_file(file, index, facts, spec, issues, counter, finder, secrets, progress)
        secrets.flush()
    counter.finish()
    report.duplicates = finder.finish()
    _conclude(report)
    return report


def _contents(spec: Spec, files: list[DataFile]) -> Iterator[bytes]:
    """The canonical rows of the files; their problems are reported by the pass that counts them."""
    if spec.data.eval_split is not None:
        for file in files:
            for row in dataset.read(file, spec.data.format, dataset.FileFacts(None), lambda *_: None):
                yield row.content


def template_source(spec: Spec, folder: Path, facts: tokens.TokenizerFacts) -> str | None:
    """The chat template that a spec asks for; None is raw text. Raises ``InvalidInput``."""
    if spec.data.chat_template == "none":
        return None
    if spec.data.chat_template == "model":
        return facts.chat_template
    path = dataset.locate(folder, spec.data.chat_template, "template").path
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"data.chat_template {path.name}: not UTF-8 (byte {error.start})", "save it as UTF-8"
        ) from None


def _locate(spec: Spec, folder: Path, issues: Issues) -> list[DataFile]:
    """The files that can be read; the others are problems."""
    found = []
    wanted = [(source.path, "train", source.repeat) for source in spec.data.training_sources]
    if spec.data.eval is not None:
        wanted.append((spec.data.eval, "eval", 1))
    for name, part, repeat in wanted:
        try:
            found.append(dataset.locate(folder, name, part, repeat))
        except InvalidInput as error:
            issues.add(name, 0, Problem("no-file", error.what, error.fix))
    return found


def _renderer(spec: Spec, folder: Path, report: Report) -> chat.Renderer | None:
    try:
        facts = tokens.load(models.resolve(spec, folder).folder)
        template = template_source(spec, folder, facts)
        renderer = chat.Renderer(facts, template, spec.data.score, spec.data.chat_template_kwargs)
    except BurstError as error:
        report.issues.add("spec", 0, Problem("model", error.what, error.fix))
        return None
    except (tokens.TokenizerError, chat.TemplateRefusal) as error:
        report.issues.add(
            "spec", 0, Problem("tokenizer", f"model {spec.model}: {error}", "fix the model's tokenizer files")
        )
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
    secrets: _Secrets,
    progress: Callable[[int], None] | None,
) -> None:
    def report(source: DataFile, line: int, problem: Problem) -> None:
        issues.add(source.name, line, problem)

    held_out = counter.report.held_out
    for number, row in enumerate(dataset.read(file, spec.data.format, facts, report), 1):
        evaluation = file.split == "eval"
        secrets.add(row)
        finder.add(row.content, Place(index, row.number), evaluation)
        counter.add(row, evaluation or (held_out >= 0 and split.rank(row.content, spec.train.seed) <= held_out))
        if progress is not None and number % 1000 == 0:
            progress(len(row.content) * 1000)
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
            "data",
            0,
            Problem(
                "no-rows",
                "no row is left to train on",
                "add rows, lower data.eval_split, or raise data.max_length",
            ),
        )
    held_out = any(file.split == "eval" for file, _ in report.files) or report.held_out >= 0
    if held_out and report.evaluation.rows == 0 and report.issues.blocking == 0:
        report.issues.add(
            "data",
            0,
            Problem("no-rows", "no row is left to evaluate on", "raise data.max_length, or leave out data.eval"),
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


class _Secrets:
    """Looks for credentials in blocks of rows: one search over many is cheaper than many."""

    def __init__(self, file: DataFile, issues: Issues, kind: str) -> None:
        self._file, self._issues, self._kind = file, issues, kind
        self._rows: list[DataRow] = []
        self._bytes = 0

    def add(self, row: DataRow) -> None:
        self._rows.append(row)
        self._bytes += len(row.content)
        if self._bytes > SCAN_BYTES:
            self.flush()

    def flush(self) -> None:
        for finding in secret_scan.scan(b"\n".join(row.content for row in self._rows)):
            self._issues.add(
                self._file.name,
                self._rows[finding.line - 1].number,
                Problem(
                    self._kind,
                    finding.sentence,
                    "remove it; for rows that are meant to hold such text, train and bundle take --allow-secrets",
                ),
            )
        self._rows, self._bytes = [], 0


class _Pending(NamedTuple):
    """A rendered row that waits for the tokenizer, and the part of the report that it counts in."""

    row: DataRow
    part: SplitReport
    rendered: chat.Rendered


class _Counter:
    """Renders rows and counts their tokens; tokenizing runs beside reading, in one worker that releases the GIL."""

    def __init__(self, report: Report, renderer: chat.Renderer | None) -> None:
        self.report = report
        self.renderer = renderer
        self._batch: list[_Pending] = []
        self._characters = 0
        self._pool = ThreadPoolExecutor(1)
        self._pending: list[tuple[list[_Pending], Future[list[Any]]]] = []

    def add(self, row: DataRow, evaluation: bool) -> None:
        part = self.report.evaluation if evaluation else self.report.train
        if self.renderer is None:
            part.rows += 1
            part.weighted_rows += row.file.repeat
            return
        rendered, problems = self.renderer.render(row.row)
        for problem in problems:
            self.report.issues.add(row.file.name, row.number, problem)
        if rendered is None:
            return
        if self._batch and self._batch[0].rendered.add_special_tokens != rendered.add_special_tokens:
            self._submit()
        self._batch.append(_Pending(row, part, rendered))
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

    def _encode(self, batch: list[_Pending]) -> list[Any]:
        assert self.renderer is not None
        encodings: list[Any] = self.renderer.facts.tokenizer.encode_batch(
            [item.rendered.text for item in batch], add_special_tokens=batch[0].rendered.add_special_tokens
        )
        return encodings

    def _collect(self) -> None:
        batch, future = self._pending.pop(0)
        for item, encoding in zip(batch, future.result(), strict=True):
            self._count(item, encoding)

    def _count(self, item: _Pending, encoding: Any) -> None:
        row, part, rendered = item
        renderer, limit = self.renderer, self.report.max_length
        assert renderer is not None
        ids = encoding.ids
        slices = chat.scored_slices(encoding, rendered.spans)
        length = len(ids)
        scored = sum(min(stop, limit) - min(first, limit) for first, stop in slices)
        if rendered.append_eos and ids[-1:] != [renderer.facts.eos_id]:
            length, scored = length + 1, scored + (length < limit)
        problems = renderer.token_problems(ids[:2], bool(slices) or rendered.append_eos)
        if length > limit:
            part.overlong += 1
            problems += self._overlong(length, slices)
        for problem in problems:
            self.report.issues.add(row.file.name, row.number, problem)
        if length > part.longest[1]:
            part.longest = (f"{row.file.name}:{row.number}", length)
        if any(not problem.kind.startswith("note-") for problem in problems):
            return
        if length > limit and self.report.on_overlong == "drop":
            return
        part.rows += 1
        part.weighted_rows += row.file.repeat
        part.lengths.add(min(length, limit))
        part.scored_tokens += scored
        part.weighted_tokens += min(length, limit) * row.file.repeat
        if not self.report.sample and slices:
            first, stop = slices[-1]
            sample = renderer.facts.tokenizer.decode(ids[first:stop], skip_special_tokens=False)
            self.report.sample = "(not shown: it holds a credential)" if secret_scan.scan(sample.encode()) else sample

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
