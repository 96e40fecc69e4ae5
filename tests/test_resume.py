"""Killed and started again: the adapter is the same, bit for bit. Real training in forks of one process."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from burst_payload import checkpoints, seal
from burst_payload.stop import Stop
from forks import Forks
from jobs import burst, change_run, copy_bundle, events, write_job

pytestmark = pytest.mark.payload

# 13 rows by 2, 4 a step: three epochs of 7 micro-steps in windows of 2, 2, 2 and 1: 12 steps, the tail of an epoch included
SPEC = """\
model: builtin:tiny
data: {train: rows.jsonl, max_length: 256, eval: rows.jsonl}
adapter: {rank: 4, dropout: 0.1}
train: {epochs: 3, batch: 2, effective_batch: 4, warmup_steps: 1, eval_steps: 5, save_steps: 2, learning_rate: 0.01}
probes: {rows: 0}
"""
MICRO_STEPS = [(step, part) for step in range(12) for part in range(1 if step % 4 == 3 else 2)]


@pytest.fixture(scope="module")
def forks(payload_python: str) -> Iterator[Forks]:
    started = Forks(payload_python)
    yield started
    started.close()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_job(folder / "job", SPEC, rows=13)
    burst("bundle", "-o", str(folder / "bundle"), cwd=folder / "job")
    return folder / "bundle"


@pytest.fixture(scope="module")
def straight(bundle: Path, forks: Forks) -> Path:
    """The undisturbed run."""
    copy = copy_bundle(bundle, bundle.parent / "straight")
    assert forks.run(copy) == 0, (copy / "log.txt").read_text()
    return copy


def weights(run: Path) -> bytes:
    seal.verify_seal(run / "out/adapter")
    return (run / "out/adapter/adapter_model.safetensors").read_bytes()


def of_kind(run: Path, kind: str) -> list[dict]:
    return [event for event in events(run) if event["event"] == kind]


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_8bit", "paged_adamw_8bit"])
def test_killed_at_any_micro_step_it_ends_bit_for_bit_the_same(
    bundle: Path, forks: Forks, tmp_path: Path, optimizer: str
) -> None:
    one, other = copy_bundle(bundle, tmp_path / "one"), copy_bundle(bundle, tmp_path / "other")
    for copy in (one, other):
        change_run(copy, "train", optimizer=optimizer)
    assert forks.run(one) == 0, (one / "log.txt").read_text()
    chance = random.Random(optimizer)
    kills = sorted(chance.sample(MICRO_STEPS[1:], 2)) + [(8, 0)]  # the first of an epoch as well
    for step, part in sorted(kills):
        assert forks.run(other, fault=f"kill:micro-step {step}:{part + 1}", alone=True) == -9
    assert forks.run(other) == 0, (other / "log.txt").read_text()
    assert weights(other) == weights(one), kills
    assert [event["step"] for event in of_kind(other, "resume")] == [
        2 * (step // 2) for step, _ in sorted(kills) if step > 1
    ]
    first, second = (json.loads((run / "out/adapter/metadata.json").read_text()) for run in (one, other))
    for same in ("losses", "eval_losses", "tokens_seen", "steps", "step"):
        assert first[same] == second[same]
    assert (len(first["segments"]), len(second["segments"])) == (1, 4)


def test_a_signal_in_the_middle_of_a_window_leaves_a_checkpoint(
    bundle: Path, straight: Path, forks: Forks, tmp_path: Path
) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    assert forks.run(copy, fault="term:micro-step 5:2") == 130
    assert checkpoints.steps(copy / "out") == [5, 4], "step 5 was whole, its successor half done"
    assert "the checkpoint of step 5 is saved" in (copy / "log.txt").read_text()
    assert forks.run(copy) == 0
    assert weights(copy) == weights(straight)


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "half renamed", "seal gone"])
def test_a_damaged_checkpoint_is_passed_over(
    bundle: Path, straight: Path, forks: Forks, tmp_path: Path, damage: str
) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    assert forks.run(copy, fault="kill:micro-step 7", alone=True) == -9
    newest = copy / "out/checkpoints/step-6"
    file = newest / "optimizer.safetensors"
    content = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(content[:-1])
    elif damage == "bit flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "seal gone":
        (newest / "SEALED.json").unlink()
    else:
        newest.rename(newest.with_name(".step-6.tmp-1"))
    assert forks.run(copy) == 0
    assert of_kind(copy, "resume")[0]["step"] == 4
    assert weights(copy) == weights(straight)
    if damage != "half renamed":
        assert any("checkpoint step-6 is damaged" in event["text"] for event in of_kind(copy, "note"))


def test_a_checkpoint_of_something_else_is_refused_by_name(bundle: Path, forks: Forks, tmp_path: Path) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    assert forks.run(copy, fault="kill:micro-step 3", alone=True) == -9
    kept = shutil.copytree(copy, tmp_path / "kept")
    change_run(copy, "train", learning_rate=0.02)
    assert forks.run(copy) == 2
    log = (copy / "log.txt").read_text()
    assert "the checkpoint of step 2 does not belong to this bundle" in log
    assert "run.train.learning_rate: 0.01 then, 0.02 now" in log
    assert checkpoints.steps(copy / "out") == [2], "it is not touched"
    assert forks.run(copy, "--fresh") == 0
    assert (copy / "out/checkpoints.old-1/step-2").is_dir()
    assert not of_kind(copy, "resume")
    assert forks.run(kept) == 0
    assert weights(kept) != weights(copy)


def test_a_full_disk_at_a_checkpoint_does_not_stop_training(
    bundle: Path, straight: Path, forks: Forks, tmp_path: Path
) -> None:
    copy = copy_bundle(bundle, tmp_path / "copy")
    assert forks.run(copy, fault="full:checkpoint optimizer:2") == 0
    assert any("no checkpoint of step 4" in event["text"] for event in of_kind(copy, "note"))
    assert [event["step"] for event in of_kind(copy, "checkpoint")] == [2, 6, 8, 10, 12]
    assert weights(copy) == weights(straight)


def test_accumulated_gradients_are_those_of_one_batch(bundle: Path, forks: Forks, tmp_path: Path) -> None:
    """8 rows one at a time and 8 rows at once: the same steps to float tolerance."""
    losses = []
    for batch in (1, 8):
        copy = copy_bundle(bundle, tmp_path / f"by-{batch}")
        change_run(copy, "train", batch=batch, effective_batch=8, save_steps=None)
        change_run(copy, "adapter", dropout=0.0)
        assert forks.run(copy) == 0, (copy / "log.txt").read_text()
        losses.append([loss for _, loss in json.loads((copy / "out/adapter/metadata.json").read_text())["losses"]])
        assert not (copy / "out/checkpoints").exists(), "unasked checkpoints go when the adapter is sealed"
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_differs_is_named() -> None:
    before = {
        "bundle_id": "a",
        "run": {"train": {"seed": 1}},
        "files": {"data/x.jsonl": "f" * 64},
        "versions": {"torch": "2.1"},
    }
    now = {"bundle_id": "b", "run": {"train": {"seed": 2}}, "files": {"data/x.jsonl": "e" * 64}, "versions": {}}
    assert checkpoints.changes(before, before) == []
    assert checkpoints.changes(before, now) == [
        f"files data/x.jsonl: {'f' * 16}… then, {'e' * 16}… now",
        "run.train.seed: 1 then, 2 now",
        "versions.torch: 2.1 then, nothing now",
    ]
    with pytest.raises(Stop, match="step 7 does not belong to this bundle"):
        checkpoints.check_same(checkpoints.Checkpoint(Path("x"), 7, {"identity": before}), now)


def test_old_checkpoints_go_and_the_kept_one_stays(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "state.json").write_text('{"format": 1}')

    for step in (2, 4, 6, 8):
        checkpoints.write(tmp_path, step, fill, "b", 0)
        checkpoints.prune(tmp_path, {2})
    assert checkpoints.steps(tmp_path) == [8, 6, 2]
    with pytest.raises(checkpoints.DiskFull, match="bytes free"):
        checkpoints.write(tmp_path, 10, fill, "b", 1 << 60)
    found = checkpoints.newest(tmp_path, pytest.fail)
    assert found is not None
    assert found.step == 8
