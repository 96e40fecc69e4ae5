"""What a model is made of, from its ``config.json`` alone: every matrix, its shape, and what is no matrix. Pure.

Exact: for every family here the sum equals the parameters of the real model, and a test builds each of them to see that.
The structures are those of transformers 5.24, which is what trains: mixture-of-experts weights are one fused tensor a
layer, and a multimodal checkpoint brings its vision (and audio) tower along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from burst.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

Mixer = Literal["full", "sliding", "linear", "mamba", "none"]
ROUTERS = ("gate", "router", "lm_head", "score")
"""Names that ``all-linear`` leaves out, as the payload does."""


@dataclass(frozen=True)
class Matrix:
    """A linear layer of ``inputs`` by ``outputs``, or a fused tensor of ``experts`` such matrices.

    ``active``: how many of the experts a token goes through.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    experts: int = 0
    active: int = 1

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs * max(1, self.experts)

    @property
    def active_weights(self) -> int:
        return self.inputs * self.outputs * (self.active if self.experts else 1)


@dataclass(frozen=True)
class Layer:
    """One decoder layer. ``other``: parameters in norms, biases, routers and convolutions.

    Widths in channels: ``q`` and ``kv`` of the attention, ``mlp`` of all gated units that a token passes, ``state`` of a
    linear-attention or Mamba mixer. ``window``: tokens that a sliding layer sees.
    """

    mixer: Mixer
    matrices: tuple[Matrix, ...]
    other: int
    q: int = 0
    kv: int = 0
    mlp: int = 0
    state: int = 0
    norms: int = 2
    window: int | None = None

    @property
    def parameters(self) -> int:
        return sum(matrix.weights for matrix in self.matrices) + self.other


@dataclass(frozen=True)
class Architecture:
    """A whole model. ``tower_*``: a multimodal checkpoint's other parts, which are loaded but neither trained nor run."""

    model_type: str
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    embeddings: int
    outside: tuple[Matrix, ...] = ()
    outside_other: int = 0
    tower_matrices: int = 0
    tower_other: int = 0
    qk_norm: bool = False

    @property
    def head(self) -> int:
        """Parameters of the output head that are its own."""
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for layer in self.layers for matrix in layer.matrices] + list(self.outside)

    @property
    def parameters(self) -> int:
        return (
            sum(layer.parameters for layer in self.layers)
            + sum(matrix.weights for matrix in self.outside)
            + self.outside_other
            + self.embeddings
            + self.head
            + self.tower_matrices
            + self.tower_other
        )

    @property
    def quantizable(self) -> int:
        """Parameters that NF4 covers: every matrix but the head."""
        return sum(matrix.weights for matrix in self.matrices) + self.tower_matrices

    @property
    def expert_parameters(self) -> int:
        return sum(matrix.weights for matrix in self.matrices if matrix.experts)

    @property
    def active(self) -> int:
        """Matrix parameters that a token is multiplied with, without embeddings and head."""
        return sum(matrix.active_weights for matrix in self.matrices)

    @property
    def moe(self) -> bool:
        return any(matrix.experts for matrix in self.matrices)

    @property
    def linear_attention(self) -> bool:
        return any(layer.mixer in ("linear", "mamba") for layer in self.layers)

    def linear_names(self) -> list[str]:
        """The names that ``adapter.targets`` can take, as the model has them."""
        names = {matrix.name for matrix in self.matrices}
        if any(matrix.experts and matrix.name == "gate_up_proj" for matrix in self.matrices):
            names |= {"gate_proj", "up_proj"}
        return sorted(names - set(ROUTERS))


@dataclass(frozen=True)
class Pair:
    """A LoRA pair: ``rank`` by ``inputs`` and ``outputs`` by ``rank``, for each of ``copies`` experts in one tensor."""

    rank: int
    inputs: int
    outputs: int
    copies: int = 1
    layer: int = -1

    @property
    def parameters(self) -> int:
        return self.copies * self.rank * (self.inputs + self.outputs)


def lora_pairs(
    architecture: Architecture, targets: list[str], rank: int, last_layers: int | None = None, *, fused: bool = True
) -> list[Pair]:
    """Every LoRA pair of an adapter.

    ``fused``: as PEFT 0.21 lays it on a fused gate-and-up tensor, one pair of twice the rank; else one pair a matrix.
    """
    if targets == ["all-linear"]:
        targets = sorted({m.name for m in architecture.matrices if not m.experts} - set(ROUTERS))
    count = len(architecture.layers)
    first = max(0, count - (last_layers if last_layers is not None else count))
    chosen = [(i, m) for i, layer in enumerate(architecture.layers) if i >= first for m in layer.matrices]
    found = []
    for index, m in chosen + [(-1, m) for m in architecture.outside]:
        copies = max(1, m.experts)
        if m.experts and m.name == "gate_up_proj" and {"gate_proj", "up_proj"} <= set(targets):
            if fused:
                found.append(Pair(2 * rank, m.inputs, m.outputs, copies, index))
            else:
                found += [Pair(rank, m.inputs, m.outputs // 2, copies, index)] * 2
        elif m.name in targets:
            found.append(Pair(rank, m.inputs, m.outputs, copies, index))
    return found


def trainable(
    architecture: Architecture,
    targets: list[str],
    rank: int,
    last_layers: int | None = None,
    *,
    dora: bool = False,
    fused: bool = True,
) -> int:
    """LoRA parameters = sum of rank·(in + out) over targeted matrices (Hu et al. 2021), plus out a matrix for DoRA."""
    pairs = lora_pairs(architecture, targets, rank, last_layers, fused=fused)
    return sum(pair.parameters + (pair.outputs * pair.copies if dora else 0) for pair in pairs)


def missing_targets(architecture: Architecture, targets: list[str]) -> list[str]:
    """The target names that no matrix of the model has."""
    return [] if targets == ["all-linear"] else [t for t in targets if t not in architecture.linear_names()]


def read(config: dict[str, Any]) -> Architecture:
    """The architecture that a ``config.json`` describes. Raises ``InvalidInput`` for a family that is not known here."""
    from burst import families

    model_type = config.get("model_type")
    build: Callable[[dict[str, Any]], Architecture] | None = families.FAMILIES.get(str(model_type))
    if build is None:
        raise InvalidInput(
            f"the architecture {model_type!r} is not known to this version of burst: no estimate can be made",
            f"known: {', '.join(sorted(families.FAMILIES))}; burst train --force trains without a plan",
        )
    try:
        return build(config)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidInput(
            f"config.json of a {model_type} model cannot be used: {type(error).__name__}: {error}",
            "give the folder as save_pretrained wrote it",
        ) from error
