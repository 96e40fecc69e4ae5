"""Masks: only answers are scored, each with its end of turn, exactly as they are asked for later."""

from __future__ import annotations

from pathlib import Path

import pytest
from burst_payload import chat, tiny, tokens
from burst_payload.tokens import TokenizerFacts
from hypothesis import given
from hypothesis import strategies as st

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n\n' + m.content | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
THINKING = (  # the last answer gets a think block, earlier ones lose it: later turns rewrite earlier ones
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% generation %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


@pytest.fixture(scope="session")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFacts:
    return tokens.load(tiny.tokenizer_folder(tmp_path_factory.mktemp("tiny")))


def turns(*contents: str, system: str | None = None) -> dict:
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + messages}


def scored(facts: TokenizerFacts, row: dict, template: str | None = tiny.CHAT_TEMPLATE, **options) -> str:
    example, problems = chat.Renderer(facts, template, **options).encode(row)
    assert problems == []
    assert example is not None
    assert len(example.labels) == len(example.input_ids)
    assert all(label in (chat.IGNORED_LABEL, id) for label, id in zip(example.labels, example.input_ids, strict=True))
    return facts.tokenizer.decode([x for x in example.labels if x != chat.IGNORED_LABEL], skip_special_tokens=False)


def refused(facts: TokenizerFacts, row: dict, template: str | None, **options) -> str:
    example, problems = chat.Renderer(facts, template, **options).encode(row)
    assert example is None
    assert len(problems) == 1
    return problems[0].kind


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, LLAMA3, GEMMA, TOOLS])
def test_every_answer_and_its_end(facts: TokenizerFacts, template: str) -> None:
    assert scored(facts, turns("hé", "yes", "b", "ök 🎉"), template) == "yes<|im_end|>ök 🎉<|im_end|>"


def test_only_the_last(facts: TokenizerFacts) -> None:
    assert scored(facts, turns("a", "one", "b", "two"), score="last") == "two<|im_end|>"
    assert (
        scored(facts, turns("a", "one", "b", "two"), THINKING, score="last") == "<think>\n\n</think>\n\ntwo<|im_end|>"
    )
    assert scored(facts, turns("a", "one"), THINKING, kwargs={"enable_thinking": False}) == "one<|im_end|>"


def test_weight_zero_is_context(facts: TokenizerFacts) -> None:
    row = turns("a", "one", "b", "two")
    row["messages"][1]["weight"] = 0
    assert scored(facts, row) == "two<|im_end|>"


def test_tools_and_calls(facts: TokenizerFacts) -> None:
    row = turns("a", "", "c")
    row["messages"][1]["tool_calls"] = [{"function": {"name": "é", "arguments": {"x": 1}}}]
    row["messages"][2] = {"role": "tool", "content": "7"}
    row["messages"].append({"role": "assistant", "content": "seven"})
    row["tools"] = [{"name": "é"}]
    assert scored(facts, row, TOOLS) == '<call>{"name": "é", "arguments": {"x": 1}}<|im_end|>seven<|im_end|>'


def test_a_template_that_rewrites_earlier_turns_is_refused(facts: TokenizerFacts) -> None:
    assert refused(facts, turns("a", "one", "b", "two"), THINKING) == "template-rewrites"


def test_what_templates_refuse(facts: TokenizerFacts) -> None:
    assert refused(facts, turns("a", "b", system="s"), GEMMA) == "template-refuses"
    renderer = chat.Renderer(facts, GEMMA)
    _, problems = renderer.encode({"messages": [*turns("a")["messages"], *turns("a", "b")["messages"]]})
    assert "Roles must alternate" in problems[0].what


def test_no_end_of_turn_is_refused(facts: TokenizerFacts) -> None:
    assert refused(facts, turns("a", "b"), NO_END) == "eos-not-scored"


def test_no_template(facts: TokenizerFacts) -> None:
    assert refused(facts, turns("a", "b"), None) == "no-template"


def test_a_broken_template_names_its_line(facts: TokenizerFacts) -> None:
    with pytest.raises(chat.TemplateRefusal, match="line 2"):
        chat.Renderer(facts, "ok\n{% for %}")


def test_raw_rows(facts: TokenizerFacts) -> None:
    assert scored(facts, {"prompt": "2+2=", "completion": "4"}, None) == "4<|im_end|>"
    assert scored(facts, {"prompt": "", "completion": "all of it"}, None) == "all of it<|im_end|>"
    assert scored(facts, {"prompt": "", "completion": "all of it"}) == "all of it<|im_end|>", (
        "text rows take no template"
    )
    assert scored(facts, {"prompt": "q", "completion": "a<|im_end|>"}, None) == "a<|im_end|>", "EOS is not doubled"
    assert scored(facts, {"prompt": "q", "completion": "a"}) == "a<|im_end|>", "with a template a prompt is a user turn"


def test_raw_rows_without_eos_are_refused(facts: TokenizerFacts) -> None:
    import dataclasses

    assert refused(dataclasses.replace(facts, eos=None), {"prompt": "q", "completion": "a"}, None) == "eos-not-scored"


def test_two_bos(facts: TokenizerFacts) -> None:
    import dataclasses

    with_bos = dataclasses.replace(facts, bos="<|endoftext|>")
    _, problems = chat.Renderer(with_bos, "{{ bos_token }}" + LLAMA3).encode(turns("a", "b"))
    assert [problem.kind for problem in problems] == ["two-bos"]


def test_the_sandbox_holds(facts: TokenizerFacts) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}" + tiny.CHAT_TEMPLATE
    assert refused(facts, turns("a", "b"), template) == "template-refuses"


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda text: text.strip() and not any(token in text for token in tiny.SPECIAL)
)


@given(
    contents=st.lists(words, min_size=1, max_size=3).flatmap(
        lambda a: st.lists(words, min_size=len(a), max_size=len(a)).map(
            lambda b: [text for pair in zip(a, b, strict=True) for text in pair]
        )
    )
)
def test_labels_decode_to_the_answers(facts: TokenizerFacts, contents: list[str]) -> None:
    row = turns(*contents)
    assert scored(facts, row) == "".join(f"{text}<|im_end|>" for text in contents[1::2])
    example, _ = chat.Renderer(facts, tiny.CHAT_TEMPLATE).encode(row)
    assert example is not None
    rendered, _ = chat.Renderer(facts, tiny.CHAT_TEMPLATE).render(row)
    assert rendered is not None
    assert facts.tokenizer.decode(example.input_ids, skip_special_tokens=False) == rendered.text


@pytest.mark.parametrize("name", ["eos_token", "pad_token"])
def test_special_tokens_must_exist(tmp_path: Path, name: str) -> None:
    import json

    tiny.write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config[name] = "<EOS_TOKEN>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(tokens.TokenizerError, match="is not in the vocabulary"):
        tokens.load(tmp_path)
