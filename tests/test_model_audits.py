"""The audits against real models of many families: the formula is PEFT's count, or the run stops and says what to do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "smollm3"]
EXPERTS = ["qwen3_moe", "mixtral", "gpt_oss", "qwen3_next"]

pytestmark = pytest.mark.payload


@pytest.fixture(scope="module")
def result(payload_python: str) -> dict[str, Any]:
    script = Path(__file__).parent / "model_audits.py"
    process = subprocess.run([payload_python, str(script)], text=True, capture_output=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("family", DENSE)
def test_dense_models(result: dict[str, Any], family: str) -> None:
    """Four layers of q (32 to 32), k and v (32 to 16), o (32 to 32), gate, up (32 to 64) and down (64 to 32), rank 4."""
    layer = 4 * (64 + 48 + 48 + 64 + 96 + 96 + 96)
    out = 32 + 16 + 16 + 32 + 64 + 64 + 32
    every = [0, 1, 2, 3]
    assert result[family] == {
        "seven": {"expected": 4 * layer, "trained": 4 * layer, "layers": every},
        "all-linear": {"expected": 4 * layer, "trained": 4 * layer, "layers": every},
        "last two layers": {"expected": 2 * layer, "trained": 2 * layer, "layers": [2, 3]},
        "DoRA": {"expected": 4 * (layer + out), "trained": 4 * (layer + out), "layers": every},
        "attention of the last layer": {"expected": 4 * 224, "trained": 4 * 224, "layers": [3]},
    }


def test_fused_projections_need_their_own_names(result: dict[str, Any]) -> None:
    assert "gate_up_proj, o_proj, qkv_proj; or to all-linear" in result["phi3"]["seven"]["stop"]
    assert result["phi3"]["all-linear"]["trained"] == 4 * 4 * (96 + 64 + 160 + 96)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_counted_or_refused(result: dict[str, Any], family: str) -> None:
    for case, found in result[family].items():
        if "stop" in found:
            assert "set adapter.targets to the attention layers" in found["stop"] or "adapter.dora" in found["stop"], (
                case
            )
        else:
            assert found["trained"] == found["expected"] > 0
    assert result[family]["attention of the last layer"]["layers"] == [3]


def test_experts_of_qwen3_moe_are_trained(result: dict[str, Any]) -> None:
    """Attention, and per expert rank 8 on the fused gate and up (32 by 32) and rank 4 on down (32 by 16)."""
    assert result["qwen3_moe"]["seven"]["trained"] == 4 * (4 * 224 + 4 * (8 * 64 + 4 * 48))
