"""Chat templates that people have, against transformers' own rendering, and what of them is scored."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ANSWER = '{"a": "é"}'


@pytest.fixture(scope="module")
def result(payload_python: str) -> dict[str, Any]:
    script = Path(__file__).parent / "template_equality.py"
    process = subprocess.run([payload_python, str(script)], text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.payload
def test_renderings_equal_those_of_transformers(result: dict[str, Any]) -> None:
    assert result["templates"] >= 60
    assert result["renderings"] == 16 * result["templates"]
    assert result["differences"] == []


@pytest.mark.payload
@pytest.mark.parametrize(
    ("template", "conversation", "scored"),
    [
        ("qwen2_5", "two", [f"{ANSWER}<|im_end|>", "No<|im_end|>"]),
        (
            "qwen2_5",
            "tool",
            ['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>', f"{ANSWER}<|im_end|>"],
        ),
        ("qwen3", "one", [f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>"]),
        ("qwen3", "two", "template-rewrites"),
        ("qwen3_5_think", "one", [f"\n</think>\n\n{ANSWER}<|im_end|>"]),
        ("gemma3", "system", [f"{ANSWER}<end_of_turn>"]),
        ("gemma3", "two", [f"{ANSWER}<end_of_turn>", "No<end_of_turn>"]),
        ("gemma4", "tool", ["<|tool_call>call:f{x:1}<tool_call|><|tool_response>", f"{ANSWER}<turn|>"]),
        ("llama3", "two", [f"{ANSWER}<|eot_id|>", "No<|eot_id|>"]),
        ("llama3", "tool", "template-drops"),
        ("llama3_1", "tool", ['{"name": "f", "parameters": {"x": 1}}<|eot_id|>', f"{ANSWER}<|eot_id|>"]),
        ("phi3", "two", [f"{ANSWER}<|end|>", "No<|end|>"]),
        ("gptoss", "one", [f"<|channel|>final<|message|>{ANSWER}<|return|>"]),
        ("smolvlm", "one", "template-drops"),
        ("nemotron_3_nano", "one", "template-rewrites"),
        ("glm4moe", "one", "eos-not-scored"),
    ],
)
def test_what_is_scored(result: dict[str, Any], template: str, conversation: str, scored: list[str] | str) -> None:
    assert result["scored"][template][conversation] == scored
