"""The memory measures as a table: what each changes in the formulas of memory and time.

One row a measure. ``estimate`` and ``duration`` read ``Settings`` only, so a new measure is a new row here (and, where it
changes something that no row changed before, a new field). Which of them a run takes, the payload's own table decides.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from burst_payload.measures import table

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Settings:
    """What the memory and time formulas read. The defaults are training without any measure.

    ``slower``: a factor on the training time that no formula has otherwise.
    """

    checkpointing: bool = False
    boundaries_in_ram: bool = False
    graph_cut: bool = False
    mlp_tile_tokens: int | None = None
    scored_logits: bool = False
    upcast: bool = True
    optimizer_8bit: bool = False
    optimizer_paged: bool = False
    experts_4bit: bool = False
    fused_kernels: bool = False
    linear_kernels: bool = False
    slower: float = 1.0


@dataclass(frozen=True)
class Effect:
    """What one measure changes. ``of_run``: it follows from the run's settings, not from ``train.measures``."""

    name: str
    what: str
    changes: dict[str, Any] = field(hash=False)
    of_run: bool = False

    @property
    def built(self) -> bool:
        """Whether the payload of this version has it."""
        return self.of_run or self.name in table.NAMES


TABLE: dict[str, Effect] = {
    row.name: row
    for row in (
        Effect("no_upcast", "embeddings and head stay in 16 bits", {"upcast": False}, of_run=True),
        Effect("optimizer_8bit", "8-bit AdamW", {"optimizer_8bit": True}, of_run=True),
        Effect("optimizer_paged", "optimizer state may move to main memory", {"optimizer_paged": True}, of_run=True),
        Effect(
            "checkpointing",
            "layer inputs are kept, the rest is computed again in the backward pass",
            {"checkpointing": True},
            of_run=True,
        ),
        Effect("scored_logits", "logits only where tokens are scored, in tiles", {"scored_logits": True}),
        Effect("graph_cut", "frozen layers below the first trained one run without a graph", {"graph_cut": True}),
        Effect("fused_lora", "a projection and its LoRA pair are one function", {}),
        Effect("tiled_mlp", "the MLP runs over 2,048 tokens at a time", {"mlp_tile_tokens": 2048, "slower": 1.02}),
        Effect("boundary_offload", "layer inputs wait in main memory", {"boundaries_in_ram": True, "slower": 1.06}),
        Effect("experts_4bit", "expert weights in NF4", {"experts_4bit": True, "slower": 1.2}),
        Effect("fused_kernels", "Liger kernels for norms and gated units", {"fused_kernels": True, "slower": 0.85}),
        Effect("linear_kernels", "kernels for linear attention", {"linear_kernels": True}),
    )
}
ALWAYS = ("no_upcast", "scored_logits")
"""What the payload does in every run; TRL 1.16's own head scores in tiles where the payload's is not asked for."""


def settings(names: frozenset[str] | set[str] | tuple[str, ...]) -> Settings:
    """The settings of a set of measures; a name without a row changes nothing."""
    made = Settings()
    for name in sorted(names):
        changes = dict(TABLE[name].changes) if name in TABLE else {}
        slower = changes.pop("slower", 1.0) * made.slower
        made = replace(made, **changes, slower=slower)
    return made


@dataclass(frozen=True)
class Training:
    """The settings of a run that decide about its measures. ``asked``: ``train.measures``."""

    optimizer: str = "auto"
    gradient_checkpointing: str = "auto"
    asked: tuple[str, ...] | None = None
    first_trained_layer: int = 0
    longest_tokens: int = 0
    dropout: bool = False
    dora: bool = False
    gated_mlp: bool = True


def taken(training: Training, *, on_gpu: bool, tight: bool = False) -> frozenset[str]:
    """The measures of a run, as the payload resolves them. ``tight``: also those that cost time.

    Raises ``Stop`` where a measure was asked for that cannot be right here.
    """
    checkpointing = training.gradient_checkpointing
    names = set(ALWAYS)
    if checkpointing == "on" or (checkpointing == "auto" and on_gpu):
        names.add("checkpointing")
    chosen = training.optimizer
    if chosen == "auto":
        chosen = "paged_adamw_8bit" if on_gpu else "adamw_torch"
    names |= {"optimizer_8bit"} if "8bit" in chosen else set()
    names |= {"optimizer_paged"} if "paged" in chosen else set()
    known = {f.name for f in dataclasses.fields(table.Facts)}
    facts = dataclasses.asdict(training) | {"on_gpu": on_gpu, "checkpointing": "checkpointing" in names}
    asked = None if training.asked is None else list(training.asked)
    choice = table.choose(asked, table.Facts(**{k: v for k, v in facts.items() if k in known}), tight=tight)
    return frozenset(names | set(choice.taken))


def ladder(training: Training, *, on_gpu: bool) -> Iterator[frozenset[str]]:
    """Sets of measures to try, from what costs no time to all that exist: the first that fits is the cheapest."""
    base = taken(training, on_gpu=on_gpu)
    yield base
    if training.asked is not None:
        return
    extra = sorted(taken(training, on_gpu=on_gpu, tight=True) - base)
    sets = [base | set(names) for count in range(1, len(extra) + 1) for names in itertools.combinations(extra, count)]
    yield from sorted(sets, key=lambda names: (settings(names).slower, len(names)))


def of_training(optimizer: str, gradient_checkpointing: str, *, on_gpu: bool) -> frozenset[str]:
    """The measures of a run of all layers with these settings."""
    return taken(Training(optimizer, gradient_checkpointing), on_gpu=on_gpu)


def unbuilt() -> list[str]:
    """Measures that are known and not in this version's payload."""
    return [name for name, row in TABLE.items() if not row.built]
