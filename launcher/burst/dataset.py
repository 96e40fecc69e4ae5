"""The data files of a spec as one stream of canonical rows, with every problem reported where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from burst import jsonl, secret_scan
from burst.errors import InvalidInput
from burst_payload.rows import Problem, Row, canonical, detect_format, known_columns


class DataFile(NamedTuple):
    """A file of a spec: ``name`` is how the user wrote it, ``split`` is train or eval."""

    path: Path
    name: str
    split: str
    repeat: int = 1


class DataRow(NamedTuple):
    """A canonical row, where it stands, and its JSON as it goes into a bundle."""

    file: DataFile
    number: int
    row: Row
    content: bytes


class FileFacts:
    """What reading a file showed: its format, its row count and columns that are not used."""

    def __init__(self, fmt: str | None) -> None:
        self.format = fmt
        self.rows = 0
        self.ignored_columns: dict[str, int] = {}


Report = Callable[[DataFile, int, Problem], None]


def locate(folder: Path, name: str, split: str, repeat: int = 1) -> DataFile:
    """A data file named in a spec. Raises ``InvalidInput`` where it is missing, secret, or outside of the spec's folder."""
    path = folder / name
    root = folder.resolve()
    try:
        real = path.resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links
        raise InvalidInput(f"file {name!r} cannot be used: {error}", "give the path of a JSONL file") from None
    if not real.is_relative_to(root):
        how = (
            "is a link that leaves"
            if path.is_symlink() or (not Path(name).is_absolute() and ".." not in Path(name).parts)
            else "is outside of"
        )
        raise InvalidInput(
            f"file {name} {how} the spec's folder {folder}",
            "a bundle takes files beside the spec: move or copy it there",
        )
    if secret_scan.is_secret_name(name) or secret_scan.is_secret_name(real.name):
        raise InvalidInput(
            f"file {name} has the name of a file with credentials", "rename it if it holds training data"
        )
    if path.is_dir():
        raise InvalidInput(f"file {name} is a folder", "give the path of a JSONL file in it")
    if not is_file:
        raise InvalidInput(f"file {name} does not exist in {folder}", "check the path; it is relative to the spec")
    return DataFile(path, name, split, repeat)


def read(file: DataFile, fmt: str, facts: FileFacts, report: Report) -> Iterator[DataRow]:
    """Yield the usable rows of a file; ``fmt`` is a format or ``auto`` (the first row decides)."""
    facts.format = None if fmt == "auto" else fmt
    convert, known = canonical, frozenset(known_columns(fmt)) if fmt != "auto" else frozenset()
    for number, row in jsonl.read(file.path, lambda line, problem: report(file, line, problem)):
        if facts.format is None:
            facts.format = detect_format(row)
            if facts.format is None:
                report(
                    file,
                    number,
                    Problem(
                        "unknown-format",
                        f"no known format has the columns {', '.join(row) or '(none)'}",
                        "use messages, conversations, prompt+completion, instruction+output or text",
                    ),
                )
                continue
            known = frozenset(known_columns(facts.format))
        found = detect_format(row)
        if found != facts.format and not (found and _fits(row, facts.format)):
            has = f"is in the format {found}" if found else f"has only the columns {', '.join(row) or '(none)'}"
            report(
                file,
                number,
                Problem(
                    "mixed-formats", f"this row {has}, the file is {facts.format}", "bring all rows into one format"
                ),
            )
            continue
        if not known.issuperset(row):
            for column in row.keys() - known:
                facts.ignored_columns[column] = facts.ignored_columns.get(column, 0) + 1
        result, problems = convert(row, facts.format)
        for problem in problems:
            report(file, number, problem)
        if result is None:
            continue
        try:
            content = orjson.dumps(result)
        except (
            TypeError
        ) as error:  # what orjson reads but does not write: integers over 64 bits, 255 levels, half characters
            report(file, number, Problem("not-plain", f"cannot be kept exactly: {error}", "write plainer JSON"))
            continue
        facts.rows += 1
        yield DataRow(file, number, result, content)


def _fits(row: Row, fmt: str) -> bool:
    """Whether a row has the columns of ``fmt`` although its own first choice would be another format."""
    needed = {
        "messages": {"messages"},
        "conversations": {"conversations"},
        "prompt_completion": {"prompt", "completion"},
        "instruction": {"instruction", "output"},
        "text": {"text"},
    }
    return needed[fmt] <= row.keys()
