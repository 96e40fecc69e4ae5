"""A spec as a portable bundle: the payload's scripts, the rows, the resolved settings and a manifest.

The bundle is an allow-list, never a copy of a folder: what is not named here does not travel. The same spec, data and
burst give the same bytes, as a folder or as a ``.tar.gz``.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from burst import check, dataset, models, paths, secret_scan, split
from burst.errors import BurstError, InvalidInput
from burst_payload import config as run_config
from burst_payload import manifest, records, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from burst.dataset import DataFile
    from burst.models import ModelFiles
    from burst.report import Report
    from burst.spec import Spec
    from burst_payload.rows import Problem

TEMPLATE_NAME = "chat_template.jinja"
PAYLOAD_FILES = ("train.py", "canary.py", "store.py", "requirements.lock")
ARCHIVE_SUFFIX = ".tar.gz"


@dataclass(frozen=True)
class Bundle:
    """A finished bundle. ``report`` is the check that it passed."""

    path: Path
    bundle_id: str
    files: int
    size_bytes: int
    report: Report


def build(spec: Spec, folder: Path, destination: Path, *, allow_secrets: bool = False) -> Bundle:
    """Check the data of a spec (paths relative to ``folder``) and write the bundle to ``destination``.

    ``destination`` is a folder, or a file ending in ``.tar.gz``; an equal bundle that is already there is left as it is.
    Raises ``InvalidInput`` where the data cannot be trained on or holds something secret.
    """
    report = check.check(spec, folder, allow_secrets=allow_secrets)
    if not report.ok:
        raise InvalidInput(problem_lines(report), "every problem with advice: burst check SPEC --all")
    destination = destination.absolute()
    if not destination.name or (
        destination.suffix in (".zip", ".tgz", ".tar", ".gz", ".bz2", ".xz", ".zst", ".7z")
        and not destination.name.endswith(ARCHIVE_SUFFIX)
    ):
        raise InvalidInput(f"{destination} cannot hold a bundle", "give -o a new folder, or a file ending in .tar.gz")
    destination.parent.mkdir(parents=True, exist_ok=True)
    stage = destination.with_name(f".{destination.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    stage.mkdir()
    try:
        _stage(spec, folder, report, stage)
        if not allow_secrets:
            refuse_secrets(stage)
        entries = [
            manifest.Entry(path.relative_to(stage).as_posix(), path.stat().st_size, records.sha256_file(path))
            for path in sorted(stage.rglob("*"))
            if path.is_file()
        ]
        records.write_json(stage / manifest.MANIFEST_NAME, manifest.to_json(entries))
        if destination.name.endswith(ARCHIVE_SUFFIX):
            _refuse_foreign_file(destination)
            records.write_atomic(destination, archive(stage))
            size = destination.stat().st_size
        else:
            size = sum(path.stat().st_size for path in stage.rglob("*") if path.is_file())
            _publish(stage, destination, manifest.bundle_id(entries))
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Bundle(destination, manifest.bundle_id(entries), len(entries) + 1, size, report)


def problem_lines(report: Report) -> str:
    """The blocking problems of a check, one a line."""
    lines = [f"{issue.where}: {issue.what}; {issue.fix}" for issue in report.issues.shown if issue.blocks]
    hidden = report.issues.blocking - len(lines)
    return "\n".join(lines + ([f"and {hidden:,} more"] if hidden > 0 else []))


def refuse_secrets(stage: Path) -> None:
    """Raise ``InvalidInput`` naming every place of the staged files that looks like a credential."""
    found = []
    for path in sorted(stage.rglob("*")):
        if not path.is_file():
            continue
        line = 1
        with open(path, "rb") as file:
            while block := b"".join(file.readlines(records.CHUNK_BYTES)):  # whole lines: no secret is cut in two
                found += [
                    f"{path.relative_to(stage).as_posix()}:{finding.line}: {finding.sentence}"
                    for finding in secret_scan.scan(block, line)
                ]
                line += block.count(b"\n")
    if found:
        more = [f"and {len(found) - 20:,} more"] if len(found) > 20 else []
        raise InvalidInput(
            "\n".join(found[:20] + more),
            "remove it (data files keep their line order); for rows that are meant to hold such text: --allow-secrets",
        )


def archive(folder: Path) -> bytes:
    """The folder as a ``.tar.gz`` whose bytes depend on names and contents alone."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            info = tarfile.TarInfo(path.relative_to(folder).as_posix())
            info.size, info.mode = path.stat().st_size, 0o644
            with open(path, "rb") as file:
                tar.addfile(info, file)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=9, mtime=0) as file:
        file.write(raw.getbuffer())
    return packed.getvalue()


