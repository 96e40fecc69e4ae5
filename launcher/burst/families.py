"""How each model family is built, matrix by matrix: one function a family, from ``config.json`` to ``Architecture``.

Names, shapes and biases are those of transformers 5.24's modeling files. What a config leaves out has the library's
default, which ``data/model_defaults.json`` holds; a test compares both with the library itself.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from burst import shipped
from burst.architecture import Architecture, Layer, Matrix, Mixer
from burst.towers import gemma3_tower, gemma4_tower

if TYPE_CHECKING:
    from collections.abc import Callable


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    defaults: dict[str, dict[str, Any]] = shipped.read("model_defaults.json")["defaults"]
    return defaults


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the library's defaults where it is silent."""
    return {**_defaults().get(config["model_type"], {}), **{k: v for k, v in config.items() if v is not None}}


def _text(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The text part of a config, nested or not, complete."""
    nested = config.get("text_config") or config
    if "tie_word_embeddings" in config:  # the wrapper's word counts where both have one
        nested = {**nested, "tie_word_embeddings": config["tie_word_embeddings"]}
    return complete({**nested, "model_type": model_type})


def _attention(
    c: dict[str, Any],
    *,
    bias: bool = False,
    out_bias: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    gated: bool = False,
) -> tuple[list[Matrix], int, int]:
    """The four projections, and the widths of queries and of keys."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    width = head_dim or c.get("head_dim") or hidden // heads
    q, kv = heads * width, (kv_heads or c.get("num_key_value_heads") or heads) * width
    return (
        [
            Matrix("q_proj", hidden, q * (2 if gated else 1), bias),
            Matrix("k_proj", hidden, kv, bias),
            Matrix("v_proj", hidden, kv, bias),
            Matrix("o_proj", q, hidden, out_bias),
        ],
        q,
        kv,
    )


def _mlp(hidden: int, width: int, *, bias: bool = False) -> list[Matrix]:
    return [
        Matrix("gate_proj", hidden, width, bias),
        Matrix("up_proj", hidden, width, bias),
        Matrix("down_proj", width, hidden, bias),
    ]


def _experts(hidden: int, width: int, experts: int, active: int) -> list[Matrix]:
    return [
        Matrix("gate_up_proj", hidden, 2 * width, experts=experts, active=active),
        Matrix("down_proj", width, hidden, experts=experts, active=active),
    ]


def _layer(mixer: Mixer, matrices: list[Matrix], norm_parameters: int, **facts: Any) -> Layer:
    biases = sum(matrix.outputs for matrix in matrices if matrix.bias)
    return Layer(mixer, tuple(matrices), norm_parameters + biases, **facts)


def _model(
    c: dict[str, Any], layers: list[Layer], *, final_norm: int | None = None, model_type: str = "", **facts: Any
) -> Architecture:
    hidden = c["hidden_size"]
    return Architecture(
        model_type=model_type or c["model_type"],
        hidden=hidden,
        vocabulary=c["vocab_size"],
        tied=bool(c["tie_word_embeddings"]),
        layers=tuple(layers),
        embeddings=facts.pop("embeddings", c["vocab_size"] * hidden),
        outside_other=facts.pop("outside_other", 0) + (hidden if final_norm is None else final_norm),
        **facts,
    )


def _kinds(c: dict[str, Any], default: list[str]) -> list[str]:
    kinds: list[str] = list(c.get("layer_types") or default)
    return kinds[: c["num_hidden_layers"]]


def _llama(config: dict[str, Any]) -> Architecture:
    """Llama, Mistral, Qwen2, Qwen3, SmolLM3: attention and a gated MLP."""
    c = complete(config)
    kind, hidden = c["model_type"], c["hidden_size"]
    qkv_bias = kind == "qwen2" or bool(c.get("attention_bias"))
    out_bias = kind != "qwen2" and bool(c.get("attention_bias"))
    attention, q, kv = _attention(c, bias=qkv_bias, out_bias=out_bias)
    width = q // c["num_attention_heads"]
    mlp = _mlp(hidden, c["intermediate_size"], bias=bool(c.get("mlp_bias")))
    norms = 2 * hidden + (2 * width if kind == "qwen3" else 0)
    layer = _layer("full", attention + mlp, norms, q=q, kv=kv, mlp=c["intermediate_size"])
    return _model(c, [layer] * c["num_hidden_layers"], qk_norm=kind == "qwen3")


def _phi3(config: dict[str, Any]) -> Architecture:
    c = complete(config)
    hidden, width, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    head_dim = c.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, c["num_key_value_heads"] * head_dim
    matrices = [
        Matrix("qkv_proj", hidden, q + 2 * kv),
        Matrix("o_proj", q, hidden),
        Matrix("gate_up_proj", hidden, 2 * width),
        Matrix("down_proj", width, hidden),
    ]
    layer = _layer("full", matrices, 2 * hidden, q=q, kv=kv, mlp=width)
    return _model(c, [layer] * c["num_hidden_layers"])


def _gemma(config: dict[str, Any]) -> Architecture:
    """Gemma 2 and Gemma 3, text: four norms a layer, sliding layers; a Gemma 3 wrapper brings its vision tower."""
    wrapped = config["model_type"] == "gemma3"
    c = _text(config, "gemma3_text") if wrapped else complete(config)
    hidden, third = c["hidden_size"], c["model_type"] == "gemma3_text"
    attention, q, kv = _attention(c, bias=bool(c.get("attention_bias")), out_bias=bool(c.get("attention_bias")))
    pattern = c.get("sliding_window_pattern") or 6 if third else 2
    count = c["num_hidden_layers"]
    kinds = _kinds(c, ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)])
    norms = 4 * hidden + (2 * c["head_dim"] if third else 0)
    layers = [
        _layer(
            "sliding" if kind == "sliding_attention" else "full",
            attention + _mlp(hidden, c["intermediate_size"]),
            norms,
            q=q,
            kv=kv,
            mlp=c["intermediate_size"],
            norms=4,
            window=c["sliding_window"] if kind == "sliding_attention" else None,
        )
        for kind in kinds
    ]
    tower = (
        gemma3_tower(complete({**config["vision_config"], "model_type": "siglip_vision_model"}), hidden)
        if wrapped
        else (0, 0)
    )
    return _model(
        c, layers, model_type=config["model_type"], qk_norm=third, tower_matrices=tower[0], tower_other=tower[1]
    )


