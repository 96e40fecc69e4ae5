"""Several processes train as one: the same rows a step, the same losses, and they live and end together (gloo, on the CPU)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from burst_payload import checkpoints, ranks, seal
from forks import Forks
from jobs import burst, copy_bundle, events, write_job
from test_resume import of_kind

# 13 rows by 1, 4 a step: two epochs whose last window has one row, which one of two processes has nothing to do with
SPEC = """\
model: builtin:tiny
data: {train: rows.jsonl, max_length: 256, eval: rows.jsonl}
adapter: {rank: 4}
train: {epochs: 2, batch: 1, effective_batch: 4, warmup_steps: 1, eval_steps: 4, save_steps: 2, learning_rate: 0.01}
probes: {rows: 1, max_new_tokens: 4}
"""


@pytest.fixture(scope="module")
def forks(payload_python: str) -> Iterator[Forks]:
    started = Forks(payload_python)
    yield started
    started.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_job(folder / "job", SPEC, rows=13)
    burst("bundle", "-o", str(folder / "bundle"), cwd=folder / "job")
    return folder / "bundle"


@pytest.fixture(scope="module")
def alone(bundle: Path, forks: Forks) -> Path:
    copy = copy_bundle(bundle, bundle.parent / "alone")
    assert forks.run(copy) == 0, (copy / "log.txt").read_text()
    return copy


def losses(run: Path) -> list[float]:
    found = json.loads((run / "out/adapter/metadata.json").read_text())
    return [loss for _, loss in (*found["losses"], *found["eval_losses"])]


@pytest.mark.payload
def test_two_processes_have_the_losses_of_one(bundle: Path, alone: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "two")
    assert forks.run(copy, "--gpus", "2") == 0, (copy / "log.txt").read_text()
    one, two = losses(alone), losses(copy)
    assert len(one) == len(two) == 8 + 2
    assert two == pytest.approx(one, rel=1e-5)
    assert one[0] > one[7], "it learned"
    assert len(of_kind(copy, "probe")) == 1, "one process speaks"
    assert len(of_kind(copy, "sealed")) == 1
    assert "rank-1" in {path.name for path in (copy / "out").iterdir()}


@pytest.mark.payload
def test_one_process_killed_ends_both_and_they_go_on(bundle: Path, alone: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "killed")
    assert forks.run(copy, "--gpus", "2", fault="kill:rank 1 micro-step 5") == 0, (copy / "log.txt").read_text()
    (died,) = of_kind(copy, "death")
    assert (died["cause"], died["step"]) == ("killed", 5)
    assert [event["step"] for event in of_kind(copy, "resume")] == [4]
    assert losses(copy) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.payload
def test_what_two_began_one_finishes(bundle: Path, alone: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "moved")
    assert forks.run(copy, "--gpus", "2", fault="term:micro-step 5") == 130, (copy / "log.txt").read_text()
    assert checkpoints.steps(copy / "out")[0] == 5
    assert forks.run(copy) == 0, (copy / "log.txt").read_text()
    assert losses(copy) == pytest.approx(losses(alone), rel=1e-5)
    seal.verify_seal(copy / "out/adapter")


@pytest.mark.payload
def test_an_effective_batch_that_cannot_be_shared_is_refused(bundle: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "three")
    assert forks.run(copy, "--gpus", "3") == 2
    assert "effective_batch 4 cannot be shared by 3 GPUs with batches of 1" in events(copy)[-1]["error"]


def process(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, start_new_session=True)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ("", "", 0),
        ("exit(2)", "exit(2)", 2),
        ("exit(3)", "input()", 3),
        ("input()", "exit(71)", 71),
        ("input()", "import os; os.kill(os.getpid(), 9)", -9),
        ("import time; time.sleep(1); exit(1)", "exit(70)", 1),
    ],
)
def test_they_end_as_one(first: str, second: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank's result counts; one that waits for a dead one is killed; what died first is told."""
    monkeypatch.setattr(ranks, "LAST_WORDS_S", 0.2 if "input()" in first + second else math.inf)
    worker = ranks.Ranks([process(first), process(second)])
    assert worker.wait(60) == code
    worker.close()


def test_one_process_finds_no_variables_and_more_meet_on_this_machine() -> None:
    assert ranks.environments(1) == [{}]
    two = ranks.environments(2)
    assert [found["RANK"] for found in two] == ["0", "1"]
    assert {(found["WORLD_SIZE"], found["MASTER_ADDR"]) for found in two} == {("2", "127.0.0.1")}
