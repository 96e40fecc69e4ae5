"""Memory and time against what was measured, what happened to people, and what must hold for any job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from burst import architecture, cards, duration, estimate, measures, shipped
from burst.cards import Card
from burst.duration import Surroundings
from burst.estimate import Job
from hypothesis import given
from hypothesis import strategies as st

GIB = 1 << 30
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS: dict[str, dict[str, Any]] = shipped.read("models.json")["models"]
PAYLOAD = measures.of_training("auto", "auto", on_gpu=True) - {"fused_lora"}
RECIPE = PAYLOAD | {"graph_cut", "tiled_mlp", "boundary_offload"}
NONE = frozenset({"optimizer_8bit", "checkpointing"})
"""QLoRA as the libraries do it by themselves: everything upcast, all logits kept."""


def text_of(name: str, model_type: str, **changes: Any) -> architecture.Architecture:
    return architecture.read({**MODELS[name]["text_config"], "model_type": model_type, **changes})


GEMMA = text_of("google/gemma-3-4b", "gemma3_text")
QWEN27 = text_of("Qwen/Qwen3.6-27B", "qwen3_5_text")
CODER = architecture.read(MODELS["Qwen/Qwen3-Coder-30B-A3B-Instruct"])
CODER8 = architecture.read({**MODELS["Qwen/Qwen3-Coder-30B-A3B-Instruct"], "num_hidden_layers": 8})


def card(name: str) -> Card:
    found = cards.find(name)
    assert isinstance(found, Card)
    return found


def job(model: architecture.Architecture, rank: int, longest: int, *, scored: int | None = None, **changes: Any) -> Job:
    rows = changes.pop("rows", 8)
    return Job(model, ALL, rank, longest, scored or longest, longest * rows, longest * longest * rows, rows, **changes)


def peak_gib(a_job: Job, name: str, names: frozenset[str]) -> float:
    return estimate.memory(a_job, card(name), measures.settings(names)).peak_bytes / GIB


MEASURED = [
    (job(GEMMA, 112, 6400, scored=26), PAYLOAD, 6.11, 7717),
    (job(GEMMA, 112, 6400, scored=26), PAYLOAD | {"boundary_offload"}, 5.14, 7326),
    (job(CODER8, 16, 2048), PAYLOAD, 12.86, 9908),
    (job(QWEN27, 8, 7680, last_layers=16), PAYLOAD, 27.22, 600),
    (job(QWEN27, 8, 7680, last_layers=16), PAYLOAD | {"boundary_offload"}, 22.75, 600),
]
"""One H200, torch 2.11, TRL 1.15: DESIGN's table, in GiB and tokens a second. The constants are calibrated on these."""


@pytest.mark.parametrize(("a_job", "names", "gib", "rate"), MEASURED)
def test_peaks_and_rates_that_were_measured(a_job: Job, names: frozenset[str], gib: float, rate: float) -> None:
    assert 0.97 <= peak_gib(a_job, "H200", names) / gib <= 1.06
    step = duration.step_s(a_job, card("H200"), measures.settings(names), Surroundings(rented=True))
    assert 0.75 <= a_job.longest / step.expected_s / rate <= 1.25
    assert step.low_s < step.expected_s < step.high_s


@pytest.mark.parametrize(
    ("rows", "effective", "epochs", "steps"),
    [(1800, 16, 3, 339), (900, 8, 1, 113), (1167, 8, 3, 438), (1189, 8, 3, 447)],
)
def test_steps_that_are_known(rows: int, effective: int, epochs: float, steps: int) -> None:
    assert job(GEMMA, 8, 100, rows=rows, effective_batch=effective, epochs=epochs).steps == steps


def test_nf4_bytes_a_parameter() -> None:
    assert estimate.nf4_bytes(4096 * 4096) / 4096**2 == pytest.approx(0.516, abs=0.0005)


# --- what happened to people ------------------------------------------------------------------------------------------


def test_a_5090_and_the_27b() -> None:
    """All layers at 7,680 tokens ran out of memory; the final recipe trained the last 16 of 64."""
    everything, last = job(QWEN27, 8, 7680), job(QWEN27, 8, 7680, last_layers=16)
    assert not estimate.fits(everything, card("RTX5090"), measures.settings(NONE))
    assert not estimate.fits(last, card("RTX5090"), measures.settings(NONE))  # fewer layers alone did not help
    assert estimate.fits(last, card("RTX5090"), measures.settings(RECIPE))


