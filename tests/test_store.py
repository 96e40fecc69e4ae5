"""The durable copy that a machine makes by itself: the seal goes last, and fetch restores from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from burst import fetch, launch, paths, run
from burst.errors import InvalidInput
from burst.places.local import this_process
from burst.run import State
from burst.spec import Cloud
from burst_payload import seal, store
from test_manifest import write_adapter

BUNDLE = "b" * 64


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "job/out").mkdir(parents=True)
    write_adapter(tmp_path / "job/out/adapter")
    return tmp_path / "job/out/adapter"


def test_saved_once_and_fetched_from_there(adapter: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared/burst-x"
    assert store.read_seal(url) is None
    assert store.save(adapter, url)
    assert not store.save(adapter, url), "a complete copy is left as it is"
    fetched = fetch.fetch(lambda path, at: store.open_file(url, path, at), tmp_path / "home/a", bundle_id=BUNDLE)
    assert fetched.seal == seal.read_seal(adapter)
    (tmp_path / "shared/burst-x/adapter/SEALED.json").write_text('{"torn')
    assert store.read_seal(url) is None
    assert store.save(adapter, url), "an incomplete one is made anew"


def test_a_damaged_adapter_is_not_saved(adapter: Path, tmp_path: Path) -> None:
    (adapter / seal.WEIGHTS_NAME).write_bytes(b"")
    with pytest.raises(seal.SealError):
        store.save(adapter, f"file://{tmp_path}/shared")
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "/folder"])
def test_what_is_no_store(url: str) -> None:
    with pytest.raises(store.StoreError, match="is not one of s3://"):
        store.connect(url)


def test_a_store_that_cannot_be_written_is_said_before_anything_is_paid(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput, match="cannot be written"):
        launch.quote(Cloud(store=f"file://{tmp_path}/file/x"), None, None)


def test_a_secret_that_is_not_set_is_said_before_anything_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "1")
    with pytest.raises(InvalidInput, match="not set here: ONE, TWO"):
        launch.quote(Cloud(secrets=["ONE", "HERE", "TWO"]), None, None)


def test_the_script_on_the_machine(adapter: Path, tmp_path: Path) -> None:
    """As the hook runs it: without variables of burst's but its own, and again without harm."""
    job = adapter.parents[1]
    shutil.copyfile(paths.payload() / "store.py", job / "store.py")
    shutil.copytree(paths.payload_package(), job / "burst_payload")

    def save(url: str) -> str:
        done = subprocess.run(
            [sys.executable, "store.py"], cwd=job, env={"BURST_STORE": url}, text=True, capture_output=True, check=False
        )
        return f"{done.returncode} {done.stdout}{done.stderr}"

    url = f"file://{tmp_path}/shared/x"
    assert save("").startswith("0 nothing to save")
    assert save(url) == f"0 saved: {url}\n"
    assert save(url) == f"0 saved before: {url}\n"
    assert (adapter.parent / "stored").read_text() == url
    assert save("ftp://x/y").startswith("1 error: the adapter was not saved")


def test_a_machine_that_went_leaves_its_adapter_in_the_store(adapter: Path, tmp_path: Path) -> None:
    """Nobody looked until the machine was gone: the seal in the store is the evidence, and fetch takes it from there."""
    url = f"file://{tmp_path}/shared/burst-x"
    store.save(adapter, url)
    new = run.create("r", where="cloud", model="m", destination=tmp_path / "adapters/r", launcher=this_process())
    new.update(state=State.RUNNING, cluster="burst-x", job_id=1, gone=5.0, store=url, bundle_id=BUNDLE)
    place = launch.place_of(new.read())
    record = launch.refresh(new, place)
    assert (record.state, launch.adapter_state(record)) == (State.SEALED, "in the store")
    launch.adopt(new, place, None)
    assert launch.adapter_state(new.read()) == launch.SAFE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "only on the machine"),
        ({"gone": 5.0}, "lost"),
        ({"gone": 5.0, "store": "s3://x/y"}, "in the store"),
    ],
)
def test_where_an_adapter_is(changes: dict, said: str, tmp_path: Path) -> None:
    new = run.create("r", where="cloud", model="m", destination=tmp_path / "a", launcher=this_process())
    assert launch.adapter_state(new.read()) == "none"
    record = new.update(state=State.SEALED, cluster="burst-x", seal_id="s", **changes)
    assert launch.adapter_state(record) == said
