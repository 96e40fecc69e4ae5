"""Run in the training environment: what transformers and PEFT themselves make of configs, on the meta device.

Standard input: {"models": {name: config}, "adapters": [[config, {rank, targets, last_layers, dora}]], "defaults": [model_type]}.
Standard output: the same keys with counts; an adapter that PEFT refuses counts as null.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from burst_payload import audits, config, model
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

warnings.filterwarnings("ignore")


def build(values: dict) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values), dtype=torch.bfloat16)


def shape_of(values: dict) -> dict:
    built = build(values)
    head = built.get_output_embeddings()
    linear = [m for m in built.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    fused = [p for n, p in built.named_parameters() if p.ndim == 3 and ".experts." in n]
    names = {}
    for name, module in built.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head and not model.re.fullmatch(model.NOT_TEXT, name):
            key = f"{name.rpartition('.')[2]} {module.in_features}x{module.out_features}"
            names[key] = names.get(key, 0) + 1
    return {
        "parameters": sum(p.numel() for p in built.parameters()),
        "quantizable": sum(m.weight.numel() for m in linear) + sum(p.numel() for p in fused),
        "layers": model.layer_count(built),
        "linear": names,
    }


def trained(values: dict, wanted: dict) -> int | None:
    built = build(values)
    adapter = config.Adapter(alpha=16.0, dropout=0.0, rslora=False, **wanted)
    targets = model.resolve_targets(built, adapter.targets)
    lora = model.lora_config(adapter, targets, model.layer_count(built), text_only=model.is_text_only(built))
    try:
        with torch.device("meta"):
            return audits.trainable(get_peft_model(built, lora))
    except ValueError:
        return None


def default_of(model_type: str, key: str) -> object:
    made = CONFIG_MAPPING[model_type]()
    made.allow_global_per_layer_attribute_access = True
    return getattr(made, key, None)


def main() -> None:
    asked = json.load(sys.stdin)
    result = {
        "models": {name: shape_of(values) for name, values in asked.get("models", {}).items()},
        "adapters": [trained(values, wanted) for values, wanted in asked.get("adapters", [])],
        "defaults": {
            kind: {key: default_of(kind, key) for key in keys} for kind, keys in asked.get("defaults", {}).items()
        },
    }
    json.dump(result, sys.stdout)


main()
