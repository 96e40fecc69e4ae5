"""Everything that can go wrong before the model is loaded, done before the model is loaded."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_payload import audits, chat, model, precision, tokens, trainer
from burst_payload.stop import ExitCode, Stop, first_line

if TYPE_CHECKING:
    from trl import SFTConfig

    from burst_payload.chat import Example
    from burst_payload.config import RunConfig, Source
    from burst_payload.precision import Precision
    from burst_payload.reporter import Reporter
    from burst_payload.tokens import TokenizerFacts

TEMPLATE_NAME = "chat_template.jinja"


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to load its model."""

    config: RunConfig
    output: Path
    base_folder: Path
    precise: Precision
    capability: tuple[int, int] | None
    quantized: bool
    arguments: SFTConfig
    facts: TokenizerFacts
    tokenizer: Any
    template: str | None
    train: list[Example]
    evaluation: list[Example]


def prepare(folder: Path, config: RunConfig, model_override: str | None, reporter: Reporter) -> Prepared:
    """Resolve model and precision, build all configurations, tokenize and audit all rows. Raises ``Stop``."""
    from transformers import AutoConfig, AutoTokenizer

    capability = model.device_capability()
    base_folder = model.resolve_folder(config.model, model_override, cache_folder())
    architecture = AutoConfig.from_pretrained(base_folder)
    quantized = config.quantization == "nf4" and capability is not None
    precise = precision.choose(capability, architecture.model_type, quantized)
    reporter.emit("precision", compute=precise.compute, adapter=precise.adapter, reason=precise.reason)
    if config.quantization == "nf4" and not quantized:
        reporter.emit("note", text="NF4 needs a GPU: the base stays in full precision on this CPU")
    arguments = build_configurations(folder / "out", config, precise, capability is not None)

    try:
        facts = tokens.load(base_folder)
        template = template_source(folder, config, facts)
        renderer = chat.Renderer(facts, template, config.data.score, config.data.chat_template_kwargs)
    except (tokens.TokenizerError, chat.TemplateRefusal) as error:
        raise Stop(
            f"the tokenizer cannot be used: {error}", "fix the model's tokenizer files", ExitCode.INVALID
        ) from error
    rows, evaluation = [], []
    for source in config.data.sources:
        rows += encode_source(folder, source, renderer, config, reporter) * source.repeat
    if config.data.eval is not None:
        evaluation = encode_source(folder, config.data.eval, renderer, config, reporter)
    if not rows:
        raise Stop(
            "no row is left to train on", "raise data.max_length or look at the data with burst check", ExitCode.INVALID
        )
    if config.data.eval is not None and not evaluation:
        raise Stop("no row is left to evaluate on", "raise data.max_length, or leave out data.eval", ExitCode.INVALID)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    audits.check_labels(rows + evaluation, facts, architecture.get_text_config().vocab_size)
    audits.check_tokenizers_agree(rows, facts, tokenizer)
    reporter.emit(
        "data",
        rows=len(rows),
        eval_rows=len(evaluation),
        tokens=sum(len(row.input_ids) for row in rows),
        scored_tokens=sum(label != chat.IGNORED_LABEL for row in rows for label in row.labels),
        longest=max(len(row.input_ids) for row in rows),
        steps=optimizer_steps(config, len(rows)),
    )
    return Prepared(
        config,
        folder / "out",
        base_folder,
        precise,
        capability,
        quantized,
        arguments,
        facts,
        tokenizer,
        template,
        rows,
        evaluation,
    )


def build_configurations(output: Path, config: RunConfig, precise: Precision, on_gpu: bool) -> SFTConfig:
    """Build every configuration object once, so that an option which a library refuses shows now."""
    import torch

    try:
        model.lora_config(config.adapter, config.adapter.targets, layers=config.adapter.last_layers or 1)
        if config.quantization == "nf4":
            model.quantization_config(getattr(torch, precise.compute))
        return trainer.training_arguments(config, precise, output, on_gpu, evaluates=config.data.eval is not None)
    except (TypeError, ValueError, ImportError) as error:
        raise Stop(
            f"the installed libraries refuse the settings: {first_line(error)}",
            "install requirements.lock, or change the setting it names",
            ExitCode.INVALID,
        ) from error


def template_source(folder: Path, config: RunConfig, facts: TokenizerFacts) -> str | None:
    """The chat template of a run: the model's, the bundle's own file, or none (raw text)."""
    if config.data.chat_template == "file":
        return (folder / TEMPLATE_NAME).read_text(encoding="utf-8")
    return facts.chat_template if config.data.chat_template == "model" else None


def encode_source(
    folder: Path, source: Source, renderer: chat.Renderer, config: RunConfig, reporter: Reporter
) -> list[Example]:
    """Tokenize one file of canonical rows; over-long rows are refused, dropped or cut as the spec says, and counted."""
    examples, overlong, limit = [], 0, config.data.max_length
    with open(folder / source.path, "rb") as file:
        for number, line in enumerate(file, 1):
            example, problems = renderer.encode(json.loads(line))
            blocking = [problem for problem in problems if not problem.kind.startswith("note-")]
            if example is None or blocking:
                what, fix = (blocking[0].what, blocking[0].fix) if blocking else ("cannot be used", "run burst check")
                raise Stop(f"{source.path}:{number}: {what}", fix, ExitCode.INVALID)
            if len(example.input_ids) > limit:
                overlong += 1
                if config.data.on_overlong == "refuse":
                    raise Stop(
                        f"{source.path}:{number}: {len(example.input_ids)} tokens, more than data.max_length {limit}",
                        "raise data.max_length, or set data.on_overlong to drop or truncate",
                        ExitCode.INVALID,
                    )
                if config.data.on_overlong == "drop":
                    continue
                example = chat.Example(example.input_ids[:limit], example.labels[:limit])
                if all(label == chat.IGNORED_LABEL for label in example.labels):
                    raise Stop(
                        f"{source.path}:{number}: nothing scored is left after cutting to {limit} tokens",
                        "raise data.max_length, or set data.on_overlong: drop",
                        ExitCode.INVALID,
                    )
            examples.append(example)
    if overlong:
        action = "dropped" if config.data.on_overlong == "drop" else "cut"
        reporter.emit("note", text=f"{source.path}: {overlong} rows over {limit} tokens were {action}")
    return examples


def optimizer_steps(config: RunConfig, rows: int) -> int:
    """Optimizer steps = epochs · ceil(rows / effective batch), or ``max_steps``."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    return math.ceil(config.train.epochs * math.ceil(rows / config.train.effective_batch))


def cache_folder() -> Path:
    """Where ``builtin:tiny`` is made: ``BURST_CACHE``, else the user's cache folder."""
    root = os.environ.get("BURST_CACHE") or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / ("models" if os.environ.get("BURST_CACHE") else "burst/models")