def test_an_8_gb_card_and_gemma() -> None:
    a_job = job(GEMMA, 112, 6400, scored=26)
    small = card("RTX3070Ti")
    assert not estimate.fits(a_job, small, measures.settings(NONE))
    assert estimate.fits(a_job, small, measures.settings(RECIPE))
    assert not estimate.fits(replace(a_job, rank=256), small, measures.settings(PAYLOAD))


def test_an_rtx_8000_and_the_coder() -> None:
    """It fits in 4 bits (27 to 32 GB were used), and takes half an hour of compilation first."""
    a_job = job(CODER, 16, 1024)
    names = PAYLOAD | {"experts_4bit"}
    needed = estimate.memory(a_job, card("RTX8000"), measures.settings(names)).needed_bytes / GIB
    assert 20 < needed < 35
    assert not estimate.fits(a_job, card("RTX8000"), measures.settings(PAYLOAD))  # experts in 16 bits
    phases = duration.phases(a_job, card("RTX8000"), measures.settings(names), Surroundings(rented=False))
    assert phases["compile"].low_s >= 900
    assert "compile" not in duration.phases(a_job, card("A100"), measures.settings(names), Surroundings(rented=True))


# --- what holds for any job -------------------------------------------------------------------------------------------


@given(
    st.integers(64, 20_000),
    st.integers(1, 256),
    st.sampled_from(sorted(measures.TABLE)),
    st.sampled_from(["T4", "RTX4090", "H200"]),
    st.sampled_from(sorted(MODELS)),
)
def test_more_needs_more_and_no_measure_costs_memory(
    longest: int, rank: int, name: str, where: str, model: str
) -> None:
    a_job, on = job(architecture.read(MODELS[model]), rank, longest), card(where)
    base = measures.settings(PAYLOAD)
    now = estimate.memory(a_job, on, base)
    assert all(size >= 0 for size in now.components.values())
    assert estimate.memory(replace(a_job, longest=longest + 64), on, base).needed_bytes >= now.needed_bytes
    more = estimate.memory(replace(a_job, rank=rank + 1), on, base)  # larger states may be paged, which smaller are not
    assert more.needed_bytes + more.host_bytes > now.needed_bytes + now.host_bytes
    assert estimate.memory(a_job, on, measures.settings(PAYLOAD | {name})).needed_bytes <= now.needed_bytes


@given(
    st.sampled_from(["longest", "rank", "last_layers"]),
    st.sampled_from(["T4", "L4", "A100"]),
    st.integers(1024, 60_000),
)
def test_the_largest_that_fits_fits_and_the_next_does_not(field: str, where: str, longest: int) -> None:
    a_job, on, how = job(GEMMA, 64, longest), card(where), measures.settings(PAYLOAD)
    value = estimate.largest(a_job, on, how, field)  # type: ignore[arg-type]
    if value is None:
        return
    changed = {"longest": a_job.longest, "rank": a_job.rank, "last_layers": len(GEMMA.layers)}
    assert estimate.fits(replace(a_job, **{field: value}), on, how)
    if value < changed[field]:
        assert not estimate.fits(replace(a_job, **{field: value + 1}), on, how)


def test_the_measures_of_a_run_are_those_that_the_payload_takes() -> None:
    assert PAYLOAD >= {"scored_logits", "no_upcast", "checkpointing", "optimizer_8bit", "optimizer_paged"}
    assert "graph_cut" not in PAYLOAD
    last = measures.Training(first_trained_layer=48, longest_tokens=8192)
    assert "graph_cut" in measures.taken(last, on_gpu=True)
    rungs = list(measures.ladder(last, on_gpu=True))
    assert rungs[0] == measures.taken(last, on_gpu=True)
    assert rungs[-1] == measures.taken(last, on_gpu=True, tight=True)
    assert list(measures.ladder(measures.Training(asked=("scored_logits",)), on_gpu=True))[1:] == []
    assert {"scored_logits", "no_upcast"} <= measures.of_training("auto", "auto", on_gpu=False)
    assert "checkpointing" not in measures.of_training("adamw_torch", "off", on_gpu=True)
    assert all(measures.TABLE[name].built for name in PAYLOAD)


def test_old_cards_compute_in_other_formats() -> None:
    assert estimate.precise(job(CODER, 8, 100), card("T4")).compute == "float16"
    assert estimate.precise(job(GEMMA, 8, 100), card("T4")).compute == "float32"
    assert estimate.precise(job(GEMMA, 8, 100), None).compute == "float32"
