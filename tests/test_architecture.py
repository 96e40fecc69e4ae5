"""Facts of a model from its config alone, against the models themselves as transformers and PEFT build them."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from burst import architecture, families, paths, shipped, survey
from burst.errors import InvalidInput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS: dict[str, dict[str, Any]] = shipped.read("models.json")["models"]


def text_of(name: str, model_type: str) -> architecture.Architecture:
    return architecture.read({**MODELS[name]["text_config"], "model_type": model_type})


def ask(python: str, **asked: Any) -> dict[str, Any]:
    """What the training environment makes of configs."""
    script = Path(__file__).parent / "model_counts.py"
    result = subprocess.run(
        [python, str(script)],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(paths.payload())},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


# --- the figures that are known ---------------------------------------------------------------------------------------


def test_known_trainable_parameters() -> None:
    coder = architecture.read(MODELS["Qwen/Qwen3-Coder-30B-A3B-Instruct"])
    assert architecture.trainable(coder, ALL, 16, fused=False) == 843_841_536
    qwen = text_of("Qwen/Qwen3.6-27B", "qwen3_5_text")
    assert architecture.trainable(qwen, ALL, 8, 16) == 9_961_472
    gemma = text_of("google/gemma-3-4b", "gemma3_text")
    assert [architecture.trainable(gemma, ALL, rank) for rank in (112, 16, 128)] == [
        208_617_472,
        29_802_496,
        238_419_968,
    ]
    assert architecture.Pair(16, 4096, 4096).parameters == 131_072


def test_known_sizes() -> None:
    coder = architecture.read(MODELS["Qwen/Qwen3-Coder-30B-A3B-Instruct"])
    assert round(coder.parameters / 1e9, 3) == 30.532
    assert round(coder.expert_parameters / 1e9, 2) == 28.99
    assert round(text_of("Qwen/Qwen3.6-27B", "qwen3_5_text").parameters / 1e9, 2) == 26.90
    assert architecture.read(MODELS["google/gemma-3-4b"]).parameters == 4_300_079_472


def test_names_that_adapters_can_take() -> None:
    qwen = text_of("Qwen/Qwen3.6-27B", "qwen3_5_text")
    assert {"in_proj_qkv", "out_proj", "q_proj", "gate_proj"} <= set(qwen.linear_names())
    assert architecture.missing_targets(qwen, ["q_proj", "qkv_proj"]) == ["qkv_proj"]
    assert architecture.missing_targets(architecture.read(MODELS["openai/gpt-oss-20b"]), ALL) == []


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3-8B", True),
        ("qwen/qwen2.5-7b-instruct", True),
        ("google/gemma-3-4b-it", True),
        ("Qwen/Qwen3-4B-Instruct-2507", True),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", True),
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("someone/Qwen3-8B", False),
        ("Qwen/Qwen3-8", False),
    ],
)
def test_tuned_variants_share_a_shape_and_nothing_else_is_guessed(name: str, known: bool) -> None:
    assert (survey.known_config(name) is not None) is known


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(InvalidInput, match="'mystery' is not known"):
        architecture.read({"model_type": "mystery"})
    with pytest.raises(InvalidInput, match="config.json of a llama model"):
        architecture.read({"model_type": "llama", "hidden_size": "wide"})
    with pytest.raises(InvalidInput, match="not known"):
        architecture.read({})


def test_every_family_is_in_the_table_of_models() -> None:
    nested = {f"{kind}_text" for kind in ("gemma4", "qwen3_5", "qwen3_5_moe")}
    assert set(families.FAMILIES) - nested == {config["model_type"] for config in MODELS.values()}


# --- against the libraries --------------------------------------------------------------------------------------------


@pytest.mark.payload
def test_counts_equal_the_real_models(payload_python: str) -> None:
    nested = {
        f"{name} text": {**MODELS[name]["text_config"], "model_type": kind}
        for name, kind in (
            ("google/gemma-3-4b", "gemma3_text"),
            ("google/gemma-4-E2B", "gemma4_text"),
            ("Qwen/Qwen3.6-27B", "qwen3_5_text"),
            ("Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe_text"),
        )
    }
    asked = {**MODELS, **nested}
    real = ask(payload_python, models=asked)["models"]
    for name, config in asked.items():
        mine = architecture.read(config)
        assert (mine.parameters, mine.quantizable, len(mine.layers)) == (
            real[name]["parameters"],
            real[name]["quantizable"],
            real[name]["layers"],
        ), name
        linear = Counter(f"{m.name} {m.inputs}x{m.outputs}" for m in mine.matrices if not m.experts)
        assert linear == Counter(real[name]["linear"]), name


@pytest.mark.payload
def test_defaults_are_those_of_the_library(payload_python: str) -> None:
    mine = shipped.read("model_defaults.json")["defaults"]
    mine["gemma4_text"].pop("global_head_dim")  # an argument of the config's constructor, not an attribute
    real = ask(payload_python, defaults={kind: list(values) for kind, values in mine.items()})["defaults"]
    assert real == mine


@st.composite
def adapters(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A small config of a random family, and a random adapter on it."""
    family = draw(
        st.sampled_from(
            [
                "llama",
                "qwen2",
                "qwen3",
                "gemma2",
                "gemma3_text",
                "phi3",
                "qwen3_5_text",
                "qwen3_moe",
                "gpt_oss",
                "smollm3",
            ]
        )
    )
    heads, layers = draw(st.sampled_from([2, 4, 6])), draw(st.integers(1, 5))
    width = 16
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * width,
        "intermediate_size": draw(st.integers(3, 9)) * 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": draw(st.sampled_from([1, 2])),
        "head_dim": width,
        "vocab_size": 96,
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": 0,
        "max_position_embeddings": 512,
    }
    if family == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if family == "gpt_oss":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_5_text":
        config |= {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }
    names = architecture.read(config).linear_names()
    experts = family in ("qwen3_moe", "gpt_oss")
    if experts:  # how PEFT reaches fused experts differs by family; the payload compares and stops
        names = [name for name in names if name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    everything = not experts and draw(st.booleans())
    targets = ["all-linear"] if everything else draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    return config, {
        "rank": draw(st.integers(1, 40)),
        "targets": targets,
        "last_layers": draw(st.none() | st.integers(1, layers)),
        "dora": draw(st.booleans()),
    }


@pytest.mark.payload
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(adapters(), min_size=40, max_size=60))
def test_random_adapters_equal_peft(payload_python: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    # a layer without any of the names is refused by PEFT; such a case has nothing to train here either
    cases = [
        (c, w)
        for c, w in cases
        if architecture.trainable(architecture.read(c), w["targets"], w["rank"], w["last_layers"])
    ]
    real = ask(payload_python, adapters=cases)["adapters"]
    for (config, wanted), count in zip(cases, real, strict=True):
        assert count is not None, (config, wanted)
        mine = architecture.trainable(
            architecture.read(config), wanted["targets"], wanted["rank"], wanted["last_layers"], dora=wanted["dora"]
        )
        assert mine == count, (config, wanted)


@pytest.mark.payload
def test_fused_experts_equal_peft(payload_python: str) -> None:
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "tie_word_embeddings": False,
    }
    wanted = {"rank": 4, "targets": ALL, "last_layers": None, "dora": False}
    assert ask(payload_python, adapters=[(config, wanted)])["adapters"] == [
        architecture.trainable(architecture.read(config), ALL, 4)
    ]
