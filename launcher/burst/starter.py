"""``burst init``: a commented ``burst.yaml`` for a data file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst import dataset
from burst.errors import InvalidInput
from burst.spec import parse

if TYPE_CHECKING:
    from pathlib import Path

    from burst_payload.rows import Problem

_TEMPLATE = """\
# A training job for burst. Every key: burst schema, or docs/spec.md.
model: {model}               # hub id, ./folder, or builtin:tiny (no download)

data:
  train: {train}             # {rows} rows in the format {format}
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


def write(data: Path, model: str, output: Path, *, force: bool) -> str:
    """Write a spec for ``data`` to ``output`` and return the detected format. Raises ``InvalidInput``."""
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
            problems.append(f"{name}:{line}: {problem.what}; {problem.fix}")

    rows = sum(1 for _ in dataset.read(file, "auto", facts, report))
    if facts.format is None:
        raise InvalidInput(
            "\n".join(problems[:5]) or f"{name}: no row was found", f"look at it with: burst check {name}"
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
    return facts.format


def _yaml(value: str) -> str:
    """A scalar that YAML reads back as this text."""
    plain = all(char.isalnum() or char in "._-/" for char in value) and not value[0].isdigit()
    return value if plain else "'" + value.replace("'", "''") + "'"
