"""The measures, in the order in which they are applied, and the decision which of them a run takes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from burst_payload.stop import ExitCode, Stop

if TYPE_CHECKING:
    from collections.abc import Callable


TILE_TOKENS = 2048
"""Tokens that an MLP works on at a time, unless the memory plan says otherwise."""


@dataclass(frozen=True)
class Facts:
    """What a decision rests on, known before training. ``longest_tokens``: of one pass, all rows of it together."""

    on_gpu: bool = False
    first_trained_layer: int = 0
    dropout: bool = False
    dora: bool = False
    gated_mlp: bool = True
    longest_tokens: int = 0
    checkpointing: bool = False


class Need(NamedTuple):
    """A condition and what is said where it does not hold."""

    holds: Callable[[Facts], bool]
    otherwise: str


NEEDS = {
    "no_dropout": Need(lambda facts: not facts.dropout, "adapter dropout would draw other numbers in the second run"),
    "gated_mlp": Need(lambda facts: facts.gated_mlp, "the model has no gated MLP outside of experts"),
    "plain_lora": Need(lambda facts: not (facts.dropout or facts.dora), "the adapter has dropout or DoRA"),
    "long_rows": Need(
        lambda facts: facts.longest_tokens > 2 * TILE_TOKENS, f"no pass has more than {2 * TILE_TOKENS} tokens"
    ),
    "frozen_below": Need(lambda facts: facts.first_trained_layer > 0, "the adapter starts at the first layer"),
    "checkpointing": Need(lambda facts: facts.checkpointing, "gradient checkpointing is off"),
    "cuda": Need(lambda facts: facts.on_gpu, "there is no GPU whose memory it could save"),
}

Component = Literal["logits", "boundaries", "mlp", "weights", "activations", "time"]


@dataclass(frozen=True)
class Measure:
    """``needs`` must hold for it to be right; ``pays`` must hold too for it to be taken without being asked for.

    ``when`` is "always" for what costs nothing, "tight" for what trades time for memory: taken where the memory plan
    says that the rest does not fit. ``component`` is the part of the peak that it shrinks.
    """

    name: str
    saves: str
    component: Component
    exact: bool = True
    needs: tuple[str, ...] = ()
    pays: tuple[str, ...] = ()
    when: Literal["always", "tight"] = "always"


MEASURES = (
    Measure(
        "scored_logits",
        "only scored positions go through the head, a few hundred at a time, and no logits are kept",
        "logits",
    ),
    Measure(
        "graph_cut",
        "frozen layers below the first trained one run without a graph: nothing kept, recomputed or differentiated",
        "boundaries",
        needs=("frozen_below",),
    ),
    Measure(
        "fused_lora",
        "each projection and its LoRA pair are one function that keeps its input alone; a 4-bit matrix is dequantized once a pass",
        "activations",
        needs=("plain_lora",),
        pays=("cuda",),
    ),
    Measure(
        "tiled_mlp",
        "gated MLPs run a tile of tokens at a time, and again in the backward pass",
        "mlp",
        needs=("gated_mlp", "no_dropout"),
        pays=("long_rows",),
        when="tight",
    ),
    Measure(
        "boundary_offload",
        "hidden states between layers wait for the backward pass in host memory",
        "boundaries",
        needs=("checkpointing",),
        pays=("cuda",),
        when="tight",
    ),
)
NAMES = tuple(measure.name for measure in MEASURES)


@dataclass(frozen=True)
class Choice:
    """The names to apply, in order, and why the others are not."""

    taken: tuple[str, ...]
    skipped: dict[str, str]


def choose(asked: list[str] | None, facts: Facts, *, tight: bool = False) -> Choice:
    """The measures of a run: those asked for, or (``None``) the exact ones that apply and pay.

    ``tight``: also those that cost time. Raises ``Stop`` for an unknown name, and for one that was asked for and would
    be wrong or without effect here: a setting that is silently ignored is a wrong run.
    """
    unknown = [name for name in asked or [] if name not in NAMES]
    if unknown:
        raise Stop(
            f"train.measures: no measure is called {', '.join(unknown)}",
            f"choose from: {', '.join(NAMES)}",
            ExitCode.INVALID,
        )
    taken, skipped = [], {}
    for measure in MEASURES:
        reason = _against(measure, facts, asked, tight)
        if reason is None:
            taken.append(measure.name)
        else:
            skipped[measure.name] = reason
    refused = [f"{name} ({reason})" for name, reason in skipped.items() if name in (asked or [])]
    if refused:
        raise Stop(
            f"train.measures asks for what cannot be done here: {'; '.join(refused)}",
            "take them out of train.measures, or set it to auto",
            ExitCode.INVALID,
        )
    return Choice(tuple(taken), skipped)


def _against(measure: Measure, facts: Facts, asked: list[str] | None, tight: bool) -> str | None:
    """Why a measure is not taken, or None."""
    if asked is not None and measure.name not in asked:
        return "not asked for"
    for name in measure.needs + (measure.pays if asked is None else ()):
        if not NEEDS[name].holds(facts):
            return NEEDS[name].otherwise
    if asked is None and measure.when == "tight" and not tight:
        return "it costs time, and memory is not short"
    return None
