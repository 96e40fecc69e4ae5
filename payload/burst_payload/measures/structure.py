"""Finding the parts of a model by what they are, not by what a family calls them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from burst_payload.measures.patches import NotHere
from burst_payload.model import NOT_TEXT

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def base_of(model: torch.nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator, return-value]


def decoder_layers(model: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of the language model, first to last. Raises ``NotHere`` where none are found."""
    found: list[GradientCheckpointingLayer] = []
    for name, module in base_of(model).named_modules():
        if not isinstance(module, torch.nn.ModuleList) or re.fullmatch(NOT_TEXT, name):
            continue
        layers = [layer for layer in module if isinstance(layer, GradientCheckpointingLayer)]
        if len(layers) == len(module) > len(found):
            found = layers
    if not found:
        raise NotHere("the model has no list of decoder layers")
    return found


def first_trained_layer(model: torch.nn.Module) -> int:
    """Index of the first layer that is trained; 0 also where something outside of the layers is trained."""
    try:
        layers = decoder_layers(model)
    except NotHere:
        return 0
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    per_layer = [{id(p) for p in layer.parameters() if p.requires_grad} for layer in layers]
    if trained - set().union(*per_layer):
        return 0
    return next((index for index, ids in enumerate(per_layer) if ids), 0)


def gated_mlps(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Dense gated MLPs of the language model: down(act(gate(x)) * up(x)), with gate and up apart or as one matrix.

    Whatever stands inside of a mixture of experts is left out, shared experts too.
    """
    base = base_of(model)
    mixtures = [name for name, module in base.named_modules() if hasattr(module, "experts")]
    return [
        module
        for name, module in base.named_modules()
        if _is_gated(module)
        and not re.fullmatch(NOT_TEXT, name)
        and not any(name == mixture or name.startswith(f"{mixture}.") for mixture in mixtures)
    ]


def _is_gated(module: torch.nn.Module) -> bool:
    parts = dict(module.named_children())
    inputs = {"gate_proj", "up_proj"} if "gate_proj" in parts else {"gate_up_proj"}
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    return (
        callable(activation)
        and inputs | {"down_proj"} <= parts.keys()
        and all(hasattr(parts[i], "weight") for i in inputs)
    )
