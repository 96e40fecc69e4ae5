"""The training core on one GPU beside TRL, TRL + Liger and Unsloth: peak memory and tokens per second, all in one call.

    python benchmarks/train_gpu.py [--cases NAME,...] [--budget-s 480] [--tiny] [--out FILE]

Random weights of the true shapes (``random_models.py``); each case in a process of its own, the first steps apart, the median of
the others. Needs torch with CUDA and bitsandbytes, PEFT, TRL; Liger and Unsloth where they are installed. ``--tiny`` runs burst's cases with
small widths, on a CPU too, to try the program.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GIB = 1 << 30
GEMMA, QWEN27, CODER = "google/gemma-3-4b", "Qwen/Qwen3.6-27B", "Qwen/Qwen3-Coder-30B-A3B-Instruct"
ALL_TIGHT = ["scored_logits", "fused_lora", "tiled_mlp", "boundary_offload"]
CUT_TIGHT = ["scored_logits", "graph_cut", "fused_lora", "tiled_mlp", "boundary_offload"]


@dataclass(frozen=True)
class Case:
    """One line of the table. ``trainer``: burst, trl, trl-offload, trl-liger or unsloth; ``measures``: None is burst's own choice."""

    name: str
    trainer: str
    model: str
    rank: int
    length: int
    layers: int | None = None
    last_layers: int | None = None
    measures: list[str] | None = None
    targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    prefix: int = 0
    batch: int = 1
    steps: int = 7
    warm: int = 3


CASES = [
    Case("gemma burst", "burst", GEMMA, 112, 6400),
    Case("gemma burst all", "burst", GEMMA, 112, 6400, measures=ALL_TIGHT),
    Case("gemma unsloth", "unsloth", GEMMA, 112, 6400),
    Case("gemma trl", "trl", GEMMA, 112, 6400),
    Case("gemma trl+liger", "trl-liger", GEMMA, 112, 6400),
    Case("27b last16 burst", "burst", QWEN27, 8, 7680, last_layers=16, steps=4, warm=2),
    Case("27b last16 burst all", "burst", QWEN27, 8, 7680, last_layers=16, measures=CUT_TIGHT, steps=4, warm=2),
    Case("27b all64 burst all", "burst", QWEN27, 16, 7680, measures=ALL_TIGHT, steps=3, warm=1),
    Case("gemma r256 burst all", "burst", GEMMA, 256, 6400, measures=ALL_TIGHT),
    Case("coder8 burst", "burst", CODER, 16, 2048, layers=8),
    Case("coder8 unsloth", "unsloth", CODER, 16, 2048, layers=8),
    Case("coder8 trl", "trl", CODER, 16, 2048, layers=8),
    Case("coder48 burst", "burst", CODER, 16, 2048, steps=4, warm=2),
    Case("gemma prefix8 burst", "burst", GEMMA, 112, 6400, prefix=5000, batch=8),
    Case("gemma prefix8 unsloth", "unsloth", GEMMA, 112, 6400, prefix=5000, batch=8),
    Case("27b last16 trl", "trl", QWEN27, 8, 7680, last_layers=16, steps=3, warm=1),
    Case("gemma trl+offload", "trl-offload", GEMMA, 112, 6400),
    *(
        Case(f"gemma {k}k burst all", "burst", GEMMA, 112, 1024 * k, measures=ALL_TIGHT, steps=4, warm=2)
        for k in (2, 4, 8, 16, 32, 64)
    ),
]
CASE_LIMIT_S = 170


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", help="names, or beginnings of names, separated by commas")
    parser.add_argument("--budget-s", type=float, default=480.0, help="no case is started after this")
    parser.add_argument("--tiny", action="store_true", help="small widths, and a few hundred tokens")
    parser.add_argument("--out", type=Path, help="write each result as a line of JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("RESULT " + json.dumps(child(Case(**json.loads(options.child)), tiny=options.tiny)), flush=True)
        return
    started, results = time.monotonic(), []
    wanted = options.cases.split(",") if options.cases else [""]
    chosen = [case for case in CASES if any(case.name.startswith(name) for name in wanted)]
    ceiling = json.loads(spawn(["--child", json.dumps(asdict(Case("ceiling", "ceiling", "", 0, 0)))], 90)["line"])
    print(
        f"{ceiling['device']}: {ceiling['tflops']:.0f} TFLOP/s in bf16 products of random data; {ceiling['versions']}"
    )
    for case in chosen:
        if time.monotonic() - started > options.budget_s:
            results.append({"case": case.name, "error": "not run: the time was used up"})
            continue
        began = time.monotonic()
        found = spawn(["--child", json.dumps(asdict(case)), *(["--tiny"] if options.tiny else [])], CASE_LIMIT_S)
        result = {"case": case.name, **(json.loads(found["line"]) if found["line"] else {"error": found["error"]})}
        result["wall_s"] = round(time.monotonic() - began, 1)
        results.append(result)
        print(row(result, ceiling["tflops"]), flush=True)
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps(result | {"ceiling": ceiling}) + "\n")
    print(
        f"\n{'case':24} {'peak GiB':>9} {'reserved':>9} {'weights':>8} {'tokens/s':>9} {'step s':>8} {'of ceiling':>10}"
    )
    for result in results:
        print(row(result, ceiling["tflops"]))


