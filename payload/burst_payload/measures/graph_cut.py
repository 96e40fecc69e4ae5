"""No graph below the first trained layer.

Nothing there is trained, so nothing there needs a gradient. But checkpointing makes the embedding's output require one,
and then every frozen layer is kept, recomputed and differentiated for nothing. Here these layers run under ``no_grad``.
Exact: the gradients of the trained layers never depended on it. FLOPs per token fall from 6N to 2N + 4N·k/L for the
last k of L layers, and boundary tensors from L to k.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from burst_payload.measures.patches import NotHere, Patches
from burst_payload.measures.structure import decoder_layers, first_trained_layer

if TYPE_CHECKING:
    from burst_payload.measures.apply import Subject


def apply(subject: Subject) -> Patches:
    """Needs non-reentrant checkpointing, which is what a run uses: the reentrant one wants an input with a gradient."""
    layers = decoder_layers(subject.model)
    first = first_trained_layer(subject.model)
    if first == 0:
        raise NotHere("the adapter starts at the first layer")
    patches = Patches(f"no graph in {first} of {len(layers)} layers")
    for layer in layers[:first]:
        patches.set(layer, "forward", _without_graph(layer.forward))
    return patches


def _without_graph(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return forward(*args, **kwargs)

    return wrapped
