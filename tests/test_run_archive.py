"""A rented run carried to another computer: its record and what was seen of it, nothing else."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from burst import run, run_archive
from burst.errors import InvalidInput
from burst.places.local import this_process
from burst.run import Run, State
from jobs import burst


@pytest.fixture
def rented(tmp_path: Path) -> Run:
    new = run.create("far", where="cloud", model="m", destination=tmp_path / "a", launcher=this_process())
    new.update(state=State.RUNNING, cluster="burst-far-1", job_id=1, hourly_usd=2.0, launched=5.0)
    (new.output / "adapter").mkdir(parents=True)
    (new.output / "events.jsonl").write_text('{"event":"phase"}\n')
    (new.output / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    (new.folder / "job.tar.gz").write_bytes(b"data")
    return new


def test_there_and_back(rented: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rented.read()
    burst("runs", "export", "far", "-o", "far.gz", cwd=tmp_path)
    with tarfile.open(tmp_path / "far.gz") as tar:
        assert sorted(tar.getnames()) == ["bundle/out/events.jsonl", "events.jsonl", "run.json"]
    monkeypatch.setenv("BURST_HOME", str(tmp_path / "elsewhere"))
    done = burst("runs", "import", "far.gz", cwd=tmp_path)
    assert "burst fetch far" in done.stdout
    after = run.find("far").read()
    assert (after.cluster, after.hourly_usd, after.launched, after.state) == ("burst-far-1", 2.0, 5.0, State.RUNNING)
    assert (after.launcher, after.destination) == (None, str(tmp_path / "adapters/far"))
    assert before.launcher is not None
    assert run.find("far").output.joinpath("events.jsonl").read_text() == '{"event":"phase"}\n'
    with pytest.raises(InvalidInput, match="called far already"):
        run_archive.take(tmp_path / "far.gz")


def test_a_run_of_this_machine_does_not_travel(tmp_path: Path) -> None:
    here = run.create("here", where="local", model="m", destination=tmp_path / "a", launcher=this_process())
    with pytest.raises(InvalidInput, match="on this machine"):
        run_archive.export(here, tmp_path / "x.gz")


@pytest.mark.parametrize(
    "name", ["../../escape", "/etc/escape", "bundle/out/adapter/adapter_model.safetensors", "run.json"]
)
def test_a_file_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bad.gz", "w:gz") as tar:
        info = tarfile.TarInfo(name)
        info.size = 2
        tar.addfile(info, io.BytesIO(b"{}"))
    with pytest.raises(InvalidInput, match="is not an exported run"):
        run_archive.take(tmp_path / "bad.gz")
    (tmp_path / "text.gz").write_text("hello")
    with pytest.raises(InvalidInput, match="is not an exported run"):
        run_archive.take(tmp_path / "text.gz")
    assert run.all_runs() == []


def test_a_hostile_name_stays_inside(rented: Run, tmp_path: Path) -> None:
    value = run.to_json(rented.read()) | {"name": "../../out"}
    with tarfile.open(tmp_path / "bad.gz", "w:gz") as tar:
        data = json.dumps(value).encode()
        info = tarfile.TarInfo("run.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(InvalidInput, match="cannot name a run"):
        run_archive.take(tmp_path / "bad.gz")


def test_every_command_names_a_machine_that_was_forgotten(rented: Run, tmp_path: Path) -> None:
    assert "is up" not in burst("schema", cwd=tmp_path).stderr, "its launcher is this process"
    rented.update(state=State.FAILED, launcher=run.Process(1, 1.0))
    shown = burst("schema", cwd=tmp_path)
    assert "machine burst-far-1 is up" in shown.stderr
    assert "burst down far" in shown.stderr
    assert json.loads(shown.stdout)
    assert burst("runs", cwd=tmp_path).stderr.count("is up") == 1
