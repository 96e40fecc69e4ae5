"""Memory and time of a training job on a card, by component, from formulas. Pure: no torch, no files, no network.

Formulas, their sources and the figures that they are calibrated on: ``docs/estimates.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from burst.architecture import Architecture, Layer, Pair, lora_pairs, trainable
from burst_payload import precision

if TYPE_CHECKING:
    from burst.cards import Card
    from burst.measures import Settings

GIB = 1 << 30
NF4_BLOCK, NF4_NESTED_BLOCK = 64, 256
CONTEXT_BYTES = 600 << 20
"""CUDA context, libraries and workspaces outside of the allocator: 0.4 to 1.4 GB are reported."""
FRAGMENTATION = 0.05
HEAD_TILE_BYTES = 64 << 20
LINEAR_STATE_BYTES = 80
"""Bytes a token and state channel that linear attention keeps without its kernels: 20 tensors in float32, calibrated."""
EIGHT_BIT_MINIMUM, PAGED_MINIMUM = 4096, 100_000
"""Elements below which bitsandbytes keeps 32-bit state, and below which it does not page it."""
ITEM = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Job:
    """What is trained on what. Lengths in tokens, after cutting; ``scored`` is the most scored tokens of a row.

    ``tokens`` and ``squared`` are sums over one epoch of the lengths and their squares.
    """

    architecture: Architecture
    targets: tuple[str, ...]
    rank: int
    longest: int
    scored: int
    tokens: int
    squared: int
    rows: int
    epochs: float = 1.0
    max_steps: int | None = None
    batch: int = 1
    effective_batch: int = 8
    last_layers: int | None = None
    dora: bool = False
    quantization: Literal["nf4", "none"] = "nf4"
    eval_tokens: int = 0
    evaluations: int = 0
    probe_tokens: int = 0
    scored_share: float = 1.0

    @property
    def steps(self) -> int:
        """Optimizer steps = ceil(epochs · ceil(rows / effective batch)), or the fixed number."""
        if self.max_steps is not None:
            return self.max_steps
        return math.ceil(self.epochs * math.ceil(self.rows / self.effective_batch))

    @property
    def epochs_run(self) -> float:
        return self.steps / max(1, math.ceil(self.rows / self.effective_batch))

    @property
    def micro_steps(self) -> int:
        """Passes over a batch: at most effective_batch / batch a step, fewer in an epoch's last."""
        return math.ceil(self.epochs_run * math.ceil(self.rows / self.batch))

    def trainable(self) -> int:
        return trainable(self.architecture, list(self.targets), self.rank, self.last_layers, dora=self.dora)

    def pairs(self) -> list[Pair]:
        return lora_pairs(self.architecture, list(self.targets), self.rank, self.last_layers)


@dataclass(frozen=True)
class Memory:
    """Bytes by component. ``peak_bytes`` is what torch's allocator reaches; ``needed_bytes`` is what must be free."""

    components: dict[str, int]
    outside: dict[str, int]
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        return sum(self.components.values())

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes + sum(self.outside.values())


def nf4_bytes(parameters: int) -> int:
    """NF4 with double quantization: 4 bits, an 8-bit scale a block of 64, a float32 per 256 of those: 0.516 bytes each."""
    blocks = math.ceil(parameters / NF4_BLOCK)
    return math.ceil(parameters / 2) + blocks + 4 * math.ceil(blocks / NF4_NESTED_BLOCK)


def precise(job: Job, card: Card | None) -> precision.Precision:
    """The number formats that the payload will choose."""
    capability = card.capability if card else None
    return precision.choose(capability, job.architecture.model_type, job.quantization == "nf4" and card is not None)


