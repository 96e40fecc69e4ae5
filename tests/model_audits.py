"""Run by the payload's interpreter: small random models of many families, an adapter on each, and what the audits say, as JSON.

    python model_audits.py

Prints ``{family: {case: {"expected": n, "trained": n, "layers": [...]} or {"stop": text}}}``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "payload"))
from burst_payload import audits, model
from burst_payload.config import Adapter
from burst_payload.stop import Stop

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "smollm3": {},
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS,
    "qwen3_next": {
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "seven": {"targets": SEVEN},
    "all-linear": {"targets": ["all-linear"]},
    "last two layers": {"targets": ["all-linear"], "last_layers": 2},
    "DoRA": {"targets": ["all-linear"], "dora": True},
    "attention of the last layer": {"targets": SEVEN[:4], "last_layers": 1},
}


def main() -> None:
    print(json.dumps({family: {case: audit(family, case) for case in CASES} for family in FAMILIES}))


def audit(family: str, case: str) -> dict:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]})
    base = AutoModelForCausalLM.from_config(config)
    base.requires_grad_(False)
    adapter = Adapter(
        **{"rank": 4, "alpha": 8.0, "dropout": 0.0, "last_layers": None, "rslora": False, "dora": False, **CASES[case]}
    )
    try:
        audits.check_weight_bytes(base, 4, quantized=False)
        targets = model.resolve_targets(base, adapter.targets)
        expected = audits.expected_trainable(base, adapter, targets)
        with_adapter = model.attach(
            base, model.lora_config(adapter, targets, model.layer_count(base), text_only=model.is_text_only(base)), 1
        )
        trained = audits.check_trainable(with_adapter, expected)
    except Stop as stop:
        return {"stop": f"{stop.what}; {stop.fix}"}
    names = [name for name, parameter in with_adapter.named_parameters() if parameter.requires_grad]
    layers = sorted({int(match.group(1)) for name in names if (match := re.search(r"layers\.(\d+)\.", name))})
    return {"expected": expected, "trained": trained, "layers": layers}


if __name__ == "__main__":
    main()
