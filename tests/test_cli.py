"""The command line: help, exit codes, advice, and streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from burst.cli import cli
from jobs import burst, write_job

ROWS = {
    "messages": {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
    "conversations": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "instruction": {"instruction": "q", "input": "", "output": "a"},
    "text": {"text": "t"},
}


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    assert f"Usage: python -m burst.cli {command}" in burst(command, "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize("fmt", sorted(ROWS))
def test_init_then_check(fmt: str, tmp_path: Path) -> None:
    (tmp_path / "my data.jsonl").write_text(f"{json.dumps(ROWS[fmt])}\n")
    assert f"is in the format {fmt}" in burst("init", "my data.jsonl", cwd=tmp_path).stdout
    assert "ok: this data can be trained on" in burst("check", cwd=tmp_path).stdout
    again = burst("init", "my data.jsonl", cwd=tmp_path, check=False)
    assert (again.returncode, "exists" in again.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["check"], 2, "make a spec with: burst init DATA.jsonl"),
        (["check", "data.jsonl"], 2, "burst init DATA.jsonl"),
        (["train", "data.jsonl"], 2, "burst init data.jsonl"),
        (["check", "pyproject.toml", "--model", "builtin:foo"], 2, "burst init DATA.jsonl"),
        (["check", "--no-such-option"], 2, "No such option"),
        (["train", "--where", "moon"], 2, "Invalid value"),
        (["show"], 2, "start one with: burst train"),
        (["init", "gone.jsonl"], 2, "check the path"),
        (["bundle", "-o", "x"], 2, "burst init"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_end_with_advice(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    result = burst(*arguments, cwd=tmp_path, check=False)
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_a_local_model_does_not_go_to_the_cloud(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("builtin:tiny", "./my-model"))
    result = burst("train", "--where", "cloud", cwd=tmp_path, check=False)
    assert result.returncode == 2
    assert "builtin:tiny" in result.stderr.splitlines()[-1]
    assert json.loads(burst("runs", "--json", cwd=tmp_path).stdout) == []


def test_variables_set_options(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    path.write_text(path.read_text().replace("builtin:tiny", "./my-model"))
    result = burst("train", cwd=tmp_path, check=False, BURST_TRAIN_WHERE="cloud")
    assert result.returncode == 2
    assert "does not travel" in result.stderr


def test_results_on_stdout_and_no_colour_in_pipes(tmp_path: Path) -> None:
    write_job(tmp_path)
    result = burst("bundle", "-o", "out.tar.gz", cwd=tmp_path)
    assert result.stdout.startswith("out.tar.gz: ")
    assert result.stderr.startswith("next: ")
    assert burst("bundle", "-o", "out.tar.gz", "-q", cwd=tmp_path).stderr == ""
    assert "\x1b" not in burst("check", cwd=tmp_path).stdout
    value = json.loads(burst("bundle", "-o", "out.tar.gz", "--json", cwd=tmp_path).stdout)
    assert len(value["bundle_id"]) == 64


def test_a_reader_that_leaves_is_no_crash(tmp_path: Path) -> None:
    command = f"{sys.executable} -m burst.cli schema | head -1"
    result = subprocess.run(["bash", "-c", command], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert result.stdout == "{\n"
    assert "Traceback" not in result.stderr


def test_schema_is_json(tmp_path: Path) -> None:
    assert json.loads(burst("schema", cwd=tmp_path).stdout)["title"] == "Spec"
