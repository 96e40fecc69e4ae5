"""What ``burst train`` does with a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from burst import cards, clouds, lengths, planner, spec, survey
from burst.cards import Card
from burst.clouds import Question
from burst.duration import Surroundings
from burst.errors import InvalidInput, NothingFits
from burst.plan import Machine
from burst_payload.measures import table
from jobs import burst, write_job

GIB = 1 << 30
HERE = Machine("local", "CPU", None, Surroundings(rented=False, downloads=False, environment=False), 64 * GIB)
SPEC = """\
model: Qwen/Qwen3-4B
data: {train: rows.jsonl, max_length: 4096}
cloud: {gpus: [T4, "A100:1", H100], infra: [lambda], prices: {"lambda/us:A100": 1.29, "lambda/us:H100": 2.99}}
"""


@pytest.fixture
def decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A decision on a machine that a test describes; the lengths are those of long rows."""
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(clouds, "ask", lambda: Question(known=("lambda",)))
    monkeypatch.setattr(
        lengths, "measure", lambda *_: lengths.Lengths(4000, 4000, 400_000, 1_600_000_000, 100, 1000, 0)
    )
    write_job(tmp_path, SPEC)
    asked: list[str] = []

    def call(where: str, machine: Machine, **options: Any) -> tuple[planner.Decision, list[str]]:
        monkeypatch.setattr(survey, "local_machines", lambda _: [machine])
        real = survey.cloud_machines
        monkeypatch.setattr(survey, "cloud_machines", lambda *args: asked.append("cloud") or real(*args))
        return planner.decide(spec.load(tmp_path / "burst.yaml"), tmp_path, where, **options), asked

    return call


def with_card(name: str, **changes: Any) -> Machine:
    card = cards.find(name)
    assert isinstance(card, Card)
    return replace(HERE, name=name, card=card, memory_bytes=card.memory_bytes, **changes)


def test_a_card_that_can_is_taken_and_nobody_else_is_asked(decide: Any) -> None:
    decided, asked = decide("auto", with_card("RTX4090"))
    assert (decided.where, asked) == ("local", [])


def test_one_that_cannot_leads_to_the_cards_that_can(decide: Any) -> None:
    decided, asked = decide("auto", with_card("RTX3070Ti", blocked=("it is reserved",)))
    assert (decided.where, asked) == ("cloud", ["cloud"])
    assert {"A100:1", "H100"} <= set(decided.spec.cloud.gpus)
    assert decided.plan.chosen.machine.name == "A100"


def test_asked_for_and_impossible_is_refused_with_the_reason(decide: Any) -> None:
    small = with_card("RTX3070Ti")
    with pytest.raises(NothingFits, match="needs .* free"):
        decide("local", replace(small, memory_bytes=2 * GIB))
    decided, _ = decide("local", replace(small, memory_bytes=2 * GIB), force=True)
    assert (decided.where, decided.plan) == ("local", None)


def test_measures_that_it_takes_to_fit_go_into_the_run(decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(row for row in table.MEASURES if row.name != "boundary_offload")
    row = table.Measure("boundary_offload", "offload", "boundaries", needs=("checkpointing",), when="tight")
    monkeypatch.setattr(table, "MEASURES", (*others, row))
    monkeypatch.setattr(table, "NAMES", tuple(item.name for item in table.MEASURES))
    usual, _ = decide("local", with_card("RTX4090"))
    assert usual.spec.train.measures is None
    short = replace(with_card("RTX4090"), memory_bytes=usual.plan.chosen.memory.needed_bytes - 1)
    tight, _ = decide("local", short)
    assert "boundary_offload" in tight.plan.chosen.extra
    assert set(tight.plan.chosen.extra) <= set(tight.spec.train.measures)
    assert tight.plan.chosen.memory.needed_bytes < short.memory_bytes


def test_a_card_without_a_known_price_is_asked_for_not_refused(decide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burst.prices.quotes", lambda *_: ([], []))
    decided, _ = decide("cloud", HERE)
    assert decided.where == "cloud"
    assert "asked of SkyPilot" in decided.plan.reasons[0]
    assert "A100:1" in decided.spec.cloud.gpus


def test_no_plan_is_no_obstacle(tmp_path: Path) -> None:
    write_job(tmp_path, "model: ./odd\ndata: {train: rows.jsonl}\n")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "odd"}')
    decided = planner.decide(spec.load(tmp_path / "burst.yaml"), tmp_path, "auto")
    assert decided.where == "local"
    assert "there is no plan: the architecture 'odd' is not known" in str(decided.note)


def test_train_refuses_what_does_not_fit(tmp_path: Path) -> None:
    """72 billion parameters in full precision are more than any test machine has free."""
    write_job(tmp_path, "model: Qwen/Qwen2.5-72B\ndata: {train: rows.jsonl}\n")
    result = burst(
        "train", "--where", "local", cwd=tmp_path, check=False, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf")
    )
    assert result.returncode == 3, result.stderr
    assert "needs" in result.stderr
    assert "--force" in result.stderr.splitlines()[-1]


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_a_sample_is_close_to_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_job(tmp_path, rows=3000)
    loaded = spec.load(path)
    exact = lengths.measure(loaded, tmp_path, [], 5.0)
    monkeypatch.setattr(lengths, "EXACT_BYTES", 1000)
    unknown: list[str] = []
    close = lengths.measure(loaded, tmp_path, unknown, 5.0)
    assert (close.rows, close.longest) == (exact.rows, exact.longest)
    assert close.tokens == pytest.approx(exact.tokens, rel=0.1)
    assert close.scored == pytest.approx(exact.scored, rel=0.15)
    assert "of 3,000 rows were counted" in unknown[0]


def test_data_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": 3}\n')
    with pytest.raises(InvalidInput):
        lengths.measure(spec.load(path), tmp_path, [], 5.0)
