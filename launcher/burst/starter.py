"""``burst init``: a commented ``burst.yaml`` for a data file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from burst import dataset
from burst.errors import InvalidInput
from burst.spec import parse

if TYPE_CHECKING:
    from pathlib import Path

    from burst_payload.rows import Problem

_TEMPLATE = """\
# A training job for burst. Every key: burst schema, or docs/spec.md.
model: {model}  # hub id, ./folder, or builtin:tiny (no download)

data:
  train: {train}  # {rows} rows in the format {format}
  {evaluation}
  max_length: 2048           # tokens a row may have; longer ones are refused, not cut

adapter:
  rank: 16                   # more rank learns more and takes more memory
  # last_layers: 16          # train only the last layers: faster, smaller

quantization: nf4            # 4-bit base weights on a GPU; none keeps 16 bits

train:
  epochs: 3
  batch: 1                   # rows on the device at a time
  effective_batch: 8         # rows per optimizer step
  learning_rate: 2.0e-4
"""


class Written(NamedTuple):
    """What was found in the data: ``unusable`` rows have problems that burst check names."""

    format: str
    rows: int
    unusable: int


def write(data: Path, model: str, output: Path, *, force: bool) -> Written:
    """Write a spec for ``data`` to ``output``. Raises ``InvalidInput``."""
    if not model.strip():
        raise InvalidInput("the model has no name", "give --model a hub id, a local folder or builtin:tiny")
    if output.exists() and not force:
        raise InvalidInput(f"{output} exists", "give another -o, or --force to replace it")
    folder = output.absolute().parent
    try:
        name = data.absolute().relative_to(folder).as_posix()
    except ValueError:
        raise InvalidInput(
            f"{data} is not in the folder of {output}",
            f"a bundle takes files beside the spec: write it there, for example -o {data.parent / 'burst.yaml'}",
        ) from None
    file = dataset.locate(folder, name, "train")
    facts = dataset.FileFacts(None)
    problems: list[str] = []

    def report(_: dataset.DataFile, line: int, problem: Problem) -> None:
        if not problem.kind.startswith("note-"):
            where = f"{name}:{line}" if line else name
            problems.append(f"{where}: {problem.what}; {problem.fix}")

    rows = sum(1 for _ in dataset.read(file, "auto", facts, report))
    if facts.format is None:
        raise InvalidInput(
            "\n".join(problems[:5]) or f"{name}: no row was found", "bring it into JSONL, one row a line"
        )
    evaluation = (
        "eval_split: 0.1            # held out, chosen by content and seed"
        if rows >= 20
        else "# eval: heldout.jsonl      # rows to evaluate on"
    )
    text = _TEMPLATE.format(
        model=_yaml(model), train=_yaml(name), rows=f"{rows:,}", format=facts.format, evaluation=evaluation
    )
    parse(text, str(output))  # what burst writes, burst reads
    output.write_text(text, encoding="utf-8")
    return Written(facts.format, rows, len(problems))


def _yaml(value: str) -> str:
    """A scalar that YAML reads back as this text."""
    plain = re.fullmatch(r"[A-Za-z_./][\w./-]*(:[\w./-]+)*", value, re.ASCII)
    return value if plain else "'" + value.replace("'", "''") + "'"
