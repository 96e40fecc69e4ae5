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
