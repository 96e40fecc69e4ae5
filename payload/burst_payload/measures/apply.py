"""The seam between a run and its measures: decide, apply, and keep a record of both."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from burst_payload.measures import structure, table
from burst_payload.measures.patches import NotHere, Patches
from burst_payload.stop import ExitCode, Stop

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from burst_payload.config import RunConfig


@dataclass
class Subject:
    """What a measure works on. ``trainer`` is None where a model is looked at alone."""

    model: torch.nn.Module
    trainer: Any = None
    tile_tokens: int = table.TILE_TOKENS


@dataclass
class Applied:
    """The measures that are in force, and why the others are not."""

    patches: dict[str, Patches] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, dict[str, str]]:
        """For metadata and events: name to detail of what runs, and name to reason of what does not."""
        return {"applied": {name: patch.detail for name, patch in self.patches.items()}, "skipped": self.skipped}

    def undo(self) -> None:
        for patch in reversed(self.patches.values()):
            patch.undo()
        self.patches.clear()


def facts_of(subject: Subject, config: RunConfig, on_gpu: bool) -> table.Facts:
    """What the table's conditions ask about, seen on the model itself."""
    checkpointing = config.train.gradient_checkpointing
    return table.Facts(
        on_gpu=on_gpu,
        first_trained_layer=structure.first_trained_layer(subject.model),
        dropout=config.adapter.dropout > 0,
        dora=config.adapter.dora,
        gated_mlp=bool(structure.gated_mlps(subject.model)),
        longest_tokens=config.train.batch * max(map(len, subject.trainer.train_dataset["input_ids"]), default=0),
        checkpointing=checkpointing == "on" or (checkpointing == "auto" and on_gpu),
    )


def apply(
    trainer: Any,
    config: RunConfig,
    on_gpu: bool,
    emit: Callable[..., None],
    *,
    tight: bool = False,
    tile_tokens: int = table.TILE_TOKENS,
) -> Applied:
    """Apply the run's measures to a built trainer and its model.

    ``tight``: memory is short, take those that cost time too. ``tile_tokens``: what an MLP works on at a time.
    Raises ``Stop`` where a measure that was asked for does not apply.
    """
    subject = Subject(trainer.model, trainer, tile_tokens)
    asked = config.train.measures
    choice = table.choose(asked, facts_of(subject, config, on_gpu), tight=tight)
    applied = Applied(skipped=dict(choice.skipped))
    for name in choice.taken:
        module = importlib.import_module(f"burst_payload.measures.{name}")
        try:
            applied.patches[name] = module.apply(subject)
        except NotHere as reason:
            if asked is not None:
                applied.undo()
                raise Stop(
                    f"train.measures: {name} does not apply: {reason}",
                    "take it out of train.measures, or set it to auto",
                    ExitCode.INVALID,
                ) from reason
            applied.skipped[name] = str(reason)
    emit("measures", **applied.record())
    return applied
