"""Models of the true shapes with random weights, made on the device: no checkpoint, no network.

Shapes come from burst's own table of models. Linear layers are quantized as transformers does it (NF4, double quantization);
what transformers leaves in 16 bits (embeddings, head, norms, fused experts) stays so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "payload"))

import torch  # noqa: E402

from burst_payload import model, precision, trainer  # noqa: E402
from burst_payload.chat import Example  # noqa: E402
from burst_payload.config import Adapter, Data, Model, Probes, RunConfig, Source, Train  # noqa: E402

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT_TYPES = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "num_attention_heads": 4, "head_dim": 16}
KEPT_16BIT = ("lm_head", "gate", "router", "shared_expert_gate")


def text_config(name: str, *, layers: int | None = None, tiny: bool = False, **changes: Any) -> PretrainedConfig:
    """The text part of a model of ``launcher/burst/data/models.json``; ``tiny``: its architecture with small widths."""
    from transformers import AutoConfig

    shapes = json.loads((ROOT / "launcher/burst/data/models.json").read_text())["models"][name]
    kind = TEXT_TYPES.get(shapes["model_type"], shapes["model_type"])
    values = dict(shapes.get("text_config", shapes))
    values.pop("model_type", None)
    if tiny:
        values |= {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2}
        layers = None
        if "num_experts" in values:
            values |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if layers is not None:
        values["num_hidden_layers"] = layers
    return AutoConfig.for_model(kind, **{**values, "pad_token_id": 0, **changes})


def random_base(config: PretrainedConfig, *, quantized: bool, device: str) -> PreTrainedModel:
    """A frozen base with random 16-bit weights (float32 on a CPU), its linear layers in NF4 where ``quantized``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as model.load_base does
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if quantized:
        quantize(base, dtype)
    base.config.use_cache = False
    base.requires_grad_(False)
    return base


def quantize(base: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put bitsandbytes' NF4 layers in the place of the linear ones, one at a time."""
    import bitsandbytes as bnb

    for name, module in list(base.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name.rpartition(".")[2] in KEPT_16BIT:
            continue
        layer = bnb.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            compute_dtype=dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        weight = bnb.nn.Params4bit(
            module.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
        )
        layer.weight = weight.to(module.weight.device)
        if module.bias is not None:
            layer.bias = module.bias
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, layer)
    base.is_loaded_in_4bit = True


def run_config(
    *,
    rank: int,
    length: int,
    targets: list[str] = SEVEN,
    last_layers: int | None = None,
    measures: list[str] | None = None,
    quantized: bool = True,
    batch: int = 1,
    effective_batch: int = 1,
    steps: int = 5,
    checkpointing: str = "on",
    optimizer: str = "auto",
) -> RunConfig:
    """A run's settings, as its bundle would have them."""
    return RunConfig(
        Model("random", "local"),
        Data([Source("rows", 1)], None, length, "refuse", "all", "none"),
        Adapter(rank, 2.0 * rank, 0.0, targets, last_layers, rslora=False, dora=False),
        "nf4" if quantized else "none",
        Train(
            epochs=1.0,
            max_steps=steps,
            batch=batch,
            effective_batch=effective_batch,
            learning_rate=1e-4,
            scheduler="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            optimizer=optimizer,
            seed=1,
            logging_steps=1,
            eval_steps=None,
            save_steps=None,
            gradient_checkpointing=checkpointing,  # type: ignore[arg-type]
            measures=measures,
        ),
        Probes(0, 1),
    )


def adapted(base: PreTrainedModel, config: RunConfig) -> PeftModel:
    """The base with the run's adapter on it, by the payload's own functions."""
    targets = model.resolve_targets(base, config.adapter.targets)
    return model.attach(base, model.lora_config(config.adapter, targets, model.layer_count(base)), 1)


def rows(
    length: int, count: int, vocabulary: int, *, scored: int = 26, prefix: int = 0, seed: int = 0
) -> list[Example]:
    """Random rows of ``length`` tokens whose last ``scored`` are scored; the first ``prefix`` tokens are equal in all."""
    chance = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, vocabulary, (prefix,), generator=chance).tolist()
    found = []
    for _ in range(count):
        ids = shared + torch.randint(3, vocabulary, (length - prefix,), generator=chance).tolist()
        found.append(Example(ids, [-100] * (length - scored) + ids[-scored:]))
    return found


def loop_of(
    wrapped: PeftModel, config: RunConfig, data: list[Example], tokenizer: Any, output: Path, emit: Any
) -> trainer.Trainer:
    """The payload's own trainer on the data, adapters in the precision that a run would choose."""
    on_gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if on_gpu else None
    precise = precision.choose(capability, wrapped.config.model_type, config.quantization == "nf4")
    arguments = trainer.training_arguments(config, precise, output, on_gpu, evaluates=False)
    progress = trainer.Progress(emit, {}, config.train, config.train.max_steps or 0, evaluates=False)
    loop = trainer.build(wrapped, arguments, tokenizer, data, [], progress, None)
    if precise.adapter == "float32":
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return loop
