"""Manifest, seal, atomic files and the event log: any difference is found, and no half file has a final name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from burst_payload import manifest, records, seal
from burst_payload.manifest import Entry, ManifestError
from hypothesis import given
from hypothesis import strategies as st

names = st.lists(st.text("abcXYZ09._-", min_size=1, max_size=6).filter(lambda n: n.strip(".")), min_size=1, max_size=3)
trees = st.dictionaries(names.map("/".join), st.binary(max_size=40), min_size=1, max_size=5).filter(
    lambda tree: (
        not any(other.startswith(f"{path}/") for path in tree for other in tree)
        and not {"MANIFEST.json", "SEALED.json"} & set(tree)
    )
)


def write_tree(folder: Path, tree: dict[str, bytes]) -> list[Entry]:
    for name, content in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [Entry(name, len(content), records.sha256_bytes(content)) for name, content in tree.items()]


@given(tree=trees, data=st.data())
def test_any_change_is_found(tmp_path_factory, tree: dict[str, bytes], data) -> None:
    folder = tmp_path_factory.mktemp("tree")
    entries = write_tree(folder, tree)
    records.write_json(folder / "MANIFEST.json", manifest.to_json(entries))
    (folder / "extra").mkdir(exist_ok=True)
    assert manifest.verify(folder) == manifest.bundle_id(list(reversed(entries)))
    victim = folder / data.draw(st.sampled_from(sorted(tree)))
    content = victim.read_bytes()
    change = data.draw(st.sampled_from(["flip", "append", "cut", "remove"] if content else ["append", "remove"]))
    if change == "remove":
        victim.unlink()
    elif change == "append":
        victim.write_bytes(content + b"\0")
    elif change == "cut":
        victim.write_bytes(content[:-1])
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        victim.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ManifestError) as caught:
        manifest.verify(folder)
    assert len(caught.value.problems) == 1


@given(tree=trees, data=st.data())
def test_an_edited_manifest_is_refused(tmp_path_factory, tree: dict[str, bytes], data) -> None:
    folder = tmp_path_factory.mktemp("tree")
    value = manifest.to_json(write_tree(folder, tree))
    entry = data.draw(st.sampled_from(value["files"]))
    key, new = data.draw(
        st.sampled_from(
            [
                ("size_bytes", 10**9),
                ("sha256", "0" * 64),
                ("path", "elsewhere"),
                ("size_bytes", -1),
                ("path", "../up"),
                ("sha256", "x"),
                ("size_bytes", True),
            ]
        )
    )
    entry[key] = new
    with pytest.raises(ManifestError):
        manifest.parse(value)


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["format", "files", "bundle_id", "path", "sha256", "size_bytes"]), x, max_size=4
            )
        ),
    )
)
def test_no_value_breaks_the_parsers(value) -> None:
    with pytest.raises(ManifestError):
        manifest.parse(value)
    with pytest.raises(seal.SealError):
        seal.parse_seal(value)


@pytest.mark.parametrize("path", ["", ".", "..", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "c:/x", "a\\b", "a\0b"])
def test_unsafe_paths(path: str) -> None:
    assert not manifest.is_safe_path(path)


@pytest.mark.parametrize("path", ["a", "a/b.txt", ".skyignore", "data/train-000.jsonl", "a..b"])
def test_safe_paths(path: str) -> None:
    assert manifest.is_safe_path(path)


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = tmp_path / "file"
    records.write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        records.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_event_log_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = records.EventLog(path)
    log.write("a", value=float("nan"), nested={"x": [float("inf"), 1.5]})
    log.write("b")
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"seq": 2, "event": "torn')
    assert [event["event"] for event in records.read_events(path)] == ["a", "b"]
    log = records.EventLog(path)
    log.write("c")
    log.close()
    found = list(records.read_events(path))
    assert [(event["seq"], event["event"]) for event in found] == [(0, "a"), (1, "b"), (2, "c")]
    assert found[0]["value"] is None
    assert found[0]["nested"] == {"x": [None, 1.5]}


# --- the seal --------------------------------------------------------------------------------------------------------


def safetensors(header: dict, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "__metadata__": {"format": "pt"},
}


def write_adapter(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / seal.WEIGHTS_NAME).write_bytes(safetensors(GOOD, bytes(range(32))))
    (folder / "adapter_config.json").write_text("{}")
    (folder / seal.METADATA_NAME).write_text("{}")
    seal.write_seal(folder, "b" * 64)
    return folder


def test_tensors_are_read_from_the_header(tmp_path: Path) -> None:
    found = seal.tensors(write_adapter(tmp_path) / seal.WEIGHTS_NAME)
    assert found == {"a": seal.Tensor("F32", (2, 3), 24), "b": seal.Tensor("BF16", (4,), 8)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 2**63) + b"{}" * 300,
        struct.pack("<Q", 2) + b"xx",
        struct.pack("<Q", 2) + b"[]",
        safetensors(GOOD, bytes(31)),
        safetensors(GOOD, bytes(33)),
        safetensors({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}, bytes(20)),
        safetensors({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        safetensors(
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            bytes(6),
        ),
        safetensors({"a": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, bytes(6)),
    ],
    ids=[
        "empty",
        "short",
        "huge header",
        "absurd header",
        "no JSON",
        "a list",
        "truncated",
        "padded",
        "wrong length",
        "unknown dtype",
        "no dtype",
        "overlap",
        "gap",
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, content: bytes) -> None:
    """Also where the seal's hash agrees: a file that was written broken is sealed broken."""
    folder = write_adapter(tmp_path)
    (folder / seal.WEIGHTS_NAME).write_bytes(content)
    seal.write_seal(folder, "b" * 64)
    with pytest.raises(seal.SealError, match="adapter_model"):
        seal.verify_seal(folder)
    assert not seal.is_sealed(folder)


@pytest.mark.parametrize("name", [seal.WEIGHTS_NAME, "adapter_config.json", seal.METADATA_NAME, seal.SEAL_NAME])
@pytest.mark.parametrize("change", ["flip", "remove", "append"])
def test_any_change_breaks_the_seal(tmp_path: Path, name: str, change: str) -> None:
    folder = write_adapter(tmp_path)
    path = folder / name
    content = path.read_bytes()
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(content + b"x" if change == "append" else bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(seal.SealError):
        seal.verify_seal(folder)


def test_a_seal_must_cover_what_matters(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("x")
    seal.write_seal(tmp_path, "b" * 64)
    with pytest.raises(seal.SealError, match="not covered"):
        seal.verify_seal(tmp_path)
