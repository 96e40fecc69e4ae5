"""Where a job runs, and why."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from burst import cards, measures, plan, quotes
from burst.cards import Card
from burst.duration import Surroundings
from burst.estimate import Job
from burst.plan import Machine, Wishes
from burst.quotes import Quote
from jobs import burst, write_job
from test_estimate import CODER, GEMMA, PAYLOAD, QWEN27, job

GIB = 1 << 30
HERE, THERE = Surroundings(rented=False, downloads=False, environment=False), Surroundings(rented=True)


def here(name: str | None, **changes: Any) -> Machine:
    card = cards.find(name) if name else None
    assert card is None or isinstance(card, Card)
    memory = card.memory_bytes if card else 16 * GIB
    return replace(Machine("local", name or "CPU", card, HERE, memory, 64 * GIB, 500 * GIB), **changes)


def there(name: str, usd: float | None, **changes: Any) -> Machine:
    card = cards.find(name)
    assert isinstance(card, Card)
    quote = Quote("lambda/us-east-1", name, usd, enabled=True)
    return replace(Machine("cloud", name, card, THERE, card.memory_bytes, quote=quote), **changes)


def decide(a_job: Job, *machines: Machine, **wishes: Any) -> plan.Plan:
    return plan.decide(a_job, list(machines), Wishes(**wishes))


SMALL = job(GEMMA, 16, 1024, rows=400)
A100, H100 = there("A100", 1.29), there("H100", 2.99)


def test_this_machine_when_it_can() -> None:
    made = decide(SMALL, here("RTX4090"), A100)
    assert made.chosen is not None
    assert made.chosen.machine.where == "local"
    assert [c.warnings[-1] for c in made.candidates if c is not made.chosen] == [
        "not taken: this machine can do it for nothing"
    ]


def test_the_cheapest_that_fits_when_it_cannot() -> None:
    made = decide(job(QWEN27, 8, 4096, rows=100), here("RTX3070Ti"), H100, A100, there("T4", 0.2))
    assert made.chosen is not None
    assert made.chosen.machine.name == "A100"
    why = {c.machine.name: c.why_not for c in made.candidates}
    assert why["RTX3070Ti"][0].startswith("needs ")
    assert why["T4"][0].startswith("needs ")
    assert why["H100"] == ()
    assert any(reason.startswith("here: needs") for reason in made.reasons)


def test_a_machine_that_is_unreasonably_slow_is_not_taken() -> None:
    slow = job(GEMMA, 16, 1024, rows=20_000)
    made = decide(slow, here(None, memory_bytes=64 * GIB), A100)
    assert made.chosen is not None
    assert made.chosen.machine.name == "A100"
    assert "times as long as A100" in made.reasons[0]
    patient = decide(slow, here(None, memory_bytes=64 * GIB), A100, slower_by=1e6)
    assert patient.chosen is not None
    assert patient.chosen.machine.name == "CPU"
    late = decide(slow, here("RTX3070Ti"), A100, deadline_hours=0.01)
    assert late.chosen is None
    assert "the deadline is 0.01 h" in late.reasons[0]


@pytest.mark.parametrize(
    ("prefer", "name"), [("auto", "RTX4090"), ("local", "RTX4090"), ("cloud", "A100"), ("fast", "H100")]
)
def test_preferences(prefer: str, name: str) -> None:
    made = decide(job(GEMMA, 16, 6000, rows=9000), here("RTX4090"), A100, H100, prefer=prefer)
    assert made.chosen is not None
    assert made.chosen.machine.name == name


def test_asking_for_a_machine_that_cannot_is_refused_with_the_nearest_change() -> None:
    made = decide(job(GEMMA, 112, 30_000), here("RTX3070Ti"), A100, where="local")
    assert made.chosen is None
    assert made.reasons[0].startswith("RTX3070Ti: needs ")
    assert "data.max_length: " in made.reasons[-1]
    assert "A100" not in " ".join(made.reasons)


@pytest.mark.parametrize("price", [None, 0.0, float("nan"), -3.0, 1e9])
def test_prices_that_are_none_never_win(price: float | None) -> None:
    free = there("H100", quotes.sane(price))
    made = decide(SMALL, free, A100, where="cloud")
    assert made.chosen is not None
    assert made.chosen.machine.name == "A100"
    assert next(c for c in made.candidates if c.machine.name == "H100").why_not == ("its price is not known",)


def test_a_budget_that_is_too_small_is_a_reason() -> None:
    made = decide(job(GEMMA, 16, 6000, rows=50_000), A100, where="cloud", max_cost_usd=5.0)
    assert made.chosen is None
    assert "are within the budget" in made.reasons[0]
    tiny = decide(SMALL, A100, where="cloud", max_cost_usd=0.05)
    assert "minutes of training are left" in tiny.reasons[0]


def test_the_worst_case_is_never_more_than_the_budget() -> None:
    made = decide(SMALL, A100, where="cloud", max_cost_usd=4.0)
    assert made.chosen is not None
    assert made.chosen.limits is not None
    assert made.chosen.limits.worst_usd <= 4.0
    assert made.chosen.cost is not None
    assert made.chosen.cost.low_usd < made.chosen.cost.expected_usd < made.chosen.cost.high_usd


def test_an_rtx_8000_and_the_coder() -> None:
    """It fits in 4 bits; Turing with experts compiles for half an hour, so a rented card that takes it is advised."""
    a_job = job(CODER, 16, 1024, rows=1800, effective_batch=16, epochs=3)
    four_bit = PAYLOAD | {"experts_4bit"}
    made = decide(a_job, here("RTX8000"), A100, measures=four_bit)
    card = next(c for c in made.candidates if c.machine.name == "RTX8000")
    assert card.fits
    assert any("mixture of experts: 15-30 minutes of compilation" in text for text in card.warnings)
    assert card.phases["compile"].expected_s > 900
    fast = decide(a_job, here("RTX8000"), A100, measures=four_bit, prefer="fast")
    assert fast.chosen is not None
    assert fast.chosen.machine.name == "A100"
    now = decide(a_job, here("RTX8000"), A100)  # what this version's payload does
    assert all("experts stay in 16 bits" in c.why_not[0] for c in now.candidates)


def test_old_cards_carry_their_traps() -> None:
    t4 = plan.weigh(SMALL, here("T4"), Wishes())
    assert any("no bf16, and Gemma 3 overflows" in text for text in t4.warnings)
    v100 = plan.weigh(job(QWEN27, 8, 512), here("V100"), Wishes())
    assert "needs another wheel: burst env --torch-backend cu126" in v100.warnings
    k80 = plan.weigh(SMALL, here("K80"), Wishes())
    assert "no torch build has kernels" in k80.why_not[0]


def test_wrong_targets_are_found_before_anything_runs() -> None:
    candidate = plan.weigh(replace(SMALL, targets=("q_proj", "attn")), here("A100"), Wishes())
    assert candidate.why_not[0].startswith("the model has no layer called attn: ")


def test_ram_and_disk_count() -> None:
    candidate = plan.weigh(SMALL, here("A100", disk_bytes=1 << 20), Wishes())
    assert "on disk" in candidate.why_not[0]
    paged = plan.weigh(job(GEMMA, 256, 512), here("A100", ram_bytes=1 << 20), Wishes())
    assert "of main memory" in paged.why_not[0]


def test_measures_that_are_not_built_are_never_assumed() -> None:
    made = decide(SMALL, here("A100"))
    assert made.chosen is not None
    assert not set(made.chosen.measures) & set(measures.unbuilt())


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_has_everything(tmp_path: Path) -> None:
    write_job(tmp_path)
    value = json.loads(burst("plan", "--json", "--offline", cwd=tmp_path).stdout)
    assert value["decision"]["where"] == "local"
    assert value["decision"]["reasons"]
    assert value["optimizer_steps"] == 2
    assert value["trainable_parameters"] > 0
    assert value["tokens"]["rows"] == 12
    for candidate in value["candidates"]:
        assert {"memory", "phases_s", "total_s", "cost_usd", "offer", "fits", "why_not"} <= candidate.keys()
        memory = candidate["memory"]
        assert sum(memory["components"].values()) == memory["needed_bytes"]
    assert sum(candidate["chosen"] for candidate in value["candidates"]) == 1


def test_the_screen_says_where_why_and_what_was_not_known(tmp_path: Path) -> None:
    write_job(tmp_path)
    shown = burst("plan", "--explain", "--offline", cwd=tmp_path).stdout
    for text in ("where   this machine", "why     fits here", "snapshot", "memory on ", "one pass"):
        assert text in shown


def test_a_plan_without_the_hub_uses_the_table_and_says_so(tmp_path: Path) -> None:
    spec = "model: Qwen/Qwen3-0.6B\ndata: {train: rows.jsonl}\n"
    write_job(tmp_path, spec)
    result = burst(
        "plan", "--json", "--offline", cwd=tmp_path, check=False, HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"
    )
    value = json.loads(result.stdout)
    assert value["parameters"]["total"] == 596_049_920
    assert any("from burst's table" in text for text in value["unknown"])
    assert any("estimated from characters" in text for text in value["unknown"])


@pytest.fixture
def black_hole() -> Any:
    """A port that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_network_that_swallows_everything_costs_little(tmp_path: Path, black_hole: str) -> None:
    write_job(tmp_path, "model: Qwen/Qwen3-0.6B\ndata: {train: rows.jsonl}\n")
    started = time.monotonic()
    result = burst(
        "plan",
        "--json",
        cwd=tmp_path,
        check=False,
        HF_HOME=str(tmp_path / "hf"),
        HF_ENDPOINT=black_hole,
        HTTPS_PROXY=black_hole,
    )
    took = time.monotonic() - started
    assert json.loads(result.stdout)["candidates"], result.stderr
    assert took < 15, "the limits in the code are 3 s in all; the rest is a machine that may be busy"


def test_an_unknown_model_is_refused_with_a_way_on(tmp_path: Path) -> None:
    write_job(tmp_path, "model: someone/something\ndata: {train: rows.jsonl}\n")
    result = burst("plan", "--offline", cwd=tmp_path, check=False)
    assert result.returncode == 1
    assert "nothing is known of the model someone/something" in result.stderr


def test_the_plan_loads_no_heavy_library(tmp_path: Path) -> None:
    write_job(tmp_path)
    script = (
        "import sys\nfrom burst.cli import main\nsys.argv = ['burst', 'plan', '--offline']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'sky', 'datasets', 'huggingface_hub'} & set(sys.modules)), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, text=True, capture_output=True, check=True, env=os.environ
    )
    assert result.stderr.splitlines()[-1] == "[]"