def memory(job: Job, card: Card | None, how: Settings) -> Memory:
    """The peak of one training step on ``card`` (None: the CPU), when the longest row comes.

    Static weights, adapter, gradients and optimizer state; plus the layer inputs that checkpointing keeps, one layer's
    recomputation with its backward pass and one dequantized matrix, or the scored logits where they take more.
    """
    model, formats = job.architecture, precise(job, card)
    item, adapter_item = ITEM[formats.compute], ITEM[formats.adapter]
    quantized = job.quantization == "nf4" and card is not None
    tokens = job.batch * job.longest
    parts = _weights(model, item, quantized, how)
    parameters = job.trainable()
    parts["adapter"] = parameters * adapter_item
    parts["gradients"] = parameters * adapter_item
    on_device, paged = _optimizer(job.pairs(), adapter_item, how)
    parts["optimizer"] = on_device
    boundary, kept, recompute = _activations(job, item, adapter_item, how)
    host = paged
    if how.checkpointing:
        host += boundary if how.boundaries_in_ram else 0
        parts["layer inputs"] = 0 if how.boundaries_in_ram else boundary
    else:
        parts["layer activations"] = kept
    layer = {"one layer": recompute, "attention mask": _mask(job)}
    if quantized:
        layer["dequantization"] = item * max((m.inputs * m.outputs for m in model.matrices if not m.experts), default=0)
    layer["expert copies"] = _expert_copies(job, item, how)
    parts |= {name: size for name, size in layer.items() if size}
    # the head comes before the first layer's backward pass: only what it takes beyond that raises the peak
    head = _logits(job, item, how) + 12 * tokens * model.hidden
    parts["logits beyond that"] = max(0, head - sum(layer.values()))
    context = CONTEXT_BYTES if card is not None else 300 << 20
    moving = sum(parts.values()) - parts["weights"] - parts["embeddings and head"]
    return Memory(parts, {"context": context, "fragmentation": int(FRAGMENTATION * moving)}, host)


def _weights(model: Architecture, item: int, quantized: bool, how: Settings) -> dict[str, int]:
    """Quantized matrices, what stays in 16 bits, and embeddings with the head (4 bytes where they are upcast)."""
    tables = model.embeddings + model.head
    rest = model.parameters - tables
    if quantized:
        fused = [m for m in model.matrices if m.experts]
        dense = sum(nf4_bytes(m.weights) for m in model.matrices if not m.experts) + nf4_bytes(model.tower_matrices)
        experts = sum(nf4_bytes(m.weights) if how.experts_4bit else m.weights * item for m in fused)
        other = rest - model.quantizable
        weights = dense + experts + other * (4 if how.upcast else item)
    else:
        weights = rest * item
    table_item = 4 if how.upcast and quantized else item
    return {"weights": weights, "embeddings and head": tables * table_item}


def _optimizer(pairs: list[Pair], adapter_item: int, how: Settings) -> tuple[int, int]:
    """Bytes of AdamW's two moments on the device, and those that are paged. One tensor per side of each pair."""
    device = paged = 0
    for pair in pairs:
        for size in (pair.copies * pair.rank * pair.inputs, pair.copies * pair.rank * pair.outputs):
            if not how.optimizer_8bit:
                device += 2 * adapter_item * size
                continue
            state = 8 * size if size < EIGHT_BIT_MINIMUM else 2 * size + 8 * math.ceil(size / 256)
            if how.optimizer_paged and size >= PAGED_MINIMUM:
                paged += state
            else:
                device += state
    return device, paged


def _activations(job: Job, item: int, adapter_item: int, how: Settings) -> tuple[int, int, int]:
    """Bytes of all layer inputs, of all layers' activations without checkpointing, and of the dearest layer alone."""
    model, tokens = job.architecture, job.batch * job.longest
    count = len(model.layers)
    first = count - (job.last_layers if job.last_layers is not None else count)
    lowest = max(0, first) if how.graph_cut else 0
    graph = model.layers[lowest:]
    boundary = len(graph) * tokens * model.hidden * item
    sides = [_layer_bytes(job, layer, item, adapter_item, how) for layer in graph]
    kept = sum(saved for saved, _ in sides)
    if not how.checkpointing:
        return boundary, kept, max((backward for _, backward in sides), default=0)
    return boundary, kept, max((saved + backward for saved, backward in sides), default=0)


