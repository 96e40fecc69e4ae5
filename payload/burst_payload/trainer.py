"""The training loop: TRL's ``SFTTrainer`` on rows that are tokenized and masked already.

Nothing of the library touches the data: rows come with ``input_ids`` and ``labels``, and its own preparation (with its
truncation and its silent dropping of rows) is off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from burst_payload import audits, stop
from burst_payload.measures.apply import Applied
from burst_payload.model import optimizer_name
from burst_payload.stop import Stop

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel

    from burst_payload.chat import Example
    from burst_payload.config import RunConfig
    from burst_payload.precision import Precision

Emit = Callable[..., None]


def training_arguments(config: RunConfig, precise: Precision, output: Path, on_gpu: bool, evaluates: bool) -> SFTConfig:
    """TRL's configuration of a run. Building it finds every option that the installed versions do not accept."""
    train = config.train
    checkpointing = train.gradient_checkpointing == "on" or (train.gradient_checkpointing == "auto" and on_gpu)
    return SFTConfig(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=train.epochs,
        max_steps=train.max_steps or -1,
        per_device_train_batch_size=train.batch,
        per_device_eval_batch_size=train.batch,
        gradient_accumulation_steps=train.effective_batch // train.batch,
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.scheduler,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=optimizer_name(config, on_gpu),
        seed=train.seed,
        data_seed=train.seed,
        bf16=on_gpu and precise.compute == "bfloat16",
        fp16=on_gpu and precise.compute == "float16",
        use_cpu=not on_gpu,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataset_num_proc=None,
        eval_strategy="steps" if evaluates and train.eval_steps else "no",
        eval_steps=train.eval_steps,
        prediction_loss_only=True,
        save_strategy="steps" if train.save_steps else "no",
        save_steps=train.save_steps or 500,
        save_only_model=True,
        save_total_limit=2,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        push_to_hub=False,
        dataloader_pin_memory=on_gpu,
    )


class Trainer(SFTTrainer):
    """``SFTTrainer`` that counts the tokens it is fed."""

    tokens_seen = 0
    measures = Applied()

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        stop.check()
        self.tokens_seen += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *args, **kwargs)


class Progress(TrainerCallback):  # type: ignore[misc]
    """Reports each step and stops on the first sign that training is not sound."""

    def __init__(self, emit: Emit, initial_lora_b: dict[str, torch.Tensor], logging_steps: int) -> None:
        self.emit = emit
        self.initial = initial_lora_b
        self.every = logging_steps
        self.trainer: Trainer | None = None
        self.losses: list[tuple[int, float]] = []
        self.eval_losses: list[tuple[int, float]] = []
        self.first_step_s: float | None = None
        self._mark: tuple[float, int] | None = None
        self._learning_rate = 0.0
        self._started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self.emit("plan", steps=state.max_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step that had a learning rate (warm-up starts at zero), every ``lora_B`` has moved."""
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self._started
        if not self.initial or self._learning_rate == 0.0:
            return
        still = audits.untouched(kwargs["model"], self.initial)
        if still:
            raise Stop(
                f"{len(still)} of {len(self.initial)} lora_B matrices did not move in optimizer step "
                f"{state.global_step} (the first: {still[0]})",
                "the adapter gets no gradient there: check targets and checkpointing",
            )
        self.initial = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "eval_loss" in logs:
            self._finite("evaluation loss", logs["eval_loss"], state.global_step)
            self.eval_losses.append((state.global_step, logs["eval_loss"]))
            self.emit("eval", step=state.global_step, loss=logs["eval_loss"])
        if "loss" not in logs:
            return
        step = state.global_step
        self._finite("loss", logs["loss"], step)
        self._finite("gradient norm", logs.get("grad_norm", 0.0), step)
        self.losses.append((step, logs["loss"]))
        now, tokens = time.monotonic(), self.trainer.tokens_seen if self.trainer else 0
        rate = None
        if self._mark is not None and now > self._mark[0]:
            rate = (tokens - self._mark[1]) / (now - self._mark[0])
        self._mark = (now, tokens)
        if step % self.every == 0 or step in (1, state.max_steps):
            self.emit(
                "step",
                step=step,
                steps=state.max_steps,
                loss=logs["loss"],
                grad_norm=logs.get("grad_norm"),
                learning_rate=logs.get("learning_rate"),
                epoch=logs.get("epoch"),
                tokens=tokens,
                tokens_per_s=rate,
                memory_bytes=peak_memory_bytes(),
            )

    def _finite(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise Stop(
                f"the {name} is {value} at step {step}",
                "lower train.learning_rate, or look at the rows of this step; nothing was saved",
            )


def build(
    model: PeftModel,
    arguments: SFTConfig,
    tokenizer: Any,
    train: list[Example],
    evaluation: list[Example],
    progress: Progress,
) -> Trainer:
    """The trainer, with the model and data it will use."""
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=as_dataset(train),
        eval_dataset=as_dataset(evaluation) if evaluation else None,
        processing_class=tokenizer,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)  # its lines say less than ours
    progress.trainer = trainer
    return trainer


def as_dataset(examples: list[Example]) -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [example.input_ids for example in examples],
            "labels": [example.labels for example in examples],
        }
    )


def peak_memory_bytes() -> int:
    """Peak memory so far: allocated on the GPU, else the resident size of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
