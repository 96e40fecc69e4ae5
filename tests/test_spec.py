"""burst.yaml: strict, all problems at once, each with its line and the nearest key."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from burst import spec
from burst.errors import InvalidInput
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

GOOD = "model: builtin:tiny\ndata:\n  train: a.jsonl\n"


def problems(text: str) -> list[str]:
    with pytest.raises(InvalidInput) as caught:
        spec.parse(text, "b.yaml")
    return caught.value.what.splitlines()


def test_defaults() -> None:
    found = spec.parse(GOOD, "b.yaml")
    assert (found.model_kind, found.where, found.quantization) == ("builtin", "auto", "nf4")
    assert (found.data.max_length, found.data.on_overlong, found.train.effective_batch) == (2048, "refuse", 8)
    assert found.data.training_sources == [spec.Source(path="a.jsonl", repeat=1)]


def test_unknown_keys_name_line_and_nearest_key_and_come_all_at_once() -> None:
    text = "modle: x\nmodel: builtin:tiny\ndata:\n  train: a.jsonl\n  max_lenght: 5\ntrain:\n  lr: 1\n  batch: 0\n"
    found = problems(text)
    assert "b.yaml:5: unknown key 'data.max_lenght'; did you mean 'max_length'?" in found
    assert "b.yaml:1: unknown key 'modle'; did you mean 'model'?" in found
    assert "b.yaml:7: unknown key 'train.lr'; did you mean 'learning_rate'?" in found
    assert any("known keys here: epochs, max_steps" in line for line in problems(GOOD + "train: {zzz: 1}\n"))
    assert any(line.startswith("b.yaml:8: train.batch: input should be greater than or equal to 1") for line in found)
    assert len(found) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a spec is a mapping"),
        ("- 1\n", "a spec is a mapping"),
        ("model: x\n", "missing key 'data'"),
        ("model: builtin:huge\ndata: {train: a}\n", ":1: model: the only built-in model is builtin:tiny"),
        ("model: x\ndata: {}\n", ":2: data: give either train or sources"),
        ("model: x\ndata: {train: a, sources: [{path: b}]}\n", "give either train or sources"),
        ("model: x\ndata: {sources: []}\n", "sources is empty"),
        ("model: x\ndata: {train: a, eval: b, eval_split: 0.1}\n", "give either eval or eval_split"),
        ("model: x\ndata: {train: a, eval_split: 0.9}\n", "data.eval_split"),
        ("model: x\ndata:\n  sources:\n    - path: a\n      repeat: 0\n", ":5: data.sources.0.repeat"),
        (GOOD + "train: {epochs: 1, max_steps: 5}\n", "give either epochs or max_steps"),
        (GOOD + "train: {batch: 3}\n", "effective_batch 8 is not a multiple of batch 3"),
        (GOOD + "train: {optimizer: sgd}\n", "train.optimizer"),
        (GOOD + "cloud: {gpus: ['A100:4', H100]}\n", "the same number of each GPU"),
        (GOOD + "cloud: {gpus: ['A100:0']}\n", "'A100:0' is not a GPU's name"),
        (GOOD + "cloud: {gpus: ['A100:3']}\n", "effective_batch 8 cannot be shared by 3 GPUs"),
        (GOOD + "model: y\n", ":4: found duplicate key"),
        (GOOD + "train: {batch: 1\n", "b.yaml:"),
        (GOOD + "\tx: 1\n", "b.yaml:4"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    assert any(words in line for line in problems(text)), problems(text)


def test_yaml_values_mean_what_they_look_like() -> None:
    text = GOOD + "train: {learning_rate: 2e-4, gradient_checkpointing: on}\nadapter: {targets: [no, q_proj]}\n"
    found = spec.parse(text, "b.yaml")
    assert found.train.learning_rate == 2e-4
    assert found.train.gradient_checkpointing == "on"
    assert found.adapter.targets == ["no", "q_proj"]
    assert spec.parse(GOOD + "train: {gradient_checkpointing: false}\n", "b").train.gradient_checkpointing == "off"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not exist"):
        spec.load(tmp_path / "burst.yaml")
    with pytest.raises(InvalidInput, match="is a folder"):
        spec.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9\n")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        spec.load(tmp_path / "latin.yaml")


def test_the_examples_are_valid() -> None:
    for path in sorted((Path(__file__).parents[1] / "examples").glob("*/burst.yaml")):
        spec.load(path)


def test_schema_names_every_key() -> None:
    schema = spec.schema()
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(spec.Spec.model_fields)
    assert set(schema["$defs"]["Data"]["properties"]) == set(spec.Data.model_fields)


@given(text=st.text(st.sampled_from("model: data\n  {}[]-train,'\"#&*!|>%@`\té0"), max_size=60) | st.text(max_size=30))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        spec.parse(text, "b.yaml")
    except InvalidInput as error:
        assert error.what.startswith("b.yaml")


printable = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"], exclude_characters="\ufeff"))
adapters = st.fixed_dictionaries(
    {},
    optional={
        "rank": st.integers(1, 512),
        "alpha": st.floats(0.1, 1000),
        "dropout": st.floats(0, 0.9),
        "dora": st.booleans(),
        "last_layers": st.integers(1, 100),
        "rslora": st.booleans(),
        "targets": st.lists(st.text("qkv_proj", min_size=1), min_size=1),
    },
)
trains = st.fixed_dictionaries(
    {},
    optional={
        "learning_rate": st.floats(1e-7, 1),
        "seed": st.integers(0, 2**32 - 1),
        "warmup_steps": st.integers(0, 100),
        "epochs": st.floats(0.1, 10),
        "scheduler": st.sampled_from(["linear", "cosine"]),
        "eval_steps": st.integers(1, 100),
    },
)


@given(
    adapter=adapters,
    train=trains,
    kwargs=st.dictionaries(st.text("ab_", min_size=1), st.booleans() | st.integers() | printable),
)
def test_specs_survive_the_disk(adapter: dict, train: dict, kwargs: dict) -> None:
    value = {
        "model": "owner/name",
        "data": {"train": "a.jsonl", "chat_template_kwargs": kwargs},
        "adapter": adapter,
        "train": train,
    }
    wanted = spec.Spec.model_validate(value)
    text = io.StringIO()
    YAML().dump(value, text)
    assert spec.parse(text.getvalue(), "b.yaml") == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: {learning_rate: .inf}\n", "finite number"),
        ("adapter: {alpha: .nan}\n", "finite number"),
        ("train: {max_steps: true}\n", "train.max_steps"),
        ("train: {warmup_steps: 100000000000000000000}\n", "train.warmup_steps"),
        ("adapter: {rank: '8'}\n", "adapter.rank"),
    ],
)
def test_values_are_what_they_look_like(text: str, words: str) -> None:
    assert any(words in line for line in problems(GOOD + text)), problems(GOOD + text)


def test_one_target_needs_no_list() -> None:
    assert spec.parse(GOOD + "adapter: {targets: all-linear}\n", "b.yaml").adapter.targets == ["all-linear"]