def _stage(spec: Spec, folder: Path, report: Report, stage: Path) -> None:
    model = models.resolve(spec, folder)
    for name in PAYLOAD_FILES:
        _write(stage / name, _text(paths.payload() / name))
    package = paths.payload_package()
    for path in sorted(package.rglob("*.py")):
        _write(stage / "burst_payload" / path.relative_to(package), _text(path))
    _write(stage / ".skyignore", b"")  # without it a .gitignore further up would decide what SkyPilot uploads
    template = check.template_source(spec, folder, tokens.load(model.folder))
    if spec.data.chat_template not in ("model", "none") and template is not None:
        _write(stage / TEMPLATE_NAME, template.replace("\r\n", "\n").encode())
    sources, evaluation = _write_rows(spec, report, stage)
    resolved = resolve(spec, model, sources, evaluation)
    _write(stage / run_config.RUN_NAME, orjson.dumps(resolved.to_json(), option=orjson.OPT_INDENT_2) + b"\n")


def resolve(
    spec: Spec, model: ModelFiles, sources: list[run_config.Source], evaluation: run_config.Source | None
) -> run_config.RunConfig:
    """The settings of ``run.json``: a spec with its defaults filled in and its files named as in the bundle."""
    train, adapter, data = spec.train, spec.adapter, spec.data
    template = data.chat_template if data.chat_template in ("model", "none") else "file"
    name = spec.model if spec.model_kind != "local" else Path(spec.model).expanduser().name or spec.model
    return run_config.parse(
        {
            "format": run_config.FORMAT,
            "model": {
                "name": name,
                "kind": spec.model_kind,
                "revision": model.revision,
                "fingerprint": model.fingerprint,
            },
            "data": {
                "sources": [vars(source) for source in sources],
                "eval": vars(evaluation) if evaluation else None,
                "max_length": data.max_length,
                "on_overlong": data.on_overlong,
                "score": data.score,
                "chat_template": template,
                "chat_template_kwargs": data.chat_template_kwargs,
            },
            "adapter": {
                **adapter.model_dump(),
                "alpha": adapter.alpha if adapter.alpha is not None else 2.0 * adapter.rank,
            },
            "quantization": spec.quantization,
            "train": {**train.model_dump(), "epochs": train.epochs if train.epochs is not None else 3.0},
            "probes": spec.probes.model_dump(),
        }
    )


def _write_rows(spec: Spec, report: Report, stage: Path) -> tuple[list[run_config.Source], run_config.Source | None]:
    """Write the canonical rows, training and evaluation apart. The check has passed: every row is usable."""
    evaluation: list[bytes] = []
    sources = []
    for index, (file, _) in enumerate(item for item in report.files if item[0].split == "train"):
        name = f"data/train-{index:03d}.jsonl"
        rows = 0
        with _open(stage / name) as out:
            for content in _contents(spec, file):
                if split.rank(content, spec.train.seed) <= report.held_out:
                    evaluation.append(content)
                else:
                    out.write(content + b"\n")
                    rows += 1
        sources.append(run_config.Source(name, rows, file.repeat))
    if not any(source.rows for source in sources):
        raise InvalidInput("eval_split leaves no row to train on", "lower data.eval_split or add rows")
    for file, _ in report.files:
        if file.split == "eval":
            evaluation += _contents(spec, file)
    if not evaluation:
        return sources, None
    with _open(stage / "data/eval.jsonl") as out:
        out.writelines(content + b"\n" for content in evaluation)
    return sources, run_config.Source("data/eval.jsonl", len(evaluation))


def _contents(spec: Spec, file: DataFile) -> Iterator[bytes]:
    for row in dataset.read(file, spec.data.format, dataset.FileFacts(None), _changed):
        yield row.content


def _changed(file: DataFile, line: int, problem: Problem) -> None:
    if not problem.kind.startswith("note-"):
        raise BurstError(
            f"{file.name}:{line} changed while the bundle was made: {problem.what}", "run the command again"
        )


def _open(path: Path) -> io.BufferedWriter:
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "wb")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _text(path: Path) -> bytes:
    return path.read_bytes().replace(b"\r\n", b"\n")


def _refuse_foreign_file(destination: Path) -> None:
    """Only an earlier bundle is replaced."""
    if not destination.exists():
        return
    try:
        with tarfile.open(destination, "r:gz") as tar:
            tar.getmember(manifest.MANIFEST_NAME)
    except (OSError, tarfile.TarError, KeyError, EOFError):
        raise InvalidInput(f"{destination} exists and is no bundle", "give another -o, or remove it first") from None


def _publish(stage: Path, destination: Path, bundle: str) -> None:
    if destination.exists():
        try:
            same = manifest.verify(destination) == bundle
        except (manifest.ManifestError, OSError):
            same = False
        if same:
            return
        if not destination.is_dir() or any(destination.iterdir()):
            raise InvalidInput(f"{destination} exists and is not this bundle", "give another -o, or remove it first")
        destination.rmdir()
    records.publish_directory(stage, destination)
