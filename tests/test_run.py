"""A run's state is what the evidence says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from burst import launch, paths, run
from burst.places import local
from burst.errors import BurstError, InvalidInput
from burst.run import Evidence, Process, Record, State, settle
from hypothesis import given
from hypothesis import strategies as st

ME = Process(1, 1.0)


def record(state: State = State.RUNNING, **changes) -> Record:
    return Record(
        **{
            "name": "r",
            "created": 1.0,
            "state": state,
            "where": "local",
            "model": "m",
            "destination": "d",
            "launcher": ME,
            "process": None if state is State.CREATED else Process(2, 2.0),
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("before", "evidence", "after"),
    [
        (State.CREATED, Evidence(launcher_alive=True), State.CREATED),
        (State.CREATED, Evidence(), State.FAILED),
        (State.CREATED, Evidence(process_alive=True), State.RUNNING),
        (State.CREATED, Evidence(sealed="s"), State.SEALED),
        (State.RUNNING, Evidence(process_alive=True), State.RUNNING),
        (State.RUNNING, Evidence(process_alive=True, sealed="s"), State.RUNNING),
        (State.RUNNING, Evidence(), State.FAILED),
        (State.RUNNING, Evidence(launcher_alive=True), State.FAILED),
        (State.RUNNING, Evidence(status={"state": "running", "phase": "train"}), State.FAILED),
        (State.RUNNING, Evidence(status={"state": "failed", "error": "e", "exit_code": 3}), State.FAILED),
        (State.RUNNING, Evidence(status={"state": "interrupted", "exit_code": 130}), State.STOPPED),
        (State.RUNNING, Evidence(status={"state": "interrupted"}, sealed="s"), State.SEALED),
        (State.FAILED, Evidence(), State.FAILED),
        (State.FAILED, Evidence(sealed="s"), State.SEALED),
        (State.STOPPED, Evidence(process_alive=True), State.RUNNING),
        (State.SEALED, Evidence(sealed="s"), State.SEALED),
        (State.ADOPTED, Evidence(), State.ADOPTED),
        (State.ADOPTED, Evidence(process_alive=True), State.ADOPTED),
    ],
)
def test_settle(before: State, evidence: Evidence, after: State) -> None:
    assert settle(record(before), evidence, 9.0).state is after


@pytest.mark.parametrize(
    ("evidence", "after"),
    [
        (Evidence(), State.STOPPED),
        (Evidence(status={"state": "running", "phase": "train"}), State.STOPPED),
        (Evidence(status={"state": "failed", "error": "e", "exit_code": 3}), State.FAILED),
        (Evidence(sealed="s"), State.SEALED),
        (Evidence(process_alive=True), State.RUNNING),
    ],
)
def test_a_run_that_was_asked_to_stop(evidence: Evidence, after: State) -> None:
    asked = record(State.RUNNING, stop_asked=5.0)
    assert settle(asked, evidence, 9.0).state is after


def test_the_reason_is_kept() -> None:
    settled = settle(record(), Evidence(status={"state": "failed", "error": "boom", "fix": "do", "exit_code": 3}), 9.0)
    assert (settled.error, settled.fix, settled.exit_code) == ("boom", "do", 3)
    killed = settle(record(), Evidence(status={"state": "running", "phase": "train"}), 9.0)
    assert "during 'train'" in (killed.error or "")


evidences = st.builds(
    Evidence,
    process_alive=st.booleans(),
    launcher_alive=st.booleans(),
    status=st.none()
    | st.fixed_dictionaries({"state": st.sampled_from(["running", "failed", "interrupted", "sealed"])}),
    sealed=st.sampled_from([None, "s"]),
)


@given(start=st.sampled_from(State), sequence=st.lists(evidences, min_size=1, max_size=8))
def test_settle_over_any_history(start: State, sequence: list[Evidence]) -> None:
    current = record(start)
    for number, evidence in enumerate(sequence):
        settled = settle(current, evidence, float(number))
        assert settle(settled, evidence, number + 1.0) == settled, "looking twice changes nothing"
        if current.state is State.ADOPTED:
            assert settled == current
        if evidence.sealed and not evidence.process_alive:
            assert settled.state in (State.SEALED, State.ADOPTED), "a sealed adapter is never called a failure"
        if settled.state is State.CREATED:
            assert current.state is State.CREATED, "nothing becomes new again"
        if settled.state is State.SEALED:
            assert settled.seal_id
        current = settled


names = st.text("abc", min_size=1, max_size=5)
processes = st.none() | st.builds(Process, st.integers(1, 2**22), st.floats(0, 2e9))
written = st.builds(
    Record,
    name=names,
    created=st.floats(0, 2e9),
    state=st.sampled_from(State),
    where=names,
    model=st.text(max_size=5),
    destination=st.text(max_size=5),
    launcher=processes,
    process=processes,
    bundle_id=st.none() | names,
    error=st.none() | st.text(max_size=5),
    ended=st.none() | st.floats(0, 2e9),
    exit_code=st.none() | st.integers(0, 255),
)


@given(original=written)
def test_records_survive_the_disk(tmp_path_factory, original: Record) -> None:
    a_run = run.Run(tmp_path_factory.mktemp("run"))
    a_run.write(original)
    assert a_run.read() == original


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1, "state": "sleeping"}'])
def test_a_damaged_record_is_an_error_for_people(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(BurstError, match="cannot be read"):
        run.Run(tmp_path).read()


def test_find_by_prefix() -> None:
    with pytest.raises(InvalidInput, match="there are no runs"):
        run.find(None)
    for name in ("calm-otter", "calm-owl", "calm"):
        run.create(name, where="local", model="m", destination=Path("d"), launcher=ME)
    assert run.find("calm-ot").name == "calm-otter"
    assert run.find("calm").name == "calm", "an exact name wins over longer ones"
    with pytest.raises(InvalidInput, match="could be any of"):
        run.find("calm-o")
    with pytest.raises(InvalidInput, match="no run is called"):
        run.find("x")


@pytest.mark.parametrize(
    ("model", "start"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder-30b-a3b-r16-"),
        ("builtin:tiny", "tiny-r16-"),
        ("./my model/", "my-model-r16-"),
    ],
)
def test_names_can_be_typed(model: str, start: str) -> None:
    name = run.new_name(model, 16)
    assert name.startswith(start)
    assert name.replace("-", "").replace(".", "").isalnum()


def test_a_damaged_record_does_not_hide_the_other_runs() -> None:
    for name in ("one", "two"):
        run.create(name, where="local", model="m", destination=Path("d"), launcher=ME)
    (paths.runs() / "one/run.json").write_text("{")
    found, damaged = launch.readable_runs()
    assert [item.name for item, _ in found] == ["two"]
    assert len(damaged) == 1
    assert "record of run one cannot be read" in damaged[0].what


@pytest.mark.parametrize(
    "change",
    [
        {"created": None},
        {"process": {"pid": -5, "started": 1.0}},
        {"process": {"pid": "7", "started": 1.0}},
        {"destination": None},
        {"state": "lost"},
        {"stop_asked": "now"},
    ],
)
def test_a_damaged_record_is_named_and_the_others_are_listed(change: dict) -> None:
    good = run.create("good", where="local", model="m", destination=Path("d"), launcher=ME)
    bad = run.create("bad", where="local", model="m", destination=Path("d"), launcher=ME)
    (bad.folder / "run.json").write_text(json.dumps(run.to_json(bad.read()) | change))
    items, damaged = launch.readable_runs()
    assert [item.name for item, _ in items] == ["good"]
    assert len(damaged) == 1
    assert "record of run bad" in damaged[0].what
    assert good.read().name == "good"


def test_a_status_with_nonsense_does_no_harm() -> None:
    made = run.create("r", where="local", model="m", destination=Path("d"), launcher=ME)
    made.output.mkdir(parents=True)
    (made.output / "status.json").write_text('{"pid": -3, "state": 5}')
    assert launch.readable_runs()[0][0][1].state is State.FAILED


def test_a_stop_before_the_start_holds() -> None:
    me = local.this_process()
    made = run.create("r", where="local", model="m", destination=Path("d"), launcher=me)
    assert launch.stop(made).state is State.STOPPED
    with pytest.raises(BurstError, match="was stopped before it started"):
        made.begin(lambda: me)
    assert made.read().process is None


def test_a_name_is_taken_once() -> None:
    run.create("r", where="local", model="m", destination=Path("d"), launcher=ME)
    with pytest.raises(InvalidInput, match="a run is called r already"):
        run.create("r", where="local", model="m", destination=Path("d"), launcher=ME)


def test_stop_without_a_name_takes_the_only_run_at_work() -> None:
    assert launch.only_running() is None
    me = local.this_process()
    run.create("old", where="local", model="m", destination=Path("d"), launcher=me)
    run.create("over", where="local", model="m", destination=Path("d"), launcher=ME)
    assert launch.only_running().name == "old"
    run.create("new", where="local", model="m", destination=Path("d"), launcher=me)
    with pytest.raises(InvalidInput, match="old, new"):
        launch.only_running()


@pytest.mark.parametrize(
    ("changes", "forgotten"),
    [
        ({"state": State.RUNNING}, False),
        ({"state": State.FAILED}, True),
        ({"state": State.FAILED, "launcher": local.this_process()}, False),
        ({"state": State.CREATED, "launcher": ME}, True),
        ({"state": State.ADOPTED, "gone": 5.0}, False),
        ({"state": State.FAILED, "cluster": None}, False),
    ],
)
def test_machines_that_nobody_looks_after(changes: dict, forgotten: bool) -> None:
    assert launch.forgotten(record(**{"cluster": "burst-x", "where": "cloud", **changes})) == forgotten


def test_a_machine_in_its_launch_is_looked_after() -> None:
    own = record(State.CREATED, cluster="burst-x", where="cloud", launcher=local.this_process())
    assert not launch.forgotten(own)
    assert launch.cost_usd(record(hourly_usd=3.6, launched=100.0, gone=1100.0)) == pytest.approx(1.0)