def _layer_bytes(job: Job, layer: Layer, item: int, adapter_item: int, how: Settings) -> tuple[int, int]:
    """What one layer's graph keeps for its backward pass, and what that pass needs on top.

    A norm keeps its input in float32 and its output; the attention keeps queries, expanded keys and values and its
    output; a gated MLP keeps gate, activation, up and product; gradients of the MLP exist while it is passed.
    """
    model, tokens = job.architecture, job.batch * job.longest
    hidden = model.hidden
    wide_norm = model.model_type.startswith(("gemma", "qwen3_5", "qwen3_next"))
    norm = 2 * item if how.fused_kernels else 4 + (4 if wide_norm else item)
    saved = layer.norms * norm * hidden + 3 * item * hidden
    if layer.q:
        saved += item * (4 * layer.q + 2 * layer.kv)
        saved += (4 + item) * (layer.q + layer.kv) if model.qk_norm and not how.fused_kernels else 0
        gated = any(m.name == "q_proj" and m.outputs > layer.q for m in layer.matrices)
        saved += 2 * item * layer.q if gated else 0
    if layer.state:
        saved += (6 * item if how.linear_kernels else LINEAR_STATE_BYTES) * layer.state
    if adapter_item > item:  # each targeted layer casts its input to the adapter's format
        saved += adapter_item * sum(m.inputs for m in layer.matrices if m.name in job.targets and not m.experts)
    tile = min(1.0, how.mlp_tile_tokens / tokens) if how.mlp_tile_tokens else 1.0
    mlp = int(tokens * tile) * item * layer.mlp
    kept_mlp = (2 if how.fused_kernels else 4) * mlp
    return saved * tokens + kept_mlp, 2 * mlp + 3 * item * hidden * tokens


def _mask(job: Job) -> int:
    """A sliding window that is shorter than the row, or a padded batch, needs an explicit mask: a byte and its 16-bit form."""
    windows = {layer.window for layer in job.architecture.layers if layer.window and layer.window < job.longest}
    kinds = len(windows) + (1 if job.batch > 1 else 0)
    return min(kinds, 2) * 3 * job.batch * job.longest**2


def _logits(job: Job, item: int, how: Settings) -> int:
    tokens = job.batch * job.longest
    if how.scored_logits:
        return HEAD_TILE_BYTES + 2 * item * job.batch * job.scored * job.architecture.hidden
    return tokens * job.architecture.vocabulary * (item + 8)


def _expert_copies(job: Job, item: int, how: Settings) -> int:
    """PEFT trains fused experts by adding the adapter's product to the whole tensor: merged weights and a gradient of it."""
    targeted = {pair.layer for pair in job.pairs() if pair.copies > 1}
    if not targeted:
        return 0
    layer = job.architecture.layers[min(targeted)]
    tensors = [m.weights * item for m in layer.matrices if m.experts]
    return max(tensors) if how.experts_4bit else sum(tensors) + max(tensors)


# --- what would fit --------------------------------------------------------------------------------------------------


def fits(job: Job, card: Card, how: Settings) -> bool:
    return memory(job, card, how).needed_bytes <= card.memory_bytes


def largest(job: Job, card: Card, how: Settings, field: Literal["longest", "rank", "last_layers"]) -> int | None:
    """The largest value of one field that fits with all else as it is; None where not even the smallest does."""
    top = len(job.architecture.layers) if field == "last_layers" else int(getattr(job, field))
    low, high = 0, top

    def fitting(value: int) -> bool:
        if field == "longest":
            changed = replace(job, longest=value, scored=min(job.scored, value))
        elif field == "rank":
            changed = replace(job, rank=value)
        else:
            changed = replace(job, last_layers=value)
        return fits(changed, card, how)

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle - 1)
    return low or None


def adapter_file_bytes(job: Job, card: Card | None) -> int:
    """Size of ``adapter_model.safetensors``."""
    return job.trainable() * ITEM[precise(job, card).adapter]


def checkpoint_bytes(job: Job, card: Card | None) -> int:
    """Model-only checkpoints, of which the payload keeps two, beside the adapter itself."""
    return 2 * adapter_file_bytes(job, card)


def model_file_bytes(architecture: Architecture) -> int:
    """Size of the published checkpoint in 16 bits: what is downloaded and read."""
    return 2 * architecture.parameters
