"""JSONL files read as a stream of rows, in memory that does not grow with the file.

Lines end with a line feed only: U+2028 and U+0085 inside a string are text. What can be read safely is read and noted (a byte
order mark, CRLF, blank lines); everything else is a problem of its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from burst_payload import strict_json
from burst_payload.rows import Problem

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
"""A row of this size is no training example: the file is something else."""

_ENCODINGS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip"}
_UNUSUAL_BREAKS = (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85")  # U+2028, U+2029, U+0085

Report = Callable[[int, Problem], None]


class Line(NamedTuple):
    """Line ``number`` (from 1) and the object that stands in it."""

    number: int
    row: dict[str, Any]


def read(path: Path, report: Report) -> Iterator[Line]:
    """Yield the objects of a file; everything else goes to ``report(line_number, problem)``.

    Problems whose kind starts with ``note-`` were read safely; the others are lines that are not yielded.
    """
    first = True
    for number, line, last in _lines(path, report):
        if first and (problem := _not_jsonl(line, last)):
            report(number, problem)  # once: every further line would only say the same
            return
        first = False
        row = _parse(number, line, last, report)
        if row is not None:
            yield Line(number, row)


def _lines(path: Path, report: Report) -> Iterator[tuple[int, bytes, bool]]:
    """Non-blank lines with their number, and whether the line ends the file without a line break."""
    number, rest, blank, crlf = 0, b"", 0, 0
    unusual: int | None = None
    with open(path, "rb", buffering=0) as file:
        chunk = file.read(CHUNK_BYTES)
        for magic, name in _ENCODINGS.items():
            if chunk.startswith(magic):
                report(0, Problem("not-utf8", f"the file is {name}, not UTF-8 text", "save it as UTF-8 JSONL"))
                return
        if chunk.startswith(b"\xef\xbb\xbf"):
            report(1, Problem("note-bom", "starts with a UTF-8 byte order mark, left out", "save without BOM"))
            chunk = chunk[3:]
        while chunk:
            block = rest + chunk
            carriage = b"\r" in block
            odd = unusual is None and any(mark in block for mark in _UNUSUAL_BREAKS)
            pieces = block.split(b"\n")
            rest = pieces.pop()
            for line in pieces:
                number += 1
                if carriage and line.endswith(b"\r"):
                    line, crlf = line[:-1], crlf + 1  # noqa: PLW2901
                if odd and unusual is None and any(mark in line for mark in _UNUSUAL_BREAKS):
                    unusual = number
                if line and not line.isspace():
                    yield number, line, False
                else:
                    blank += 1
            if len(rest) > MAX_LINE_BYTES:
                report(
                    number + 1,
                    Problem(
                        "line-too-long",
                        f"the line is longer than {MAX_LINE_BYTES >> 20} MiB",
                        "write one JSON object a line",
                    ),
                )
                return
            chunk = file.read(CHUNK_BYTES)
        if rest and not rest.isspace():
            number += 1
            yield number, rest.removesuffix(b"\r"), True
    if number == blank:
        report(0, Problem("empty-file", "the file is empty", "write one JSON object a line"))
    if crlf:
        report(0, Problem("note-crlf", f"{crlf:,} lines end with CRLF; read as LF", "no need to act"))
    if blank:
        report(0, Problem("note-blank", f"{blank:,} blank lines, passed over", "no need to act"))
    if unusual is not None:
        report(
            unusual, Problem("note-breaks", "U+2028, U+2029 or U+0085 inside a string, kept as text", "no need to act")
        )


def _not_jsonl(first_line: bytes, last: bool) -> Problem | None:
    """What the file is instead, where its first line shows that it is JSON of another shape."""
    stripped = first_line.strip()
    if stripped.startswith(b"["):
        return Problem("json-array", "this is a JSON array, not JSONL", "write one object a line: jq -c '.[]' FILE")
    if stripped == b"{" or (stripped.startswith(b"{") and stripped.endswith((b",", b"[", b"{", b":")) and not last):
        return Problem(
            "pretty-json", "this is JSON over several lines, not JSONL", "write one object a line: jq -c . FILE"
        )
    return None


def _parse(number: int, line: bytes, last: bool, report: Report) -> dict[str, Any] | None:
    """The object of one line, or None after a report."""
    row: dict[str, Any]
    try:
        row = orjson.loads(line)
        if not isinstance(row, dict):
            report(number, Problem("not-an-object", "the line is not a JSON object", "write one JSON object a line"))
            return None
        # Most rows are proved plain by counting their quotes; the exact parser, several times slower, reads the others.
        if _quotes(row) != line.count(b'"') or b"\\u0022" in line:
            row = strict_json.loads(line)
    except strict_json.DuplicateKeyError as error:
        report(number, _duplicate(error.key))
        return None
    except (ValueError, RecursionError) as error:
        report(number, _why(line, last, error))
        return None
    return row


def _quotes(value: Any) -> int:
    """How many ``"`` the JSON text of an object or array has: two a key and a string, and those inside of them.

    A text has more than its parsed value where a key stands twice. Negative where a number may have lost digits: orjson
    reads integers over 64 bits as floats, which would show in the schemas and calls of tools.
    """
    if type(value) is dict:
        total = 2 * len(value)
        for key in value:
            if '"' in key:
                total += key.count('"')
        items = value.values()
    else:
        total, items = 0, value
    for item in items:
        kind = type(item)
        if kind is str:
            total += 2 + item.count('"')
        elif kind is dict or kind is list:
            total += _quotes(item)
        elif kind is float and abs(item) >= 2.0**63:
            return -(1 << 62)
    return total


def _duplicate(key: str) -> Problem:
    return Problem("duplicate-key", f"the key {key!r} stands twice in one object", "keep one of them")


def _why(line: bytes, last: bool, error: Exception) -> Problem:
    """The likeliest reason why a line is not JSON, in words that help."""
    try:
        text = line.decode()
    except UnicodeDecodeError as decode_error:
        return Problem(
            "not-utf8", f"invalid UTF-8 at byte {decode_error.start + 1} of the line", "save the file as UTF-8"
        )
    if "\0" in text:
        return Problem("nul", "a NUL byte in the line", "remove it; the file may have been cut or filled by a crash")
    stripped = text.strip()
    if last and not stripped.endswith("}"):
        return Problem("truncated", "the last line is cut off", "copy the file again, or remove the line")
    if isinstance(error, RecursionError) or "depth limit" in str(error) or "too deep" in str(error):
        return Problem("too-deep", "the JSON is nested too deep", "write one flat row a line")
    if "surrogate" in str(error):
        return Problem(
            "surrogate", "half of a surrogate pair (\\ud800 to \\udfff) in a string", "write whole characters"
        )
    return Problem("not-json", f"not JSON: {str(error).split(': line')[0]}", "write one JSON object a line")
