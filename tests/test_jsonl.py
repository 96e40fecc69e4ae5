"""The reader: what is a row, what is read safely and noted, what is a problem of which line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from burst import jsonl
from burst_payload.rows import Problem
from hypothesis import given
from hypothesis import strategies as st

GOOD = b'{"text":"ok"}'


def read(content: bytes, tmp_path: Path) -> tuple[list[tuple[int, dict]], list[tuple[int, str]]]:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    problems: list[tuple[int, str]] = []

    def report(line: int, problem: Problem) -> None:
        assert problem.what
        assert problem.fix
        problems.append((line, problem.kind))

    return [(line.number, line.row) for line in jsonl.read(path, report)], problems


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b'{"text":"a\xffb"}', "not-utf8"),
        (b'{"text":"a\x00b"}', "nul"),
        (b'["a","b"]', "not-an-object"),
        (b'"a"', "not-an-object"),
        (b'{"text":"a"} x', "not-json"),
        (b'{"text":NaN}', "not-json"),
        (b"{'text':'a'}", "not-json"),
        (b'{"text":"\\ud800"}', "surrogate"),
        (b'{"tools":"\\udc00"}', "surrogate"),
        (b'{"a":' * 2000 + b"1" + b"}" * 2000, "too-deep"),
        (b'{"text":"a","text":"b"}', "duplicate-key"),
        (b'{"text" :"a","text":"b"}', "duplicate-key"),
        (b'{"text"\t:"a","text"  :"b"}', "duplicate-key"),
        (b'{"a\\\\":"x","a\\\\":"\\":"}', "duplicate-key"),
        (b'{"text":"say \\":\\"","text":"b"}', "duplicate-key"),
        (b'{"messages":[{"role":"user","role":"x","content":"a"}]}', "duplicate-key"),
        (b'{"tools":[{"a":1,"a":2}]}', "duplicate-key"),
        (b"{", "not-json"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(line: bytes, kind: str, tmp_path: Path) -> None:
    rows, problems = read(GOOD + b"\n" + line + b"\n" + GOOD + b"\n", tmp_path)
    assert problems == [(2, kind)]
    assert rows == [(1, {"text": "ok"}), (3, {"text": "ok"})]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", [(0, "empty-file")]),
        (b"\n \n", [(0, "empty-file"), (0, "note-blank")]),
        (b"\xff\xfe{\x00}\x00", [(0, "not-utf8")]),
        (b"\x1f\x8b\x08\x00", [(0, "not-utf8")]),
        (b'[{"text":"a"},\n{"text":"b"}]', [(1, "json-array")]),
        (b'[{"text":"a"},{"text":"b"}]', [(1, "json-array")]),
        (b'{\n  "text": "a"\n}\n', [(1, "pretty-json")]),
        (b'{ "messages": [\n{"role": "user"}]}\n', [(1, "pretty-json")]),
        (GOOD + b'\n{"text":"cut of', [(2, "truncated")]),
    ],
)
def test_a_bad_file(content: bytes, expected: list[tuple[int, str]], tmp_path: Path) -> None:
    assert read(content, tmp_path)[1] == expected


@pytest.mark.parametrize(
    ("content", "rows", "notes"),
    [
        (b"\xef\xbb\xbf" + GOOD + b"\n", 1, [(1, "note-bom")]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", 2, [(0, "note-crlf")]),
        (GOOD + b"\n\n" + GOOD, 2, [(0, "note-blank")]),
        (GOOD, 1, []),
        ('{"text":"a\u2028b\u2029c\x85d"}\n'.encode(), 1, [(1, "note-breaks")]),
    ],
)
def test_read_safely_and_said(content: bytes, rows: int, notes: list[tuple[int, str]], tmp_path: Path) -> None:
    found, problems = read(content, tmp_path)
    assert (len(found), problems) == (rows, notes)


def test_unusual_line_breaks_are_text(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1ce"
    rows, _ = read(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n", tmp_path)
    assert rows == [(1, {"text": text})]


def test_large_integers_in_tools_stay_exact(tmp_path: Path) -> None:
    number = 123456789012345678901234567890
    rows, _ = read(f'{{"tools":[{{"id":{number}}}]}}\n'.encode(), tmp_path)
    assert rows[0][1]["tools"][0]["id"] == number


def test_a_line_too_long_ends_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 10)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 40)
    rows, problems = read(GOOD + b'\n{"text":"' + b"x" * 100 + b'"}\n' + GOOD, tmp_path)
    assert rows == [(1, {"text": "ok"})]
    assert problems == [(2, "line-too-long")]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), values, max_size=4)


@given(
    rows=st.lists(objects, min_size=1, max_size=8),
    chunk=st.integers(1, 64),
    ascii_only=st.booleans(),
    separators=st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
    end=st.sampled_from([b"\n", b"\r\n", b"\n\n"]),
    last=st.booleans(),
)
def test_what_was_written_is_what_is_read(tmp_path_factory, rows, chunk, ascii_only, separators, end, last) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only, separators=separators).encode() for row in rows]
    content = end.join(lines) + (end if last else b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "CHUNK_BYTES", chunk)
        found, problems = read(content, tmp_path_factory.mktemp("rows"))
    assert [row for _, row in found] == rows
    assert all(kind.startswith("note-") for _, kind in problems)


@given(content=st.binary(max_size=200) | st.text('[]{}",:\\ \t\r\nab1\u2028', max_size=80).map(str.encode))
def test_no_bytes_break_the_reader(tmp_path_factory, content: bytes) -> None:
    found, problems = read(content, tmp_path_factory.mktemp("rows"))
    assert found or problems
    assert all(isinstance(row, dict) for _, row in found)


keys = st.sampled_from(['"a"', '"b"', '"a\\\\"', '"\\":"', '"\\u0061"'])
leaves = st.sampled_from(["1", '"x"', '"\\":"', '"a\\\\"', '":"', "{}", "[]", '"tool"'])
spaces = st.sampled_from(["", " ", "\t", "  ", " \t", "\r"])


@st.composite
def texts(draw) -> str:
    """JSON objects as text, often with a key twice, with all sorts of space around the colons."""
    pairs = draw(st.lists(st.tuples(keys, spaces, spaces, leaves | st.just("nested")), min_size=1, max_size=4))
    inner = draw(st.sampled_from(['{"a":1,"a":2}', '[{"b" :1,"b":2}]', '{"a":{"b":1}}']))
    return "{" + ",".join(f"{k}{s}:{t}{inner if v == 'nested' else v}" for k, s, t, v in pairs) + "}"


def _has_duplicates(text: str) -> bool:
    found = []

    def hook(pairs: list) -> dict:
        found.append(len({key for key, _ in pairs}) < len(pairs))
        return dict(pairs)

    json.loads(text, object_pairs_hook=hook)
    return any(found)


@given(text=texts())
def test_duplicate_keys_are_found_exactly(tmp_path_factory, text: str) -> None:
    """The fast count agrees with the exact parser on every spelling."""
    _, problems = read(text.encode() + b"\n" + GOOD + b"\n", tmp_path_factory.mktemp("rows"))
    assert ((1, "duplicate-key") in problems) == _has_duplicates(text)
