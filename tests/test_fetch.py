"""Fetch: resumable, idempotent, and never a bad file in the place of a good one."""

from __future__ import annotations

import io
import os
import shutil
import threading
from pathlib import Path

import pytest
from burst import fetch
from burst.errors import BurstError, InvalidInput, VerificationFailed
from burst_payload import seal
from hypothesis import given
from hypothesis import strategies as st
from test_manifest import write_adapter

BUNDLE = "b" * 64


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run's output folder with a sealed adapter."""
    (tmp_path / "out").mkdir()
    write_adapter(tmp_path / "out/adapter")
    return tmp_path / "out"


def opener(output: Path, fail_after: int | None = None):
    """Opens files of ``output``; with ``fail_after`` the connection breaks after so many bytes in all."""
    left = [fail_after]

    class Cut(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if left[0] is None:
                return super().read(size)
            if left[0] <= 0:
                raise ConnectionError("cut")
            data = super().read(min(size if size and size > 0 else 1 << 30, left[0]))
            left[0] -= len(data)
            return data

    def open_file(path: str, offset: int):
        return Cut((output / path).read_bytes()[offset:])

    return open_file


def test_fetch_and_again(output: Path, tmp_path: Path) -> None:
    seen: list[int] = []
    fetched = fetch.fetch(opener(output), tmp_path / "home/a", bundle_id=BUNDLE, progress=seen.append)
    assert fetched.pulled_bytes == sum(seen) == fetched.seal.size_bytes
    assert seal.verify_seal(tmp_path / "home/a") == fetched.seal
    again = fetch.fetch(opener(output), tmp_path / "home/a", bundle_id=BUNDLE)
    assert again.pulled_bytes == 0
    assert os.listdir(tmp_path / "home") == ["a"]


@given(cut=st.integers(0, 2000))
def test_a_cut_is_continued(tmp_path_factory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "out").mkdir()
    sealed = seal.verify_seal(write_adapter(folder / "out/adapter"))
    home = folder / "home"
    try:
        fetch.fetch(opener(folder / "out", cut), home, bundle_id=BUNDLE)
    except (OSError, VerificationFailed, BurstError):
        assert not home.exists(), "nothing unverified has the final name"
    have = sum(path.stat().st_size for path in folder.glob(".home.partial/*") if path.name != seal.SEAL_NAME)
    fetched = fetch.fetch(opener(folder / "out"), home, bundle_id=BUNDLE)
    assert seal.verify_seal(home) == sealed
    if not fetched.pulled_bytes == 0:
        assert fetched.pulled_bytes == sealed.size_bytes - have, "only what was missing came over"


def test_a_damaged_source_leaves_the_good_copy_alone(output: Path, tmp_path: Path) -> None:
    fetch.fetch(opener(output), tmp_path / "home", bundle_id=BUNDLE)
    weights = output / "adapter" / seal.WEIGHTS_NAME
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert fetch.fetch(opener(output), tmp_path / "home", bundle_id=BUNDLE).pulled_bytes == 0
    with pytest.raises(VerificationFailed, match="another size or hash"):
        fetch.fetch(opener(output), tmp_path / "second", bundle_id=BUNDLE)
    assert not (tmp_path / "second").exists()
    seal.verify_seal(tmp_path / "home")


def test_a_damaged_home_is_repaired(output: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    fetch.fetch(opener(output), home, bundle_id=BUNDLE)
    (home / "adapter_config.json").write_text("edited")
    with pytest.raises(VerificationFailed):
        fetch.verify(home)
    assert fetch.fetch(opener(output), home, bundle_id=BUNDLE).replaced
    fetch.verify(home)
    assert os.listdir(tmp_path / "out") == ["adapter"]
    assert sorted(os.listdir(tmp_path)) == ["burst-home", "home", "out"]


def test_leftovers_of_another_adapter_do_no_harm(output: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".home.partial"
    partial.mkdir()
    (partial / seal.WEIGHTS_NAME).write_bytes(b"older weights that are longer than the new ones" * 100)
    (partial / "adapter_config.json").write_bytes(b"[]")
    (partial / "stranger").write_text("x")
    fetch.fetch(opener(output), tmp_path / "home", bundle_id=BUNDLE)
    fetch.verify(tmp_path / "home")
    assert not (tmp_path / "home/stranger").exists()


def test_a_swap_killed_half_way_is_finished(output: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    fetch.fetch(opener(output), home, bundle_id=BUNDLE)
    os.rename(home, tmp_path / ".home.old-12345678")
    fetch.recover(home)
    fetch.verify(home)
    shutil.copytree(home, tmp_path / ".home.old-87654321")
    fetch.recover(home)
    assert sorted(os.listdir(tmp_path)) == ["burst-home", "home", "out"]


def test_two_fetches_of_different_adapters_into_one_place(output: Path, tmp_path: Path) -> None:
    """The second one waits for the first, and then leaves its good adapter alone."""
    home = tmp_path / "home"
    other = tmp_path / "other"
    shutil.copytree(output / "adapter", other / "adapter")
    (other / "adapter/adapter_config.json").write_text('{"other": 1}')
    (other / "adapter" / seal.SEAL_NAME).unlink()
    seal.write_seal(other / "adapter", BUNDLE)
    inside, go_on, errors = threading.Event(), threading.Event(), []

    def slow(path: str, offset: int):
        inside.set()
        go_on.wait()
        return opener(output)(path, offset)

    def second() -> None:
        try:
            fetch.fetch(opener(other), home, bundle_id=BUNDLE)
        except InvalidInput as error:
            errors.append(error.what)

    first = threading.Thread(target=lambda: fetch.fetch(slow, home, bundle_id=BUNDLE))
    first.start()
    inside.wait()
    later = threading.Thread(target=second)
    later.start()
    go_on.set()
    first.join()
    later.join()
    assert fetch.verify(home).seal_id == seal.read_seal(output / "adapter").seal_id
    assert errors == [f"{home} holds another adapter"]


def test_files_beside_a_damaged_adapter_are_not_lost(output: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    fetch.fetch(opener(output), home, bundle_id=BUNDLE)
    (home / "merged").mkdir()
    (home / "merged/my.bin").write_text("mine")
    assert fetch.fetch(opener(output), home, bundle_id=BUNDLE).pulled_bytes == 0
    (home / "adapter_config.json").write_text("damaged")
    with pytest.raises(InvalidInput, match=r"files beside a damaged copy of the adapter: merged/my\.bin"):
        fetch.fetch(opener(output), home, bundle_id=BUNDLE)
    assert (home / "merged/my.bin").read_text() == "mine"


def test_a_destination_is_tested_before_training(output: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for bad in ("file", "file/below"):
        with pytest.raises(InvalidInput, match="give another -o|not a folder|cannot be made"):
            fetch.check_destination(tmp_path / bad)
    fetch.fetch(opener(output), tmp_path / "home", bundle_id=BUNDLE)
    with pytest.raises(InvalidInput, match="another adapter"):
        fetch.check_destination(tmp_path / "home")
    fetch.check_destination(tmp_path / "new/adapters/one")
    assert os.listdir(tmp_path / "new") == [], "nothing is made before there is something to put"


def test_foreign_folders_are_not_touched(output: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(InvalidInput, match="did not put there"):
        fetch.fetch(opener(output), tmp_path / "mine", bundle_id=BUNDLE)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(InvalidInput, match="not a folder"):
        fetch.fetch(opener(output), tmp_path / "link", bundle_id=BUNDLE)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="not a folder"):
        fetch.fetch(opener(output), tmp_path / "file", bundle_id=BUNDLE)
    assert (tmp_path / "mine/thesis.txt").read_text() == "x"


def test_an_adapter_of_another_bundle_is_refused(output: Path, tmp_path: Path) -> None:
    with pytest.raises(VerificationFailed, match="not by this run's"):
        fetch.fetch(opener(output), tmp_path / "home", bundle_id="c" * 64)


def test_no_seal_and_a_broken_seal(output: Path, tmp_path: Path) -> None:
    path = output / "adapter" / seal.SEAL_NAME
    path.write_text(path.read_text().replace('"size_bytes": 2', '"size_bytes": 3', 1))
    with pytest.raises(VerificationFailed, match="seal cannot be used"):
        fetch.fetch(opener(output), tmp_path / "home", bundle_id=BUNDLE)
    path.unlink()
    with pytest.raises(BurstError, match="no sealed adapter yet"):
        fetch.fetch(opener(output), tmp_path / "home", bundle_id=BUNDLE)
