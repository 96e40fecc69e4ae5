"""The vision and audio parts of multimodal checkpoints: loaded with the text model, not trained. Parameter counts only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Counts = tuple[int, int]
"""Parameters in linear layers (which NF4 covers), and all others."""


def gemma3_tower(v: dict[str, Any], text_hidden: int) -> Counts:
    """SigLIP, with its pooling head where the config has one, and the projector (which is no linear layer)."""
    hidden, width = v["hidden_size"], v["intermediate_size"]
    matrices = v["num_hidden_layers"] * (4 * hidden * hidden + 2 * hidden * width)
    biases = v["num_hidden_layers"] * (4 * hidden + width + hidden)
    norms = v["num_hidden_layers"] * 4 * hidden + 2 * hidden
    patches = v.get("num_channels", 3) * v["patch_size"] ** 2 * hidden + hidden
    positions = (v["image_size"] // v["patch_size"]) ** 2 * hidden
    other = biases + norms + patches + positions + hidden * text_hidden + hidden
    if v.get("vision_use_head", True):
        matrices += hidden * hidden + 2 * hidden * width
        other += hidden + 3 * hidden * hidden + 4 * hidden + 2 * hidden + width + hidden
    return matrices, other


def gemma4_tower(
    config: dict[str, Any], text_hidden: int, complete: Callable[[dict[str, Any]], dict[str, Any]]
) -> Counts:
    """The vision tower and, where the config names one, the audio tower, each with its projection into the text."""
    matrices = other = 0
    if config.get("vision_config") is not None:
        v = complete({**config["vision_config"], "model_type": "gemma4_vision"})
        hidden, q = v["hidden_size"], v["num_attention_heads"] * v["head_dim"]
        kv = v["num_key_value_heads"] * v["head_dim"]
        layer = 2 * hidden * q + 2 * hidden * kv + 3 * hidden * v["intermediate_size"]
        matrices += v["num_hidden_layers"] * layer + 3 * v["patch_size"] ** 2 * hidden + hidden * text_hidden
        other += v["num_hidden_layers"] * (4 * hidden + 2 * v["head_dim"]) + 2 * v["position_embedding_size"] * hidden
    if config.get("audio_config") is not None:
        a = complete({**config["audio_config"], "model_type": "gemma4_audio"})
        hidden, (first, second) = a["hidden_size"], a["subsampling_conv_channels"]
        feed_forward = 2 * 2 * 4 * hidden * hidden
        attention = 5 * hidden * hidden
        convolution = 3 * hidden * hidden
        matrices += a["num_hidden_layers"] * (feed_forward + attention + convolution)
        norms = (2 * 2 + 3 + 2) * hidden + hidden // a["num_attention_heads"] + a["conv_kernel_size"] * hidden
        other += a["num_hidden_layers"] * norms
        other += 9 * first + first + 9 * first * second + second
        matrices += first // 4 * second * hidden + hidden * a["output_proj_dims"] + a["output_proj_dims"] * text_hidden
        other += a["output_proj_dims"]
    return matrices, other
