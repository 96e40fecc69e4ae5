"""The memory measures as a table: what each changes in the memory formula, what it costs in time, and who has it.

One row a measure. ``estimate.memory`` reads ``Settings`` only, so a new measure is a new row here (and, where it changes
something that no row changed before, a new field).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What the memory and time formulas read. The defaults are training without any measure."""

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


@dataclass(frozen=True)
class Measure:
    """One measure. ``built``: the payload of this version has it. ``time``: factor on the training time, roughly."""

    name: str
    what: str
    changes: dict[str, Any] = field(hash=False)
    built: bool
    time: float = 1.0


TABLE: dict[str, Measure] = {
    row.name: row
    for row in (
        Measure(
            "scored_logits",
            "logits only where tokens are scored, in tiles (TRL 1.16's fused head)",
            {"scored_logits": True},
            built=True,
        ),
        Measure("no_upcast", "embeddings and head stay in 16 bits", {"upcast": False}, built=True),
        Measure("optimizer_8bit", "8-bit AdamW", {"optimizer_8bit": True}, built=True),
        Measure(
            "optimizer_paged",
            "optimizer state may move to main memory",
            {"optimizer_paged": True},
            built=True,
            time=1.01,
        ),
        Measure(
            "checkpointing",
            "layer inputs are kept, the rest is computed again in the backward pass",
            {"checkpointing": True},
            built=True,
            time=1.4,
        ),
        Measure(
            "graph_cut",
            "frozen layers below the first trained one run without a graph",
            {"graph_cut": True},
            built=False,
            time=0.6,
        ),
        Measure(
            "tiled_mlp", "the MLP runs over 2,048 tokens at a time", {"mlp_tile_tokens": 2048}, built=False, time=1.02
        ),
        Measure(
            "boundary_offload", "layer inputs wait in main memory", {"boundaries_in_ram": True}, built=False, time=1.06
        ),
        Measure("experts_4bit", "expert weights in NF4", {"experts_4bit": True}, built=False, time=1.3),
        Measure(
            "fused_kernels", "Liger kernels for norms and gated units", {"fused_kernels": True}, built=False, time=0.8
        ),
        Measure("linear_kernels", "kernels for linear attention", {"linear_kernels": True}, built=False, time=0.5),
    )
}
"""Ordered from what costs nothing to what costs most."""

ALWAYS = ("scored_logits", "no_upcast")
"""What the payload does in every run."""


def settings(names: frozenset[str] | set[str] | tuple[str, ...]) -> Settings:
    """The settings of a set of measures."""
    made = Settings()
    for name in names:
        made = replace(made, **TABLE[name].changes)
    return made


def of_training(optimizer: str, gradient_checkpointing: str, *, on_gpu: bool) -> frozenset[str]:
    """The measures of a run with these settings of ``train``, as the payload resolves them."""
    names = set(ALWAYS)
    if gradient_checkpointing == "on" or (gradient_checkpointing == "auto" and on_gpu):
        names.add("checkpointing")
    chosen = ("paged_adamw_8bit" if on_gpu else "adamw_torch") if optimizer == "auto" else optimizer
    if "8bit" in chosen:
        names.add("optimizer_8bit")
    if "paged" in chosen:
        names.add("optimizer_paged")
    return frozenset(names)


def unbuilt() -> list[str]:
    """Measures that are known and not in this version's payload."""
    return [name for name, row in TABLE.items() if not row.built]
