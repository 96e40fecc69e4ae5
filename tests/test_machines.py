"""Records against what the providers have: nothing that bills goes unnamed, and nothing is called gone that is on its way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from burst import machines, run
from burst.places import skypilot
from burst.places.local import this_process
from burst.run import Process, Record, State
from jobs import burst

NOBODY = Process(999_999_999, 1.0)


def record(**changes: object) -> Record:
    base = {"name": "r", "created": 1.0, "state": State.RUNNING, "where": "cloud", "model": "m", "destination": "d"}
    return Record(**{**base, "cluster": "burst-r-1", "launcher": NOBODY, **changes})


@pytest.mark.parametrize(
    ("changes", "there", "state", "said"),
    [
        ({}, {"burst-r-1": "UP"}, "ok", "burst-r-1 is UP: run r"),
        ({"state": State.FAILED}, {"burst-r-1": "UP"}, "bad", "nobody looks after it"),
        ({"state": State.CREATED}, {"burst-r-1": "INIT"}, "bad", "nobody looks after it"),
        ({"state": State.FAILED}, {}, "note", "is not there any more"),
        ({"state": State.CREATED, "launcher": this_process()}, {}, "ok", "is not up yet"),
        ({"state": State.ADOPTED, "gone": 5.0}, {"burst-r-1": "STOPPED"}, "bad", "although it was seen to be gone"),
    ],
)
def test_each_machine_is_one_line(changes: dict, there: dict, state: str, said: str) -> None:
    (finding,) = machines.reconcile([record(**changes)], there)
    assert (finding.state, said in finding.what) == (state, True), finding


def test_strays_are_named_and_machines_of_others_are_not() -> None:
    assert machines.reconcile([record(gone=5.0)], {}) == []
    (finding,) = machines.reconcile([record(cluster=None)], {"burst-x-2": "UP", "mine": "UP"})
    assert (finding.state, finding.do) == ("bad", "if it is nobody's: sky down burst-x-2")


def test_the_doctor_says_that_skypilot_could_not_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = run.create("r", where="cloud", model="m", destination=tmp_path, launcher=NOBODY)
    new.update(state=State.FAILED, cluster="burst-r-1")
    fake = tmp_path / "sky"  # a SkyPilot that cannot be imported
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('broken')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = burst("doctor", cwd=tmp_path, check=False, PYTHONPATH=path)
    assert "machines cannot be asked for: SkyPilot is not installed (broken)" in " ".join(done.stdout.split())
    assert skypilot.PREFIX == "burst-"
