"""``run.json``: the resolved settings of one run, as frozen dataclasses. Standard library only.

The launcher writes it from the user's ``burst.yaml``; the payload reads it. Both sides are strict: an unknown or
missing key, or a wrong type, is an error that names the key, because a setting that is silently ignored is a wrong run.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

from burst_payload.records import read_json

if typing.TYPE_CHECKING:
    from pathlib import Path

RUN_NAME = "run.json"
FORMAT = 1


class ConfigError(Exception):
    """``run.json`` cannot be used. Carries every problem, one a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Model:
    """Which base model. ``fingerprint`` is set for a local folder: sha256 over its config and tokenizer files."""

    name: str
    kind: Literal["hub", "local", "builtin"]
    revision: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class Source:
    """One training file of the bundle and how many times each of its rows is seen per epoch."""

    path: str
    rows: int
    repeat: int = 1


@dataclass(frozen=True)
class Data:
    sources: list[Source]
    eval: Source | None
    max_length: int
    on_overlong: Literal["refuse", "drop", "truncate"]
    score: Literal["all", "last"]
    chat_template: Literal["model", "none", "file"]
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Adapter:
    rank: int
    alpha: float
    dropout: float
    targets: list[str]
    last_layers: int | None
    rslora: bool
    dora: bool


@dataclass(frozen=True)
class Train:
    """``effective_batch`` rows make one optimizer step, ``batch`` of them at a time on the device.

    ``measures``: names of ``burst_payload.measures.table``, or None for the exact ones that apply and pay.
    """

    epochs: float
    max_steps: int | None
    batch: int
    effective_batch: int
    learning_rate: float
    scheduler: str
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    optimizer: str
    seed: int
    logging_steps: int
    eval_steps: int | None
    save_steps: int | None
    gradient_checkpointing: Literal["auto", "on", "off"]
    measures: list[str] | None = None
    keep: Literal["last", "best"] = "last"
    patience: int | None = None


@dataclass(frozen=True)
class Probes:
    """Held-out rows that the model answers greedily before and after training."""

    rows: int
    max_new_tokens: int


@dataclass(frozen=True)
class RunConfig:
    model: Model
    data: Data
    adapter: Adapter
    quantization: Literal["nf4", "none"]
    train: Train
    probes: Probes
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(folder: Path) -> RunConfig:
    """Read ``run.json`` of a bundle. Raises ``ConfigError`` with all problems at once."""
    try:
        value = read_json(folder / RUN_NAME)
    except FileNotFoundError:
        raise ConfigError([f"{RUN_NAME} is missing from {folder}"]) from None
    except ValueError as error:
        raise ConfigError([f"{RUN_NAME} is not JSON: {error}"]) from None
    return parse(value)


def parse(value: Any) -> RunConfig:
    problems: list[str] = []
    if isinstance(value, dict) and value.get("format") != FORMAT:
        raise ConfigError([f"{RUN_NAME}: format {value.get('format')!r}; this payload reads format {FORMAT}"])
    config = _build(RunConfig, value, RUN_NAME, problems)
    if problems:
        raise ConfigError(problems)
    assert isinstance(config, RunConfig)
    if config.train.effective_batch % config.train.batch:
        raise ConfigError([f"{RUN_NAME}: train.effective_batch is not a multiple of train.batch"])
    return config


def _build(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    """``value`` as type ``kind``; what does not fit is added to ``problems`` with the key's path."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, value, where, problems)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _build(options[0], value, where, problems)
    if origin is Literal:
        if value not in typing.get_args(kind):
            problems.append(f"{where}: {value!r} is not one of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if origin is list:
        if not isinstance(value, list):
            problems.append(f"{where}: expected a list")
            return []
        (item_kind,) = typing.get_args(kind)
        return [_build(item_kind, item, f"{where}[{index}]", problems) for index, item in enumerate(value)]
    expected = dict if origin is dict else kind
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, expected) or (expected in (int, float) and isinstance(value, bool)):
        problems.append(f"{where}: expected {expected.__name__}, got {value!r}")
    return value


def _build_dataclass(kind: Any, value: Any, where: str, problems: list[str]) -> Any:
    if not isinstance(value, dict):
        problems.append(f"{where}: expected an object")
        return None
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    problems += [f"{where}: unknown key {key!r}" for key in value if key not in fields]
    arguments = {}
    for name, item in fields.items():
        if name in value:
            arguments[name] = _build(hints[name], value[name], f"{where}: {name}", problems)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            problems.append(f"{where}: missing key {name!r}")
    if (
        len(arguments)
        < len(
            [
                f
                for f in fields.values()
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            ]
        )
        or problems
    ):
        return None
    return kind(**arguments)