def _gemma4(config: dict[str, Any]) -> Architecture:
    """Gemma 4: wider heads in full layers, keys shared by late layers, a per-layer input, a dense MLP beside experts."""
    c = _text(config, "gemma4_text")
    hidden, count = c["hidden_size"], c["num_hidden_layers"]
    kinds = _kinds(c, ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count)])
    kinds[-1] = "full_attention"
    first_shared = count - c["num_kv_shared_layers"]
    side = c["hidden_size_per_layer_input"]
    layers = []
    for index, kind in enumerate(kinds):
        full, shared = kind == "full_attention", index >= first_shared
        head_dim = c["global_head_dim"] if full else c["head_dim"]
        kv_heads = c.get("num_global_key_value_heads") if full and c["attention_k_eq_v"] else None
        (q_proj, k_proj, v_proj, o_proj), q, kv = _attention(c, head_dim=head_dim, kv_heads=kv_heads)
        matrices, norms = [q_proj, o_proj], 4 * hidden + head_dim
        if not shared:
            matrices.append(k_proj)
            norms += head_dim
            if not (c["attention_k_eq_v"] and full):
                matrices.append(v_proj)
        width = c["intermediate_size"] * (2 if c["use_double_wide_mlp"] and shared else 1)
        matrices += _mlp(hidden, width)
        if side:
            matrices += [Matrix("per_layer_input_gate", hidden, side), Matrix("per_layer_projection", side, hidden)]
            norms += hidden
        if c["enable_moe_block"]:
            matrices += [Matrix("proj", hidden, c["num_experts"])]
            matrices += _experts(hidden, c["moe_intermediate_size"], c["num_experts"], c["top_k_experts"])
            norms += 3 * hidden + hidden + c["num_experts"]
            width += c["top_k_experts"] * c["moe_intermediate_size"]
        layers.append(
            _layer(
                "full" if full else "sliding",
                matrices,
                norms,
                q=q,
                kv=kv,
                mlp=width,
                norms=4,
                window=None if full else c["sliding_window"],
            )
        )
    wrapped = config["model_type"] == "gemma4"
    tower = gemma4_tower(config, hidden, complete) if wrapped else (0, 0)
    per_layer = count * side
    return _model(
        c,
        layers,
        model_type=config["model_type"],
        embeddings=c["vocab_size"] * hidden + (c["vocab_size_per_layer_input"] * per_layer if side else 0),
        outside=(Matrix("per_layer_model_projection", hidden, per_layer),) if side else (),
        outside_other=side,
        qk_norm=True,
        tower_matrices=tower[0],
        tower_other=tower[1],
    )


