"""Row formats: each becomes one canonical row, or says what is wrong."""

from __future__ import annotations

import pytest
from burst_payload import rows
from hypothesis import given
from hypothesis import strategies as st

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "fmt", "expected"),
    [
        ({"messages": [USER, ANSWER]}, "messages", {"messages": [USER, ANSWER]}),
        (
            {"messages": [USER, ANSWER], "tools": '[{"name": "t"}]'},
            "messages",
            {"messages": [USER, ANSWER], "tools": [{"name": "t"}]},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, ANSWER]},
            "messages",
            {"messages": [USER, ANSWER]},
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
            "conversations",
            {"messages": [{"role": "system", "content": "s"}, USER, ANSWER]},
        ),
        ({"conversations": [USER, ANSWER]}, "conversations", {"messages": [USER, ANSWER]}),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "7"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            "conversations",
            {
                "messages": [
                    USER,
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
                    },
                    {"role": "tool", "content": "7"},
                    ANSWER,
                ]
            },
        ),
        ({"prompt": "q", "completion": "a"}, "prompt_completion", {"prompt": "q", "completion": "a"}),
        (
            {"prompt": [USER, {"role": "assistant", "content": "early"}, USER], "completion": [ANSWER]},
            "prompt_completion",
            {"messages": [USER, {"role": "assistant", "content": "early", "weight": 0}, USER, ANSWER]},
        ),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction", {"messages": [USER, ANSWER]}),
        (
            {"instruction": "q", "input": "x", "output": "a", "system": "s"},
            "instruction",
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q\n\nx"}, ANSWER]},
        ),
        ({"text": "t"}, "text", {"prompt": "", "completion": "t"}),
    ],
)
def test_canonical(row: dict, fmt: str, expected: dict) -> None:
    assert rows.detect_format(row) == fmt
    assert rows.canonical(row, fmt) == (expected, [])


@pytest.mark.parametrize(
    ("row", "kinds"),
    [
        ({"messages": "x"}, ["wrong-type"]),
        ({"messages": []}, ["no-turns"]),
        ({"messages": [1, ANSWER]}, ["wrong-type"]),
        ({"messages": [{"content": "q"}, ANSWER]}, ["no-role"]),
        ({"messages": [{"role": "wizard", "content": "q"}, ANSWER]}, ["unknown-role"]),
        ({"messages": [{"role": "user"}, ANSWER]}, ["no-content"]),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, ["wrong-type"]),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, ["empty-turn"]),
        (
            {"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]},
            ["empty-turn", "empty-turn"],
        ),
        ({"messages": [USER, {"role": "assistant", "content": "a\0"}]}, ["nul"]),
        ({"messages": [USER]}, ["nothing-scored"]),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, ["nothing-scored"]),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, ["bad-weight"]),
        ({"messages": [USER, {**ANSWER, "tool_calls": "f()"}]}, ["wrong-type"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, ["not-text"]),
        ({"messages": [USER, ANSWER], "tools": "not json"}, ["bad-tools"]),
        ({"messages": [USER, ANSWER], "tools": [1]}, ["bad-tools"]),
        ({"messages": [USER, ANSWER, USER]}, ["note-open-end"]),
        ({"conversations": 1}, ["wrong-type"]),
        ({"conversations": [{"from": "alien", "value": "q"}, {"from": "gpt", "value": "a"}]}, ["unknown-role"]),
        ({"conversations": [{"from": "human"}, {"from": "gpt", "value": "a"}]}, ["no-content"]),
        ({"conversations": [{"from": "function_call", "value": "f("}]}, ["bad-call"]),
        ({"prompt": 1, "completion": "a"}, ["wrong-type"]),
        ({"prompt": "q", "completion": ""}, ["empty-turn"]),
        ({"instruction": "q", "output": None}, ["wrong-type"]),
        ({"instruction": "q", "input": 5, "output": "a"}, ["wrong-type"]),
        ({"instruction": "q", "output": "a", "history": [["x", "y"]]}, ["history"]),
        ({"text": "\t"}, ["empty-turn"]),
    ],
)
def test_problems(row: dict, kinds: list[str]) -> None:
    fmt = rows.detect_format(row)
    assert fmt is not None
    result, problems = rows.canonical(row, fmt)
    assert [problem.kind for problem in problems] == kinds
    assert all(problem.what and problem.fix for problem in problems)
    assert (result is None) == any(not kind.startswith("note-") for kind in kinds)


def test_all_problems_of_a_row_at_once() -> None:
    row = {"messages": [{"role": "wizard", "content": ""}, {"role": "assistant"}], "tools": "x"}
    kinds = {problem.kind for problem in rows.canonical(row, "messages")[1]}
    assert {"unknown-role", "empty-turn", "no-content", "bad-tools"} <= kinds


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["user", "assistant", "system", "human", "gpt", "function_call", "", "a", "{}", "text"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "weight", "tool_calls", "type", "text", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(
    row=st.dictionaries(
        st.sampled_from(
            [
                "messages",
                "conversations",
                "prompt",
                "completion",
                "instruction",
                "input",
                "output",
                "text",
                "tools",
                "system",
                "history",
            ]
        ),
        json_values,
        max_size=5,
    )
)
def test_no_row_breaks_the_converters(row: dict) -> None:
    fmt = rows.detect_format(row)
    if fmt is None:
        return
    result, problems = rows.canonical(row, fmt)
    if result is None:
        assert any(not problem.kind.startswith("note-") for problem in problems)
    elif "messages" in result:
        assert any(m["role"] == "assistant" and m.get("weight", 1) == 1 for m in result["messages"])
    else:
        assert result["completion"].strip()


def test_the_weight_of_a_function_call_is_kept() -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "weight": 0},
        {"from": "gpt", "value": "b"},
    ]
    row, found = rows.canonical({"conversations": turns}, "conversations")
    assert not found
    assert row["messages"][1]["weight"] == 0
