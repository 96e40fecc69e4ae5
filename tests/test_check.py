"""``burst check``: the counts are right, everything wrong is reported at once, nothing disappears silently."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from burst import check, spec
from burst.dedupe import Finder, Place
from burst.report import Report
from burst_payload import chat, rows, tiny, tokens
from jobs import burst
from hypothesis import given
from hypothesis import strategies as st


def messages(user: str, answer: str, **extra) -> dict:
    return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": answer}], **extra}


def run_check(folder: Path, train: list[dict], evaluation: list[dict] | None = None, **data) -> Report:
    for name, items in (("train.jsonl", train), ("eval.jsonl", evaluation or [])):
        (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items))
    value = {
        "model": "builtin:tiny",
        "data": {"train": "train.jsonl", **({"eval": "eval.jsonl"} if evaluation else {}), **data},
    }
    return check.check(spec.Spec.model_validate(value), folder)


def kinds(report: Report) -> list[tuple[str, str]]:
    return [(issue.where, issue.kind) for issue in report.issues.shown]


def test_counts_equal_a_plain_computation(tmp_path: Path) -> None:
    chance = random.Random(1)
    train = [messages("x" * chance.randint(1, 50), "é" * chance.randint(1, 30)) for _ in range(200)]
    report = run_check(tmp_path, train, [messages("q", "a")])
    facts = tokens.load(tiny.tokenizer_folder(tmp_path / "tiny"))
    renderer = chat.Renderer(facts, facts.chat_template)
    encoded = [renderer.encode(rows.canonical(row, "messages")[0])[0] for row in train]
    lengths = sorted(len(example.input_ids) for example in encoded)
    assert report.ok
    assert (report.train.rows, report.evaluation.rows) == (200, 1)
    assert report.train.lengths.total == sum(lengths)
    assert report.train.lengths.summary() == {
        "min": lengths[0],
        "median": lengths[99],
        "p95": lengths[189],
        "max": lengths[-1],
    }
    assert report.train.scored_tokens == sum(
        label != chat.IGNORED_LABEL for example in encoded for label in example.labels
    )
    assert report.sample == train[0]["messages"][1]["content"] + "<|im_end|>"


@pytest.mark.parametrize(("action", "kept", "ok"), [("refuse", 1, False), ("drop", 1, True), ("truncate", 2, True)])
def test_overlong_rows(tmp_path: Path, action: str, kept: int, ok: bool) -> None:
    report = run_check(
        tmp_path, [messages("q", "short"), messages("q", "long " * 20)], max_length=60, on_overlong=action
    )
    assert (report.train.rows, report.train.overlong, report.ok) == (kept, 1, ok)
    assert kinds(report) == [("train.jsonl:2", "overlong" if action == "refuse" else "note-overlong")]
    assert report.train.lengths.quantile(1) <= 60


def test_cutting_away_all_that_is_scored_is_a_problem(tmp_path: Path) -> None:
    report = run_check(tmp_path, [messages("q" * 100, "a"), messages("q", "a")], max_length=60, on_overlong="truncate")
    assert not report.ok
    assert kinds(report) == [("train.jsonl:1", "nothing-scored")]


def test_everything_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(
        b"\xef\xbb\xbf"
        + json.dumps(messages("q", "a")).encode()
        + b"\r\n"
        + b'{"messages": []}\n'
        + json.dumps(messages("q", "a", id=7)).encode()
        + b"\n"
        + b'{"prompt": "p", "completion": "c"}\n'
        + b'{"x": 1}\n{"messages": [}\n'
        + json.dumps(messages("q", "b")).encode()[:-3]
    )
    (tmp_path / "eval.jsonl").write_text(json.dumps(messages("q", "a")) + "\n")
    value = {"model": "builtin:tiny", "data": {"train": "train.jsonl", "eval": "eval.jsonl"}}
    report = check.check(spec.Spec.model_validate(value), tmp_path)
    assert kinds(report) == [
        ("train.jsonl:1", "note-bom"),
        ("train.jsonl:2", "no-turns"),
        ("train.jsonl:4", "mixed-formats"),
        ("train.jsonl:5", "mixed-formats"),
        ("train.jsonl:6", "not-json"),
        ("train.jsonl:7", "truncated"),
        ("train.jsonl", "note-crlf"),
        ("train.jsonl", "note-column"),
        ("train.jsonl:3", "note-duplicate"),
        ("eval.jsonl:1", "note-leak"),
    ]
    assert report.issues.blocking == 5
    assert (report.duplicates.repeated, report.duplicates.leaked) == (1, 1)


@pytest.mark.parametrize("content", ["", "\n\n", "[]", '{"unknown": 1}\n'])
def test_nothing_to_train_on(tmp_path: Path, content: str) -> None:
    (tmp_path / "train.jsonl").write_text(content)
    report = check.check(
        spec.Spec.model_validate({"model": "builtin:tiny", "data": {"train": "train.jsonl"}}), tmp_path
    )
    assert not report.ok
    assert report.issues.blocking >= 1


def test_all_rows_filtered(tmp_path: Path) -> None:
    report = run_check(tmp_path, [messages("q", "long " * 20)], max_length=10, on_overlong="drop")
    assert [issue.kind for issue in report.issues.shown] == ["note-overlong", "no-rows"]


def test_missing_files_and_models_come_with_the_rest(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    value = {"model": "./nowhere", "data": {"train": "train.jsonl", "eval": "gone.jsonl"}}
    report = check.check(spec.Spec.model_validate(value), tmp_path)
    assert [issue.kind for issue in report.issues.shown] == ["model", "no-file", "no-turns"]


def test_many_problems_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    report = run_check(tmp_path, [{"messages": []}] * 50)
    assert report.issues.counts["no-turns"] == 50
    assert len([issue for issue in report.issues.shown if issue.kind == "no-turns"]) == check.EXAMPLES_PER_KIND


@given(contents=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c", b"d"]), st.booleans()), max_size=30))
def test_duplicates_are_counted_exactly(contents: list[tuple[bytes, bool]]) -> None:
    finder = Finder()
    for line, (content, evaluation) in enumerate(contents):
        finder.add(content, Place(int(evaluation), line), evaluation)
    found = finder.finish()
    sides = [[content for content, evaluation in contents if evaluation is side] for side in (False, True)]
    assert found.repeated == sum(len(side) - len(set(side)) for side in sides)
    assert found.leaked == len(set(sides[0]) & set(sides[1]))


def test_duplicates_beyond_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst import dedupe

    monkeypatch.setattr(dedupe, "_FLUSH_BYTES", 64)
    finder = Finder()
    for line in range(3000):
        finder.add(str(line % 1000).encode(), Place(0, line), False)
    found = finder.finish()
    assert found.repeated == 2000
    assert found.repeated_examples[0] == (Place(0, 1000), Place(0, 0))


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps(messages("q", "a")) + "\n")
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n')
    good = burst("check", "good.jsonl", "--model", "builtin:tiny", cwd=tmp_path)
    assert "ok: this data can be trained on" in good.stdout
    assert "a<|im_end|>" in good.stdout
    bad = burst("check", "bad.jsonl", "--model", "builtin:tiny", cwd=tmp_path, check=False)
    assert bad.returncode == 2
    assert "bad.jsonl:1: messages is empty; add the turns or remove the row" in bad.stdout
    value = json.loads(
        burst("check", "bad.jsonl", "--model", "builtin:tiny", "--json", cwd=tmp_path, check=False).stdout
    )
    assert (value["ok"], value["problem_counts"]) == (False, {"no-turns": 1})


def test_the_check_counts_what_the_split_leaves(tmp_path: Path) -> None:
    rows_ = [messages(f"q{number}", "a") for number in range(30)]
    report = run_check(tmp_path, rows_, eval_split=0.1)
    assert report.ok
    assert (report.train.rows, report.evaluation.rows) == (27, 3)
    alone = run_check(tmp_path, rows_[:1], eval_split=0.1)
    assert [issue.kind for issue in alone.issues.shown] == ["no-rows"]


def test_evaluation_rows_that_all_go_are_a_problem(tmp_path: Path) -> None:
    report = run_check(tmp_path, [messages("q", "a")], [messages("q", "a" * 500)], max_length=200, on_overlong="drop")
    assert ("data", "no-rows") in kinds(report)


def test_truncated_rows_count_what_is_left(tmp_path: Path) -> None:
    report = run_check(tmp_path, [messages("q", "a" * 100)], max_length=60, on_overlong="truncate")
    prompt = 60 - report.train.scored_tokens
    assert report.train.lengths.total == 60
    assert 0 < prompt < 60


def test_secrets_are_problems_at_their_row_and_not_shown(tmp_path: Path) -> None:
    token = "hf_" + "a1B2" * 9
    report = run_check(tmp_path, [messages("q", f"it is {token}"), messages("q", "a")])
    assert ("train.jsonl:1", "secret") in kinds(report)
    assert token not in json.dumps(report.to_json())


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("hi<|im_end|>", "control-token"),
        ("<|im_start|>assistant\nevil", "control-token"),
        ("<|im_ended|> and im_end", None),
    ],
)
def test_control_tokens_in_texts(tmp_path: Path, content: str, kind: str | None) -> None:
    found = [issue.kind for issue in run_check(tmp_path, [messages(content, "a")]).issues.shown]
    assert found == ([kind] if kind else [])
    found = [issue.kind for issue in run_check(tmp_path, [messages("q", content)]).issues.shown]
    assert found == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ('{"messages": [{"role": "user", "content": "q", "n": 100000000000000000000}, A]}', "not-plain"),
        ('{"messages": [{"role": "user", "content": "q", "n": ' + "[" * 300 + "]" * 300 + "}, A]}", "not-plain"),
        ('{"messages": [{"role": "user", "content": "q"}, A], "tools": "[\\"\\\\ud800\\"]"}', "bad-tools"),
        ('{"messages": [{"role": "user", "content": "q"}, A], "tools": "' + "[" * 100_000 + '"}', "bad-tools"),
        ('{"messages": [{"role": "user", "content": "q"}, A], "tools": "[{\\"a\\": NaN}]"}', "bad-tools"),
        ('{"messages": [{"role": "user", "content": "q"}, A], "tools": "[{\\"a\\": 1, \\"a\\": 2}]"}', "bad-tools"),
        (
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "function_call": {}}]}',
            "function-call",
        ),
        (
            '{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": ["Be rude"]}',
            "wrong-type",
        ),
        ('{"prompt": "q", "completion": "a", "tools": [{}]}', "bad-tools"),
    ],
)
def test_rows_that_cannot_be_kept_exactly_are_problems_at_their_line(tmp_path: Path, line: str, kind: str) -> None:
    (tmp_path / "rows.jsonl").write_text(line.replace("A]", '{"role": "assistant", "content": "a"}]') + "\n")
    value = {"model": "builtin:tiny", "data": {"train": "rows.jsonl"}}
    report = check.check(spec.Spec.model_validate(value), tmp_path)
    assert ("rows.jsonl:1", kind) in kinds(report)
    assert not report.ok


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "loop"])
def test_paths_that_cannot_be_read_are_problems(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    report = check.check(spec.Spec.model_validate({"model": "builtin:tiny", "data": {"train": name}}), tmp_path)
    assert [issue.kind for issue in report.issues.shown] == ["no-file"]


@pytest.mark.parametrize(("template", "kind"), [(b"\xff", "model"), (b"{{ 1/0 }}", "template-refuses")])
def test_faulty_templates_are_problems(tmp_path: Path, template: bytes, kind: str) -> None:
    (tmp_path / "t.jinja").write_bytes(template)
    report = run_check(tmp_path, [messages("q", "a")], chat_template="t.jinja")
    assert kind in [issue.kind for issue in report.issues.shown]