def _moe(config: dict[str, Any]) -> Architecture:
    """Qwen3-MoE and Mixtral: attention, and experts behind a router."""
    c = complete(config)
    hidden, third = c["hidden_size"], c["model_type"] == "qwen3_moe"
    attention, q, kv = _attention(c, bias=bool(c.get("attention_bias")), out_bias=bool(c.get("attention_bias")))
    experts: int = c.get("num_experts") or c["num_local_experts"]
    width = c["moe_intermediate_size"] if third else c["intermediate_size"]
    active = c["num_experts_per_tok"]
    norms = 2 * hidden + (2 * (q // c["num_attention_heads"]) if third else 0)
    sparse = _layer(
        "full",
        attention + _experts(hidden, width, experts, active),
        norms + experts * hidden,
        q=q,
        kv=kv,
        mlp=width * active,
    )
    dense = _layer(
        "full", attention + _mlp(hidden, c["intermediate_size"]), norms, q=q, kv=kv, mlp=c["intermediate_size"]
    )
    dense_at = set(c.get("mlp_only_layers") or ())
    step = c.get("decoder_sparse_step") or 1
    layers = [dense if index in dense_at or (index + 1) % step else sparse for index in range(c["num_hidden_layers"])]
    return _model(c, layers, qk_norm=third)


def _gpt_oss(config: dict[str, Any]) -> Architecture:
    c = complete(config)
    hidden, width, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    bias = bool(c["attention_bias"])
    attention, q, kv = _attention(c, bias=bias, out_bias=bias)
    expert_biases = experts * (2 * width + hidden)
    router = experts * hidden + experts
    kinds = _kinds(c, ["sliding_attention" if (i + 1) % 2 else "full_attention" for i in range(c["num_hidden_layers"])])
    layers = [
        _layer(
            "sliding" if kind == "sliding_attention" else "full",
            attention + _experts(hidden, width, experts, c["num_experts_per_tok"]),
            2 * hidden + c["num_attention_heads"] + expert_biases + router,
            q=q,
            kv=kv,
            mlp=width * c["num_experts_per_tok"],
            window=c["sliding_window"] if kind == "sliding_attention" else None,
        )
        for kind in kinds
    ]
    return _model(c, layers)


def _qwen_hybrid(config: dict[str, Any]) -> Architecture:
    """Qwen3-Next, Qwen3.5 and Qwen3.6: three Gated DeltaNet layers to one of gated attention; dense or experts."""
    kind = config["model_type"].removesuffix("_text")
    c = _text(config, kind if kind == "qwen3_next" else f"{kind}_text")
    hidden, head_dim = c["hidden_size"], c["head_dim"]
    interval = c.get("full_attention_interval") or 4
    kinds = _kinds(
        c, ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(c["num_hidden_layers"])]
    )
    bias = bool(c.get("attention_bias"))
    attention, q, kv = _attention(c, bias=bias, out_bias=bias, head_dim=head_dim, gated=True)
    heads = c["linear_num_value_heads"]
    key, value = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * c["linear_value_head_dim"]
    if kind == "qwen3_next":
        inputs = [Matrix("in_proj_qkvz", hidden, 2 * key + 2 * value), Matrix("in_proj_ba", hidden, 2 * heads)]
    else:
        inputs = [
            Matrix("in_proj_qkv", hidden, 2 * key + value),
            Matrix("in_proj_z", hidden, value),
            Matrix("in_proj_b", hidden, heads),
            Matrix("in_proj_a", hidden, heads),
        ]
    delta = [*inputs, Matrix("out_proj", value, hidden)]
    delta_other = (2 * key + value) * c["linear_conv_kernel_dim"] + 2 * heads + c["linear_value_head_dim"]
    experts: int = c.get("num_experts") or 0
    layers = []
    for index, layer_kind in enumerate(kinds):
        sparse = experts and index not in (c.get("mlp_only_layers") or ())
        sparse = sparse and (index + 1) % (c.get("decoder_sparse_step") or 1) == 0
        norms = 2 * hidden
        if sparse:
            active, shared = c["num_experts_per_tok"], c["shared_expert_intermediate_size"]
            mlp = _experts(hidden, c["moe_intermediate_size"], experts, active) + _mlp(hidden, shared)
            mlp.append(Matrix("shared_expert_gate", hidden, 1))
            norms += experts * hidden
            width = active * c["moe_intermediate_size"] + shared
        else:
            mlp, width = _mlp(hidden, c["intermediate_size"]), c["intermediate_size"]
        if layer_kind == "linear_attention":
            layers.append(_layer("linear", delta + mlp, norms + delta_other, mlp=width, state=value))
        else:
            layers.append(_layer("full", attention + mlp, norms + 2 * head_dim, q=q, kv=kv, mlp=width))
    return _model(c, layers, model_type=config["model_type"], qk_norm=True)


def _nemotron_h(config: dict[str, Any]) -> Architecture:
    """Nemotron 3 Nano: Mamba-2, attention, MLP and mixture-of-experts layers, each alone behind one norm."""
    c = complete(config)
    hidden = c["hidden_size"]
    pattern = c.get("hybrid_override_pattern")
    signs = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    kinds = [signs[sign] for sign in pattern] if pattern else [old.get(k, k) for k in c["layers_block_type"]]
    inner = c["mamba_num_heads"] * c["mamba_head_dim"]
    convolved = inner + 2 * c["n_groups"] * c["ssm_state_size"]
    attention, q, kv = _attention(c)
    bias = bool(c["mlp_bias"])

    def plain(width: int) -> list[Matrix]:
        return [Matrix("up_proj", hidden, width, bias), Matrix("down_proj", width, hidden, bias)]

    active, width, experts = c["num_experts_per_tok"], c["moe_intermediate_size"], c["n_routed_experts"]
    shared = c["moe_shared_expert_intermediate_size"]
    latent = c.get("moe_latent_size") or hidden
    moe = [
        Matrix("up_proj", latent, width, experts=experts, active=active),
        Matrix("down_proj", width, latent, experts=experts, active=active),
        *plain(shared),
    ]
    if c.get("moe_latent_size"):
        moe += [Matrix("fc1_latent_proj", hidden, latent, bias), Matrix("fc2_latent_proj", latent, hidden, bias)]
    mamba = [
        Matrix("in_proj", hidden, inner + convolved + c["mamba_num_heads"], bool(c["use_bias"])),
        Matrix("out_proj", inner, hidden, bool(c["use_bias"])),
    ]
    mamba_other = convolved * c["conv_kernel"] + (convolved if c["use_conv_bias"] else 0)
    mamba_other += 3 * c["mamba_num_heads"] + inner
    made = {
        "linear_attention": _layer("mamba", mamba, hidden + mamba_other, state=inner, norms=1),
        "full_attention": _layer("full", attention, hidden, q=q, kv=kv, norms=1),
        "mlp": _layer("none", plain(c["intermediate_size"]), hidden, mlp=c["intermediate_size"], norms=1),
        "moe": _layer("none", moe, hidden + experts * hidden, mlp=active * width + shared, norms=1),
    }
    return _model(c, [made[kind] for kind in kinds])


FAMILIES: dict[str, Callable[[dict[str, Any]], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _llama),
    "phi3": _phi3,
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _gemma),
    **dict.fromkeys(("gemma4", "gemma4_text"), _gemma4),
    **dict.fromkeys(("qwen3_moe", "mixtral"), _moe),
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen_hybrid),
    "nemotron_h": _nemotron_h,
}