def row(result: dict[str, Any], tflops: float) -> str:
    if "error" in result:
        return f"{result['case']:24} {result['error'].splitlines()[-1][:150] if result['error'] else 'no word'}"
    share = result["flops_per_token"] * result["tokens_per_s"] / 1e12 / tflops if tflops else 0.0
    return (
        f"{result['case']:24} {result['peak_bytes'] / GIB:9.2f} {result['reserved_bytes'] / GIB:9.2f} "
        f"{result['weights_bytes'] / GIB:8.2f} {result['tokens_per_s']:9,.0f} {result['step_s']:8.3f} {share:10.1%}"
        f"  loss {result['losses'][0]:.4f} {result['note']}"
    )


def spawn(arguments: list[str], limit_s: float) -> dict[str, str]:
    """One case in a process of its own: its result as a line of JSON, or the end of what it said."""
    environment = {
        **os.environ,
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    try:
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"line": "", "error": f"not ended after {limit_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {"line": lines[-1][7:] if lines else "", "error": (done.stderr or done.stdout).strip()[-1500:]}


def child(case: Case, *, tiny: bool) -> dict[str, Any]:
    import torch

    if case.trainer == "ceiling":
        return ceiling()
    on_gpu = torch.cuda.is_available()
    try:
        return {"burst": burst, "unsloth": unsloth}.get(case.trainer, trl)(case, tiny=tiny, on_gpu=on_gpu)
    except Exception:
        traceback.print_exc()
        raise


def ceiling() -> dict[str, Any]:
    """The card's rate in large bf16 products of random data."""
    import importlib.metadata

    import torch

    names = ("torch", "transformers", "trl", "peft", "bitsandbytes", "liger-kernel", "unsloth", "triton")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not torch.cuda.is_available():
        return {"device": "cpu", "tflops": 0.0, "versions": versions}
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    rate = 2 * 8192**3 / statistics.median(times[4:]) / 1e12
    return {"device": torch.cuda.get_device_name(0), "tflops": rate, "versions": versions}


def burst(case: Case, *, tiny: bool, on_gpu: bool) -> dict[str, Any]:
    """Through the payload's own functions: adapter, trainer, measures."""
    from random_models import adapted, loop_of, random_base, rows, run_config, text_config

    from burst_payload.measures import apply

    length = 192 if tiny else case.length
    config = text_config(case.model, layers=case.layers, tiny=tiny)
    base = random_base(config, quantized=on_gpu, device="cuda" if on_gpu else "cpu")
    measures = case.measures
    run = run_config(
        rank=4 if tiny else case.rank,
        length=length,
        targets=case.targets,
        last_layers=min(case.last_layers, 2) if tiny and case.last_layers else case.last_layers,
        measures=measures,
        quantized=on_gpu,
        effective_batch=case.batch,
        steps=case.steps,
    )
    wrapped = adapted(base, run)
    clock = Clock(case, length)
    with tempfile.TemporaryDirectory() as folder:
        data = rows(length, case.steps * case.batch, config.vocab_size, prefix=length * case.prefix // case.length)
        loop = loop_of(wrapped, run, data, tokenizer(folder), Path(folder), clock.emit)
        loop.measures = apply.apply(loop, run, on_gpu, clock.emit)
        clock.weights(wrapped)
        loop.run(None)
        return clock.result(wrapped, json.dumps(loop.measures.record()["applied"]))


def trl(case: Case, *, tiny: bool, on_gpu: bool) -> dict[str, Any]:
    """TRL's own trainer on the same model and adapter, as its documentation sets it up for QLoRA."""
    from random_models import adapted, random_base, rows, run_config, text_config
    from trl import SFTTrainer

    from burst_payload.trainer import as_dataset

    length = 192 if tiny else case.length
    config = text_config(case.model, layers=case.layers, tiny=tiny)
    base = random_base(config, quantized=on_gpu, device="cuda" if on_gpu else "cpu")
    run = run_config(rank=4 if tiny else case.rank, length=length, targets=case.targets, last_layers=case.last_layers)
    wrapped = adapted(base, run)
    clock = Clock(case, length)
    with tempfile.TemporaryDirectory() as folder:
        data = rows(length, case.steps * case.batch, config.vocab_size, prefix=length * case.prefix // case.length)
        arguments = sft_arguments(case, folder, on_gpu)
        loop = SFTTrainer(
            model=wrapped,
            args=arguments,
            train_dataset=as_dataset(data),
            processing_class=tokenizer(folder),
            callbacks=[clock.callback()],
        )
        clock.weights(wrapped)
        loop.train()
        return clock.result(wrapped, "")


def sft_arguments(case: Case, folder: str, on_gpu: bool) -> Any:
    from trl import SFTConfig

    return SFTConfig(
        output_dir=folder,
        max_steps=case.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case.batch,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        optim="paged_adamw_8bit" if on_gpu else "adamw_torch",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        activation_offloading=case.trainer == "trl-offload",
        use_liger_kernel=case.trainer == "trl-liger",
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        save_strategy="no",
        seed=1,
        data_seed=1,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def unsloth(case: Case, *, tiny: bool, on_gpu: bool) -> dict[str, Any]:
    """Unsloth's own loading, adapter and checkpointing on a random checkpoint of the same shape."""
    import torch
    from random_models import random_base, rows, text_config
    from trl import SFTTrainer
    from unsloth import FastLanguageModel  # first: it patches the others

    from burst_payload.trainer import as_dataset

    length = 192 if tiny else case.length
    config = text_config(case.model, layers=case.layers, tiny=tiny)
    with tempfile.TemporaryDirectory() as folder:
        base = random_base(config, quantized=False, device="cuda" if on_gpu else "cpu")
        base.save_pretrained(folder)
        words = tokenizer(folder)
        del base
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        wrapped, _ = FastLanguageModel.from_pretrained(
            folder, max_seq_length=length, load_in_4bit=True, dtype=torch.bfloat16, local_files_only=True
        )
        wrapped = FastLanguageModel.get_peft_model(
            wrapped,
            r=case.rank,
            lora_alpha=2 * case.rank,
            lora_dropout=0,
            bias="none",
            target_modules=case.targets,
            use_gradient_checkpointing="unsloth",
            random_state=1,
        )
        clock = Clock(case, length)
        data = rows(length, case.steps * case.batch, config.vocab_size, prefix=length * case.prefix // case.length)
        loop = SFTTrainer(
            model=wrapped,
            args=sft_arguments(case, folder, on_gpu),
            train_dataset=as_dataset(data),
            processing_class=words,
            callbacks=[clock.callback()],
        )
        clock.weights(wrapped)
        loop.train()
        return clock.result(wrapped, "")


def tokenizer(folder: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    from burst_payload import tiny

    tiny.write_tokenizer(Path(folder))
    return PreTrainedTokenizerFast.from_pretrained(folder)


class Clock:
    """Times of optimizer steps, the peak over those after the warm-up, and losses."""

    def __init__(self, case: Case, length: int) -> None:
        self.case, self.length = case, length
        self.marks: list[float] = []
        self.losses: list[float] = []
        self.weights_bytes = 0

    def weights(self, wrapped: Any) -> None:
        """What lies on the card before the first step, and a fresh peak."""
        import torch

        gc.collect()
        self.linear = sum(
            module.in_features * module.out_features
            for name, module in wrapped.named_modules()
            if hasattr(module, "in_features") and "lora_" not in name and not hasattr(module, "base_layer")
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.weights_bytes = torch.cuda.memory_allocated()
        self.marks.append(time.perf_counter())

    def emit(self, kind: str, **fields: Any) -> None:
        if kind == "step":
            self.step(fields["loss"])

    def step(self, loss: float) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())
        self.losses.append(loss)

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Listener(TrainerCallback):  # type: ignore[misc]
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                if "loss" in (logs or {}):
                    clock.step(float(logs["loss"]))

        return Listener()

    def result(self, wrapped: Any, note: str) -> dict[str, Any]:
        import torch

        times = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)][self.case.warm :]
        step_s = statistics.median(times)
        on_gpu = torch.cuda.is_available()
        return {
            "step_s": step_s,
            "steps_s": [round(value, 4) for value in times],
            "first_step_s": self.marks[1] - self.marks[0],
            "tokens_per_s": self.length * self.case.batch / step_s,
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
            "weights_bytes": self.weights_bytes,
            "trainable": sum(p.numel() for p in wrapped.parameters() if p.requires_grad),
            "flops_per_token": 6 * self.linear,
            "losses": self.losses,
            "note": note,
        }


if __name__ == "__main__":
    main()
