"""The memory and speed measures: the decision alone, and each against the plain model (float32, CPU)."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from burst_payload.measures import table
from burst_payload.stop import Stop

FACTS = table.Facts()
SAME = 2e-5
"""Largest relative difference of a gradient tensor: float32 sums in another order."""


@pytest.fixture(scope="module")
def results(payload_python: str) -> dict[str, Any]:
    script = Path(__file__).parent / "measure_cases.py"
    process = subprocess.run([payload_python, str(script)], text=True, capture_output=True)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


def assert_same(cases: dict[str, Any], count: int) -> None:
    assert len(cases) == count
    for name, found in cases.items():
        assert found["tensors"] >= 14, name
        assert found["loss"] < SAME, (name, found)
        assert found["gradient"] < SAME, (name, found)
        assert found["undone"] < SAME, (name, found)


def test_auto_takes_what_applies_and_says_why_not() -> None:
    choice = table.choose(None, FACTS)
    assert choice.taken == ("scored_logits",)
    assert choice.skipped["graph_cut"] == "the adapter starts at the first layer"
    assert table.choose(None, replace(FACTS, first_trained_layer=3)).taken[:2] == ("scored_logits", "graph_cut")


def test_a_list_is_taken_as_it_is_in_the_tables_order() -> None:
    choice = table.choose(["graph_cut", "scored_logits"], replace(FACTS, first_trained_layer=1))
    assert choice.taken == ("scored_logits", "graph_cut")
    assert table.choose([], FACTS) == table.Choice((), dict.fromkeys(table.NAMES, "not asked for"))


def test_what_cannot_be_done_is_refused_with_the_reason() -> None:
    with pytest.raises(Stop, match="graph_cut .the adapter starts at the first layer."):
        table.choose(["graph_cut"], FACTS)
    with pytest.raises(Stop, match="no measure is called graph_cutt"):
        table.choose(["graph_cutt"], FACTS)


def test_every_need_exists_and_every_measure_has_a_module() -> None:
    package = Path(table.__file__).parent
    for measure in table.MEASURES:
        assert set(measure.needs + measure.pays) <= table.NEEDS.keys()
        assert (package / f"{measure.name}.py").is_file()
    assert len(set(table.NAMES)) == len(table.NAMES)


@pytest.mark.payload
def test_scored_logits(results: dict[str, Any]) -> None:
    assert_same(results["scored_logits"], 6)
    assert_same(results["scored_logits_in_several_tiles"], 1)
    assert results["scored_logits_in_several_tiles"]["gemma2"]["detail"] == "tiles of 3 tokens"


@pytest.mark.payload
def test_graph_cut(results: dict[str, Any]) -> None:
    assert_same(results["graph_cut"], 4)
    calls = results["graph_cut_keeps_and_recomputes_nothing_below"]
    assert calls["plain"] == [2, 2, 2, 2], "checkpointing runs every layer twice"
    assert calls["graph_cut"] == [1, 1, 1, 2]


@pytest.mark.payload
def test_tiled_mlp(results: dict[str, Any]) -> None:
    assert_same(results["tiled_mlp"], 7)
    assert {found["detail"] for found in results["tiled_mlp"].values()} == {"4 MLPs in tiles of 7 tokens"}
    assert results["tiled_mlp_sees_tiles"]["tokens"] == [7, 7, 6, 7, 7, 6]
    alone = results["tiled_mlp_leaves_experts_alone"]
    assert all(
        "tiled_mlp (the model has no gated MLP outside of experts)" in alone[name]
        for name in ("qwen3_moe", "qwen3_next")
    )
    assert alone["mixed"] == "2 MLPs in tiles of 7 tokens"


@pytest.mark.payload
def test_boundary_offload(results: dict[str, Any]) -> None:
    assert_same(results["boundary_offload"], 3)
    pool = results["boundary_offload_uses_its_buffers_again"]
    assert pool == {"first": 4, "after": 4, "free": 4, "bytes": 24 * 32 * 4}


@pytest.mark.payload
def test_fused_lora(results: dict[str, Any]) -> None:
    assert_same(results["fused_lora"], 5)
    quantized = results["fused_lora_on_4_bits"]
    assert (quantized["kind"], quantized["ran"], quantized["tensors"]) == ("Linear4bit", "_LoraLinearBackward", 3)
    assert max(quantized["loss"], quantized["gradient"]) < SAME


@pytest.mark.payload
def test_all_together(results: dict[str, Any]) -> None:
    assert_same(results["all_together"], 3)


@pytest.mark.payload
def test_refusals_and_the_record(results: dict[str, Any]) -> None:
    found = results["refusals"]
    assert "graph_cut (the adapter starts at the first layer)" in found["asked"]
    assert found["auto"]["applied"].keys() == {"scored_logits"}
    assert found["auto"]["skipped"]["graph_cut"] == "the adapter starts at the first layer"
