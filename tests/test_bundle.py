"""The bundle: an allow-list, the same bytes for the same input, and no secrets."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile

from pathlib import Path

import pytest
from burst import bundle, paths, spec
from burst.errors import InvalidInput
from burst_payload import config, libraries, manifest
from jobs import write_job

TOKEN = "hf_" + "a1B2" * 10


def build(path: Path, destination: Path, **options) -> bundle.Bundle:
    return bundle.build(spec.load(path), path.parent, destination, **options)


def listing(folder: Path) -> dict[str, str]:
    return {
        p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def test_same_input_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_job(tmp_path / "one")
    second = write_job(tmp_path / "two with spaces")
    build(first, tmp_path / "a.tar.gz")
    os.utime(second.parent / "rows.jsonl", (1, 1))
    (second.parent / "notes.txt").write_text("does not travel")
    old = os.umask(0o077)
    monkeypatch.chdir(tmp_path / "two with spaces")
    made = build(Path("burst.yaml").absolute(), tmp_path / "b.tar.gz")
    os.umask(old)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()

    folder = build(first, tmp_path / "folder")
    assert folder.bundle_id == made.bundle_id == manifest.verify(tmp_path / "folder")
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        names = tar.getnames()
    assert sorted(names) == sorted(listing(tmp_path / "folder"))
    assert all(manifest.is_safe_path(name) for name in names)
    assert build(first, tmp_path / "folder").bundle_id == folder.bundle_id, "an equal bundle that is there is fine"


def test_what_travels(tmp_path: Path) -> None:
    build(write_job(tmp_path / "job"), tmp_path / "out")
    root = paths.payload_package()
    package = {f"burst_payload/{path.relative_to(root).as_posix()}" for path in root.rglob("*.py")}
    expected = package | {
        "train.py",
        "canary.py",
        "store.py",
        "requirements.lock",
        "run.json",
        ".skyignore",
        "MANIFEST.json",
        "data/train-000.jsonl",
    }
    assert set(listing(tmp_path / "out")) == expected
    assert (tmp_path / "out/.skyignore").read_bytes() == b""
    for path in (tmp_path / "out").rglob("*"):
        assert path.is_dir() or b"\r" not in path.read_bytes(), path
    loaded = config.load(tmp_path / "out")
    assert loaded.data.sources == [config.Source("data/train-000.jsonl", 12, 1)]
    assert loaded.adapter.alpha == 8.0, "twice the rank by default"


def test_the_script_header_equals_the_pins() -> None:
    script = (paths.payload() / "train.py").read_text()
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", script)
    assert block is not None
    tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11")
    header = tomllib.loads("".join(line[2:] for line in block[1].splitlines(keepends=True)))
    wanted = [
        line for line in (paths.payload() / "requirements.in").read_text().splitlines() if line and line[0] != "#"
    ]
    assert header["dependencies"] == wanted
    assert header["requires-python"] == ">=3.11"
    locked = libraries.pins(paths.payload() / "requirements.lock")
    assert set(locked) >= {"torch", "transformers", "peft", "trl", "accelerate", "tokenizers", "safetensors"}
    for line in wanted:
        name, _, version = line.partition(";")[0].partition("==")
        assert not version or locked[libraries.normalized(name)] == version


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis").write_text("x")
    with pytest.raises(InvalidInput, match="exists and is not this bundle"):
        build(write_job(tmp_path / "job"), tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["thesis"]
    assert sorted(os.listdir(tmp_path)) == ["burst-cache", "job", "mine"]


def job_with_data(tmp_path: Path, name: str) -> Path:
    path = write_job(tmp_path / "job")
    path.write_text(path.read_text().replace("rows.jsonl", name))
    return path


@pytest.mark.parametrize("name", ["../outside.jsonl", "{tmp}/outside.jsonl", "link.jsonl", "folder/link/outside.jsonl"])
def test_paths_that_leave_the_folder(tmp_path: Path, name: str) -> None:
    path = job_with_data(tmp_path, name.format(tmp=tmp_path))
    (tmp_path / "outside.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "job/link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "job/folder").mkdir()
    (tmp_path / "job/folder/link").symlink_to(tmp_path)
    with pytest.raises(InvalidInput, match=r"the spec's folder"):
        build(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [".env", "id_rsa", "server.pem", "credentials.json"])
def test_names_of_credential_files(tmp_path: Path, name: str) -> None:
    path = job_with_data(tmp_path, name)
    (tmp_path / "job" / name).write_text('{"text": "x"}\n')
    with pytest.raises(InvalidInput, match="has the name of a file with credentials"):
        build(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("secret", "kind"),
    [
        (TOKEN, "Hugging Face token"),
        ("AKIA" + "ABCDEFGH12345678", "AWS access key"),
        ("-----BEGIN RSA PRIVATE KEY-----\nxyz", "private key"),
        ("ghp_" + "x" * 36, "GitHub token"),
        ("AIza" + "x" * 35, "Google API key"),
        ("sk-ant-" + "x" * 40, "OpenAI or Anthropic key"),
        ("xoxb-" + "1" * 24, "Slack token"),
    ],
)
def test_secrets_are_found_with_their_place_and_never_repeated(tmp_path: Path, secret: str, kind: str) -> None:
    path = write_job(tmp_path / "job")
    with open(tmp_path / "job/rows.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "my key?", "completion": f"it is {secret} ok"}) + "\n")
    with pytest.raises(InvalidInput) as caught:
        build(path, tmp_path / "out")
    assert f"rows.jsonl:13: looks like {'an' if kind[0] in 'AO' else 'a'} {kind}" in caught.value.what
    assert secret.split("\n")[0] not in caught.value.what
    assert not (tmp_path / "out").exists()
    build(path, tmp_path / "out", allow_secrets=True)


def test_a_secret_in_the_spec_is_found_too(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job")
    path.write_text(
        path.read_text().replace("max_length: 256", f"max_length: 256, chat_template_kwargs: {{key: {TOKEN}}}")
    )
    with pytest.raises(InvalidInput, match=r"run\.json:\d+: looks like a Hugging Face token"):
        build(path, tmp_path / "out")


def test_eval_split_is_exact_seeded_and_keeps_equal_rows_together(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job", rows=40)
    path.write_text(path.read_text().replace("max_length: 256", "max_length: 256, eval_split: 0.25"))
    build(path, tmp_path / "a")
    rows = {name: (tmp_path / "a/data" / name).read_text().splitlines() for name in ("train-000.jsonl", "eval.jsonl")}
    assert (len(rows["train-000.jsonl"]), len(rows["eval.jsonl"])) == (30, 10)
    assert config.load(tmp_path / "a").data.eval == config.Source("data/eval.jsonl", 10, 1)

    lines = (tmp_path / "job/rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "job/rows.jsonl").write_text("".join(reversed(lines)))
    build(path, tmp_path / "b")
    assert set((tmp_path / "b/data/eval.jsonl").read_text().splitlines()) == set(rows["eval.jsonl"]), (
        "order does not matter"
    )

    (tmp_path / "job/rows.jsonl").write_text("".join(lines * 2))
    build(path, tmp_path / "c")
    train, held = ((tmp_path / "c/data" / name).read_text().splitlines() for name in ("train-000.jsonl", "eval.jsonl"))
    assert not set(train) & set(held)
    assert len(train) + len(held) == 80

    path.write_text(path.read_text().replace("warmup_steps: 0", "warmup_steps: 0, seed: 1"))
    build(path, tmp_path / "d")
    assert set((tmp_path / "d/data/eval.jsonl").read_text().splitlines()) != set(held)


def test_repeats_are_recorded_not_copied(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job")
    (tmp_path / "job/few.jsonl").write_text('{"prompt": "few", "completion": "rows"}\n')
    text = path.read_text().replace("train: rows.jsonl", "sources: [{path: rows.jsonl}, {path: few.jsonl, repeat: 5}]")
    path.write_text(text)
    made = build(path, tmp_path / "out")
    assert config.load(tmp_path / "out").data.sources == [
        config.Source("data/train-000.jsonl", 12, 1),
        config.Source("data/train-001.jsonl", 1, 5),
    ]
    assert made.report.train.weighted_rows == 17


def test_bad_data_makes_no_bundle(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job")
    with open(tmp_path / "job/rows.jsonl", "a") as file:
        file.write('{"prompt": "x"}\n{"prompt": 1, "completion": "y"}\n')
    with pytest.raises(InvalidInput) as caught:
        build(path, tmp_path / "out")
    assert "rows.jsonl:13: " in caught.value.what
    assert "rows.jsonl:14: " in caught.value.what
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    ["token:\n" + TOKEN, "x\t" + TOKEN, "key\nAKIAABCDEFGHIJKLMNOP", "-----BEGIN PGP PRIVATE KEY BLOCK-----"]
    + [f"{name}={'aB3/' * 10}" for name in ("AWS_SECRET_ACCESS_KEY", "aws_secret_access_key", "awsSecretAccessKey")],
)
def test_secrets_behind_escapes_and_in_other_spellings(tmp_path: Path, text: str) -> None:
    path = write_job(tmp_path / "job")
    with open(tmp_path / "job/rows.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "q", "completion": text}) + "\n")
    with pytest.raises(InvalidInput, match=r"rows\.jsonl:13: looks like a"):
        build(path, tmp_path / "out")


def test_a_link_to_a_file_of_credentials_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job")
    (tmp_path / "job/rows.jsonl").rename(tmp_path / "job/.env")
    (tmp_path / "job/rows.jsonl").symlink_to(".env")
    with pytest.raises(InvalidInput, match="name of a file with credentials"):
        build(path, tmp_path / "out")


def test_only_an_earlier_bundle_is_replaced_by_an_archive(tmp_path: Path) -> None:
    path = write_job(tmp_path / "job")
    (tmp_path / "mine.tar.gz").write_text("my own archive")
    with pytest.raises(InvalidInput, match="exists and is no bundle"):
        build(path, tmp_path / "mine.tar.gz")
    assert (tmp_path / "mine.tar.gz").read_text() == "my own archive"
    build(path, tmp_path / "job.tar.gz")
    write_job(tmp_path / "job", rows=5)
    build(path, tmp_path / "job.tar.gz")


@pytest.mark.parametrize("name", ["job.zip", "job.tgz", "job.tar"])
def test_other_archives_are_not_made_as_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot hold a bundle"):
        build(write_job(tmp_path / "job"), tmp_path / name)
