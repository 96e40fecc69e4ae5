"""A worker that hangs, dies or crashes is found, told apart, and started again from what was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from burst_payload import watchdog
from burst_payload.watchdog import Death, Pace, Vitals, another_start, stall
from forks import Forks
from jobs import burst, change_run, copy_bundle, events, write_job
from test_resume import of_kind, weights

SPEC = """\
model: builtin:tiny
data: {train: rows.jsonl, max_length: 256, eval: rows.jsonl}
adapter: {rank: 2}
train: {max_steps: 113, batch: 1, effective_batch: 1, warmup_steps: 1, save_steps: 50}
probes: {rows: 0}
"""


def stepping(seconds: float, count: int = 10) -> Vitals:
    vitals = Vitals(0.0)
    vitals.hear({"phase": "train"}, 0.0)
    for number in range(count):
        vitals.hear({"micro": number // 2}, number * seconds)
    return vitals


@pytest.mark.parametrize(
    ("seconds", "silent", "stalled"), [(1.0, 119, False), (1.0, 121, True), (30.0, 299, False), (30.0, 301, True)]
)
def test_between_micro_steps_a_run_is_measured_by_its_own_pace(seconds: float, silent: float, stalled: bool) -> None:
    vitals = stepping(seconds)
    why = stall(vitals, vitals.heard + silent, active=vitals.heard + silent)
    assert (why is not None) == stalled, "a busy CPU is no excuse: a lost GPU spins"
    if why:
        assert "at step 4, where steps took at most" in why


def test_loading_and_the_first_steps_live_as_long_as_they_work() -> None:
    vitals = stepping(1.0, count=2)
    assert not vitals.has_pace
    assert stall(vitals, 3600, active=3590) is None, "it compiles"
    assert "neither CPU nor files" in (stall(vitals, 3600, active=3200) or "")
    assert "no progress for 7300 s" in (stall(vitals, 7301, active=7301) or "")
    vitals = stepping(1.0)
    vitals.hear({"busy": "checkpoint"}, 10.0)
    assert stall(vitals, 300, active=290) is None, "a large checkpoint on a slow disk"


def die(kind: str, step: int | None = 7, phase: str = "train") -> Death:
    return Death(kind, -9, phase, step, "it died")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("death", "past", "again"),
    [
        (die("stalled"), [], True),
        (die("stalled"), [die("stalled")], True),
        (die("stalled"), [die("stalled")] * 2, False),
        (die("stalled", 9), [die("stalled")] * 2, True),
        (die("stalled", 9), [die("stalled", step) for step in range(5)], False),
        (die("killed", None, "load"), [], True),
        (die("error", None, "prepare"), [], False),
        (die("error"), [], True),
        (die("error"), [die("error")], False),
        (die("gpu memory"), [], True),
        (die("gpu memory"), [die("gpu memory")], False),
    ],
)
def test_who_is_started_again(death: Death, past: list[Death], again: bool) -> None:
    assert another_start(death, past) == again


def test_steps_that_suddenly_take_a_multiple_are_said_once() -> None:
    pace = Pace()
    said = [pace.step(1.0 + number % 3 / 10, 100) for number in range(60)]
    said += [pace.step(6.0, 100) for _ in range(40)]
    assert [text is not None for text in said].count(True) == 1
    assert "times as long as before" in "".join(filter(None, said))
    assert not any(pace.step(1.0, 100) for _ in range(40))
    assert any(pace.step(9.0, 100) for _ in range(40)), "and again when it comes back"
    quick = Pace()
    assert not any(quick.step(0.001 if number < 50 else 0.1, 100) for number in range(100)), "noise of tiny steps"


@pytest.fixture(scope="module")
def forks(payload_python: str) -> Iterator[Forks]:
    started = Forks(payload_python)
    yield started
    started.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watchdog")
    write_job(folder / "job", SPEC, rows=13)
    burst("bundle", "-o", str(folder / "bundle"), cwd=folder / "job")
    return folder / "bundle"


@pytest.mark.payload
def test_a_stall_at_step_101_of_113(bundle: Path, forks: Forks, tmp_path: Path) -> None:
    straight, stalled = copy_bundle(bundle, tmp_path / "straight"), copy_bundle(bundle, tmp_path / "stalled")
    assert forks.run(straight) == 0, (straight / "log.txt").read_text()
    assert forks.run(stalled, fault="hang:micro-step 101", BURST_STALL_S="2") == 0, (stalled / "log.txt").read_text()
    assert weights(stalled) == weights(straight)
    (death,) = of_kind(stalled, "death")
    assert (death["cause"], death["step"]) == ("stalled", 101)
    assert [event["step"] for event in of_kind(stalled, "resume")] == [100]
    stacks = (stalled / "out/stacks-1.txt").read_text()
    assert "in training_step" in stacks
    assert "no progress for" in stacks
    assert json.loads((stalled / "out/status.json").read_text())["state"] == "sealed"


@pytest.mark.payload
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("hang:phase load", "stalled"),
        ("hang:checkpoint filled", "stalled"),
        ("hang:evaluate batch:2", "stalled"),
        ("kill:phase save", "killed"),
        ("segv:micro-step 2", "crashed"),
    ],
)
def test_every_kind_of_death_is_told_apart_and_survived(
    bundle: Path, forks: Forks, tmp_path: Path, fault: str, cause: str
) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    change_run(copy, "train", max_steps=4, save_steps=2)
    assert forks.run(copy, fault=fault, BURST_STALL_S="1") == 0, (copy / "log.txt").read_text()
    assert [event["cause"] for event in of_kind(copy, "death")] == [cause]
    weights(copy)
    assert [event["seq"] for event in events(copy)] == list(range(len(events(copy))))


@pytest.mark.payload
def test_a_loss_that_is_not_finite_is_never_tried_again(bundle: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    change_run(copy, "train", learning_rate=1e30, max_steps=8, save_steps=1)
    assert forks.run(copy) == 1
    assert not of_kind(copy, "death")
    assert "at step" in (copy / "log.txt").read_text()


@pytest.mark.payload
def test_a_worker_that_always_dies_is_given_up(bundle: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    (copy / "burst_payload/prepare.py").write_text("raise RuntimeError('broken here')")
    assert forks.run(copy) == 4, "the bundle says so itself"
    copy = copy_bundle(bundle, tmp_path / "other")
    change_run(copy, "train", max_steps=4, save_steps=2)
    assert forks.run(copy, fault="error:micro-step 3", BURST_FAULT_ALWAYS="1") == 1
    last = events(copy)[-1]
    assert (last["state"], len(of_kind(copy, "death"))) == ("failed", 1)
    assert "RuntimeError: planted at step 3 (2 times there)" in last["error"]
    assert "the checkpoint of step 2 is saved" in last["fix"]
    assert forks.run(copy) == 0
    assert watchdog.SAME_PLACE["error"] == 2
