"""One training run from loading the model to the sealed adapter."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.training_args import OptimizerNames

from burst_payload import (
    artifacts,
    audits,
    checkpoints,
    manifest,
    model,
    prepare,
    probes,
    ranks,
    stop,
    trainer,
    training_state,
)
from burst_payload.chat import IGNORED_LABEL
from burst_payload.config import RUN_NAME
from burst_payload.measures import apply
from burst_payload.records import read_json, sha256_file
from burst_payload.reporter import segments
from burst_payload.saver import Saver

if TYPE_CHECKING:
    from burst_payload.config import Source
    from burst_payload.prepare import Prepared
    from burst_payload.reporter import Reporter


def train_and_seal(prepared: Prepared, bundle_id: str, reporter: Reporter, *, tight: bool = False) -> None:
    """Load, audit, train, save, seal. The probes after training come last: by then the adapter is safe.

    ``tight``: memory was short before, so measures that cost time are taken too.
    Raises ``Stop`` when an audit fails, when training is unsound, or when the saved adapter does not verify.
    """
    config, on_gpu = prepared.config, prepared.capability is not None
    started = time.time()
    identity = identify(prepared, bundle_id)
    with prepared.arguments.main_process_first(local=True):  # damaged checkpoints are set aside by one
        start = find_start(prepared, identity, reporter)
    reporter.phase("load")
    base = model.load_base(prepared.base_folder, prepared.precise, prepared.quantized, on_gpu)
    item_bytes = getattr(torch, prepared.precise.compute).itemsize
    weight_bytes = audits.check_weight_bytes(base, item_bytes, prepared.quantized)
    targets = model.resolve_targets(base, config.adapter.targets)
    expected = audits.expected_trainable(base, config.adapter, targets)
    adapted = model.attach(
        base,
        model.lora_config(config.adapter, targets, model.layer_count(base), text_only=model.is_text_only(base)),
        config.train.seed,
    )
    parameters = audits.check_trainable(adapted, expected)
    reporter.emit(
        "model",
        name=config.model.name,
        weight_bytes=weight_bytes,
        trainable_parameters=parameters,
        quantization="nf4" if prepared.quantized else "none",
        device=artifacts.gpu_name() or "cpu",
    )

    speaks = ranks.mine() == 0
    asked = [probes.from_example(example, prepared.facts) for example in _probe_rows(prepared)] if speaks else []
    if asked:
        reporter.phase("probe before")
    before = [probes.answer(adapted, probe, prepared.facts, config.probes.max_new_tokens) for probe in asked]

    last_step = prepare.optimizer_steps(config, len(prepared.train))
    progress = trainer.Progress(
        reporter.emit, audits.lora_b(adapted), config.train, last_step, evaluates=bool(prepared.evaluation)
    )
    saver = Saver(prepared.output, bundle_id, identity, config.train.save_steps, reporter.emit) if speaks else None
    loop = trainer.build(
        adapted, prepared.arguments, prepared.tokenizer, prepared.train, prepared.evaluation, progress, saver
    )
    if prepared.precise.adapter == "float32":
        for parameter in adapted.parameters():  # TRL casts adapters to bfloat16, which a float16 scaler cannot scale
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    audits.check_adapter_dtype(adapted, prepared.precise.adapter)
    loop.measures = apply.apply(loop, config, on_gpu, reporter.emit, tight=tight)
    reporter.phase("train")
    loop.run(start)
    step = loop.state.global_step
    if prepared.evaluation and (not progress.eval_losses or progress.eval_losses[-1][0] != step):
        reporter.phase("evaluate")
        loop.evaluate()
    if not speaks:  # its part is done: the adapters of all processes are equal
        return
    step = take_best(loop, step, reporter) if progress.keeps_best else step

    reporter.phase("save")
    metadata = _metadata(
        prepared, bundle_id, reporter, progress, loop, parameters, weight_bytes, targets, started, step
    )
    with stop.deferred():  # what is trained is sealed, although a signal came: it is a matter of seconds
        seal = artifacts.save(
            adapted,
            prepared.base_folder,
            prepared.template,
            config.model.name,
            config.model.revision,
            metadata,
            bundle_id,
            prepared.output,
        )
        reporter.emit("sealed", seal_id=seal.seal_id, size_bytes=seal.size_bytes, step=step, path="out/adapter")
        reporter.status(sealed=True)
        if config.train.save_steps is None:
            checkpoints.clear(prepared.output)

    if asked:
        reporter.phase("probe after")
    for probe, old in zip(asked, before, strict=True):
        new = probes.answer(adapted, probe, prepared.facts, config.probes.max_new_tokens)
        reporter.emit("probe", asked=probe.asked, expected=probe.expected, before=old, after=new)


def identify(prepared: Prepared, bundle_id: str) -> dict[str, Any]:
    """What a checkpoint must have been made of to be gone on with: bundle, settings, files, and libraries that matter.

    The build of a library (``+cpu``, ``+cu130``) does not count: a checkpoint moves between machines.
    """
    folder = prepared.output.parent
    return {
        "bundle_id": bundle_id,
        "run": read_json(folder / RUN_NAME),
        "files": {
            item["path"]: item["sha256"]
            for item in read_json(folder / manifest.MANIFEST_NAME)["files"]
            if item["path"] != RUN_NAME
        },
        "versions": {
            name: version.partition("+")[0]
            for name, version in artifacts.library_versions().items()
            if name in ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")
        },
    }


def find_start(prepared: Prepared, identity: dict[str, Any], reporter: Reporter) -> checkpoints.Checkpoint | None:
    """The checkpoint to go on from, or None. Raises ``Stop`` where it belongs to something else."""
    start = checkpoints.newest(prepared.output, lambda text: reporter.emit("note", text=text))
    if start is None:
        return None
    checkpoints.check_same(start, identity)
    if prepared.config.train.optimizer == "auto":  # the one it was begun with, whatever this machine would choose
        prepared.arguments.optim = OptimizerNames(start.state["optim"])
    reporter.emit("resume", step=start.step, tokens=start.state["tokens"], seconds=start.state["seconds"])
    return start


def take_best(loop: trainer.Trainer, step: int, reporter: Reporter) -> int:
    """Put the adapter of the best evaluation into the model, where that is not the last. Returns its step."""
    best = loop.progress.best_step
    if best is None or best == step:
        return step
    found = checkpoints.whole(Path(loop.args.output_dir).parent, best)
    if found is None:
        reporter.emit("note", text=f"the checkpoint of step {best}, the best one, is gone: the last step is kept")
        return step
    training_state.load_adapter(loop.model, found.folder)
    reporter.emit("note", text=f"step {best} had the lowest evaluation loss and is kept")
    return best


def _probe_rows(prepared: Prepared) -> list[Any]:
    return (prepared.evaluation or prepared.train)[: prepared.config.probes.rows]


def _sources(prepared: Prepared) -> list[Source]:
    data = prepared.config.data
    return [*data.sources, *([data.eval] if data.eval else [])]


def _metadata(
    prepared: Prepared,
    bundle_id: str,
    reporter: Reporter,
    progress: trainer.Progress,
    loop: trainer.Trainer,
    parameters: int,
    weight_bytes: int,
    targets: list[str],
    started: float,
    step: int,
) -> dict[str, Any]:
    """What a person needs to know about an adapter years later. Losses are the mean loss of each optimizer step."""
    rows = prepared.train
    capability = prepared.capability
    return {
        "format": 1,
        "bundle_id": bundle_id,
        "run": read_json(prepared.output.parent / RUN_NAME),
        "started": datetime.datetime.fromtimestamp(started, datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": artifacts.library_versions(),
        "device": {
            "name": artifacts.gpu_name() or "cpu",
            "compute_capability": list(capability) if capability else None,
            "peak_memory_bytes": trainer.peak_memory_bytes(),
        },
        "precision": {
            "compute": prepared.precise.compute,
            "adapter": prepared.precise.adapter,
            "reason": prepared.precise.reason,
            "quantization": "nf4" if prepared.quantized else "none",
        },
        "adapter": {"trainable_parameters": parameters, "targets": targets},
        "weight_bytes": weight_bytes,
        "measures": loop.measures.record(),
        "data": {
            "files": [
                {"path": path, "sha256": sha256_file(prepared.output.parent / path)}
                for path in (source.path for source in _sources(prepared))
            ],
            "rows": len(rows),
            "eval_rows": len(prepared.evaluation),
            "tokens": sum(len(row.input_ids) for row in rows),
            "scored_tokens": sum(label != IGNORED_LABEL for row in rows for label in row.labels),
            "longest_row_tokens": max(len(row.input_ids) for row in rows),
        },
        "step": step,
        "steps": loop.state.global_step,
        "segments": segments(reporter.events.path),
        "train_s": loop.seconds(),
        "tokens_seen": loop.tokens_seen,
        "losses": [[step, round(loss, 6)] for step, loss in progress.losses],
        "eval_losses": [[step, round(loss, 6)] for step, loss in progress.eval_losses],
        "first_step_s": progress.first_step_s,
        "phases_s": dict(reporter.phases),
    }
