"""The training loop: TRL's ``SFTTrainer`` on rows that are tokenized and masked already.

Nothing of the library touches the data: rows come with ``input_ids`` and ``labels``, and its own preparation (with its
truncation and its silent dropping of rows) is off.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from burst_payload import audits, pulse, ranks, shares, stop, training_state
from burst_payload.chat import IGNORED_LABEL
from burst_payload.checkpoints import STATE_NAME
from burst_payload.measures.apply import Applied
from burst_payload.model import optimizer_name
from burst_payload.records import reach, read_json
from burst_payload.stop import ExitCode, Stop
from burst_payload.training_state import Boundary
from burst_payload.watchdog import Pace

if TYPE_CHECKING:
    from peft import PeftModel

    from burst_payload.chat import Example
    from burst_payload.checkpoints import Checkpoint
    from burst_payload.config import RunConfig, Train
    from burst_payload.precision import Precision
    from burst_payload.saver import Saver

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
        gradient_accumulation_steps=accumulation(train),
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
        ddp_backend="gloo" if ranks.count() > 1 and not on_gpu else None,
        ddp_find_unused_parameters=False,  # every adapter matrix is used in every pass
        ddp_broadcast_buffers=False,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if checkpointing else None,
        max_length=None,
        packing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        dataset_num_proc=None,
        eval_strategy="steps" if evaluates and train.eval_steps else "no",
        eval_steps=train.eval_steps,
        prediction_loss_only=True,
        save_strategy="no",  # checkpoints are our own: saver.py
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        push_to_hub=False,
        dataloader_pin_memory=on_gpu,
    )


def accumulation(train: Train) -> int:
    """Micro-steps of each process in an optimizer step. Raises ``Stop`` where the effective batch cannot be shared out."""
    together = train.batch * ranks.count()
    if train.effective_batch % together:
        raise Stop(
            f"train.effective_batch {train.effective_batch} cannot be shared by {ranks.count()} GPUs with batches of {train.batch}",
            f"make it a multiple of {together}, or take fewer GPUs",
            ExitCode.INVALID,
        )
    return train.effective_batch // together


class Trainer(SFTTrainer):
    """``SFTTrainer`` whose checkpoints are verified folders, whose evaluation weighs tokens, and which can end between steps."""

    progress: Progress
    saver: Saver | None = None
    boundary: Boundary | None = None
    """The moment after the newest optimizer step; None while a step is being made."""
    tokens_seen = 0
    measures = Applied()
    _resumed_s = 0.0
    _fresh_tokens = 0
    _started = 0.0
    _scored_loss = 0.0
    _scored = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pace = Pace()

    def run(self, start: Checkpoint | None) -> None:
        """Train to the end, from a checkpoint or from the beginning. A signal ends it after a checkpoint (``Interrupted``)."""
        self._started = time.monotonic()
        if start is not None:
            self.tokens_seen, self._resumed_s = start.state["tokens"], start.state["seconds"]
            self.progress.restore(start.state["progress"])
            if self.progress.stopped_early or start.step >= self.progress.last_step:
                training_state.load_adapter(self.model, start.folder)
                self.state.global_step = start.step
                return
        try:
            with stop.deferred():
                self.train(resume_from_checkpoint=str(start.folder) if start else None)
        except stop.Interrupted:
            if self.boundary is not None and self.saver is not None and not stop.at_once():
                self.saver.save(self, self.boundary, self.progress.to_json())
            raise

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        pulse.beat(micro=self.state.global_step)
        reach(f"micro-step {self.state.global_step}")
        stop.check()
        started, tokens = time.monotonic(), inputs["input_ids"].numel()
        self._fresh_tokens += tokens
        loss = super().training_step(model, inputs, *args, **kwargs)
        if slow := self._pace.step(time.monotonic() - started, tokens):
            self.progress.emit("note", text=slow)
        return loss

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One batch of the evaluation; its loss counts by its scored tokens, and no logits are kept."""
        pulse.beat(batch=self.state.global_step)
        reach("evaluate batch")
        stop.check()
        scored = int((inputs["labels"][..., 1:] != IGNORED_LABEL).sum())
        found = super().prediction_step(model, inputs, *args, **kwargs)
        self._scored_loss += float(found[0]) * scored
        self._scored += scored
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._scored_loss, self._scored = 0.0, 0
        output = super().evaluation_loop(*args, **kwargs)
        loss, scored = self._summed(self._scored_loss, self._scored)
        output.metrics["eval_loss"] = loss / scored
        return output

    def _summed(self, *values: float) -> list[float]:
        """The sums of numbers over all processes."""
        if ranks.count() == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.args.device)
        return [float(value) for value in self.accelerator.reduce(together, "sum")]

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if ranks.count() == 1:
            return super()._get_train_sampler(train_dataset)
        return shares.Filled(len(self.train_dataset) - 1, self._round_rows(), self.args.data_seed)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if ranks.count() == 1:
            return super()._get_eval_sampler(eval_dataset)
        return shares.Filled(len(eval_dataset) - 1, self._round_rows())

    def _round_rows(self) -> int:
        return int(self.args.per_device_train_batch_size) * ranks.count()

    def seconds(self) -> float:
        """Time in the training loop so far, former segments included."""
        return round(self._resumed_s + time.monotonic() - self._started, 3)

    def _now(self) -> Boundary:
        return Boundary(self.state.global_step, training_state.random_states(), self.tokens_seen, self.seconds())

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        (fresh,) = self._summed(self._fresh_tokens)
        self.tokens_seen, self._fresh_tokens = self.tokens_seen + int(fresh), 0
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.boundary = self._now()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.saver is not None:
            self.saver.save(self, self._now(), self.progress.to_json())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        training_state.load_adapter(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        training_state.load_optimizer(self.optimizer, self.model, Path(checkpoint))
        self.lr_scheduler.load_state_dict(read_json(Path(checkpoint) / STATE_NAME)["scheduler"])

    def _load_scaler(self, checkpoint: str | None) -> None:
        saved = read_json(Path(checkpoint) / STATE_NAME)["scaler"] if checkpoint else None
        if saved and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(saved)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            training_state.set_random_states(read_json(Path(checkpoint) / STATE_NAME)["random"])


class Progress(TrainerCallback):  # type: ignore[misc]
    """Reports each step and stops on the first sign that training is not sound."""

    def __init__(
        self, emit: Emit, initial_lora_b: dict[str, torch.Tensor], train: Train, last_step: int, *, evaluates: bool
    ) -> None:
        self.emit = emit
        self.initial = initial_lora_b
        self.every = train.logging_steps
        self.last_step = last_step
        self.keeps_best = train.keep == "best" and evaluates
        self.patience = train.patience
        self.trainer: Trainer | None = None
        self.losses: list[tuple[int, float]] = []
        self.eval_losses: list[tuple[int, float]] = []
        self.first_step_s: float | None = None
        self.stopped_early = False
        self._mark: tuple[float, int] | None = None
        self._learning_rate = 0.0
        self._started = time.monotonic()

    @property
    def best_step(self) -> int | None:
        """The step with the lowest evaluation loss, the earliest of equal ones."""
        return min(self.eval_losses, key=lambda item: item[1])[0] if self.eval_losses else None

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "losses": self.losses,
            "eval_losses": self.eval_losses,
            "first_step_s": self.first_step_s,
            "stopped_early": self.stopped_early,
        }

    def restore(self, value: dict[str, Any]) -> None:
        self.losses = [(step, loss) for step, loss in value["losses"]]
        self.eval_losses = [(step, loss) for step, loss in value["eval_losses"]]
        self.first_step_s, self.stopped_early = value["first_step_s"], value["stopped_early"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self.emit("plan", steps=state.max_steps)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])
        if self.trainer is not None:
            self.trainer.boundary = None  # until the step is whole, there is nothing to save

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step that had a learning rate (warm-up starts at zero), every ``lora_B`` has moved."""
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self._started
        if self.trainer is not None and self.trainer.saver is not None:
            control.should_save = self.trainer.saver.due(state.global_step, self.last_step)
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
            self._evaluated(logs["eval_loss"], state.global_step, control)
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

    def _evaluated(self, loss: float, step: int, control: Any) -> None:
        """Note an evaluation; save a new best one, and end where patience is at its end."""
        self._finite("evaluation loss", loss, step)
        self.eval_losses.append((step, loss))
        self.emit("eval", step=step, loss=loss)
        saver = self.trainer.saver if self.trainer is not None else None
        best = self.best_step
        if self.keeps_best and saver is not None and best is not None:
            saver.keep = {best}
            control.should_save = control.should_save or best == step
        since_best = sum(other > (best or 0) for other, _ in self.eval_losses)
        if self.patience is not None and since_best >= self.patience and step < self.last_step:
            self.emit("note", text=f"stopped early: {since_best} evaluations without a better one than step {best}")
            self.stopped_early = control.should_training_stop = control.should_save = True

    def _finite(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            raise Stop(
                f"the {name} is {value} at step {step}",
                "lower train.learning_rate, or look at the rows of this step; the checkpoint before it stands",
            )


def build(
    model: PeftModel,
    arguments: SFTConfig,
    tokenizer: Any,
    train: list[Example],
    evaluation: list[Example],
    progress: Progress,
    saver: Saver | None,
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
    progress.trainer, trainer.progress, trainer.saver = trainer, progress, saver
    return trainer


def as_dataset(examples: list[Example]) -> Dataset:
    """The rows; where several processes share them, a blank one after the last."""
    if ranks.count() > 1:
        examples = [*examples, shares.blank(examples)]
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
