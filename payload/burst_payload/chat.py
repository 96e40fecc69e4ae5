"""Rows rendered with the model's chat template, tokenized, and masked so that only answers are scored.

The mask comes from prefix differences: an assistant turn is what the full rendering adds to the rendering of the turns
before it plus the generation prompt, up to and including the end-of-turn token. That is exactly what the model sees and
must produce when it is asked later. Where the full rendering does not start with that prefix (a template that rewrites
earlier turns), the row is refused with the reason instead of being masked by guesswork.

The template environment is the one transformers documents for chat templates (sandboxed Jinja with ``tojson``,
``raise_exception``, ``strftime_now``, loop controls and ``generation`` blocks); a test compares the two.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from burst_payload.rows import Problem, Row, as_chat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Encoding

    from burst_payload.tokens import TokenizerFacts

IGNORED_LABEL = -100
"""The label that PyTorch's cross entropy leaves out (its ``ignore_index`` default)."""


@dataclass(frozen=True)
class Rendered:
    """Text and the character spans ``(start, end)`` of it that are scored."""

    text: str
    spans: list[tuple[int, int]]
    add_special_tokens: bool
    append_eos: bool


@dataclass(frozen=True)
class Example:
    """One training row. ``labels`` has the length of ``input_ids``; unscored positions hold -100."""

    input_ids: list[int]
    labels: list[int]


class Renderer:
    """Renders canonical rows for one tokenizer.

    Args:
        facts: the tokenizer.
        template: Jinja source, or None to train on raw text (only ``prompt``/``completion`` rows).
        score: ``all`` assistant turns or only the ``last``.
        kwargs: extra variables for the template, such as ``enable_thinking``.
    """

    def __init__(
        self, facts: TokenizerFacts, template: str | None, score: str = "all", kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.facts = facts
        self.score = score
        self.chat = ChatTemplate(template, facts, kwargs or {}) if template is not None else None
        self.turn_end = self.chat.turn_end() if self.chat else None
        controls = sorted(facts.controls, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, controls))) if controls else None
        self._control_starts = {text[0] for text in controls}
        self.stops = [text for text, id in facts.special.items() if id in facts.eos_ids]

    def render(self, row: Row) -> tuple[Rendered | None, list[Problem]]:
        """Text and scored spans of a row, or None and why not."""
        if self.chat is None:
            if "messages" in row:
                return None, [
                    Problem(
                        "no-template",
                        "the model has no chat template for these turns",
                        "set data.chat_template to a .jinja file, or take an instruct model",
                    )
                ]
            return self._raw(row)
        if "messages" not in row:
            if not row["prompt"]:
                return self._raw(row)
            row = as_chat(row)
        return self._render_chat(self.chat, row["messages"], row.get("tools"))

    def _raw(self, row: Row) -> tuple[Rendered | None, list[Problem]]:
        """A row of raw text: the completion and the EOS token after it are scored."""
        if self.facts.eos_id is None:
            return None, [
                Problem(
                    "eos-not-scored",
                    "the tokenizer names no EOS token, so the model would never learn to stop",
                    "set eos_token in the model's tokenizer_config.json",
                )
            ]
        text = row["prompt"] + row["completion"]
        return Rendered(text, [(len(row["prompt"]), len(text))], add_special_tokens=True, append_eos=True), []

    def _render_chat(
        self, chat: ChatTemplate, messages: list[Row], tools: list[Any] | None
    ) -> tuple[Rendered | None, list[Problem]]:
        if forged := self._control_in(messages):
            return None, [
                Problem(
                    "control-token",
                    f"the text of turn {forged[0] + 1} holds the control token {forged[1]!r}, which would open or close a turn",
                    "write turns as messages; text that is rendered already goes in text rows with chat_template: none",
                )
            ]
        scored = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1) != 0]
        if self.score == "last":
            scored = scored[-1:]
        try:
            full = chat.render(messages, tools, generation_prompt=False)
            spans = []
            for index in scored:
                prefix = chat.render(messages[:index], tools, generation_prompt=True)
                last = index == len(messages) - 1
                upto = full if last else chat.render(messages[: index + 1], tools, generation_prompt=False)
                # what closes the whole conversation (Phi-3 writes an EOS there) is no part of an earlier turn
                shared = upto if full.startswith(upto) else _shared(upto, full)
                end = self._end_of_turn(shared, len(prefix))
                if not shared.startswith(prefix) or (end is None and shared is not upto):
                    return None, [_not_a_prefix(index, len(scored))]
                if end is None:
                    return None, [
                        Problem(
                            "eos-not-scored",
                            f"the template closes turn {index + 1} with no end-of-turn "
                            "token, so the model would never learn to stop",
                            "set data.chat_template to a template that ends each answer with the EOS token",
                        )
                    ]
                spans.append((len(prefix), end))
            dropped = _dropped(messages, tools, full, dict(zip(scored, spans, strict=True)))
            if dropped is not None:
                return None, [
                    Problem(
                        "template-drops",
                        f"the chat template leaves out {dropped}",
                        "remove it from the row, or set data.chat_template to a template that writes it",
                    )
                ]
        except TemplateRefusal as error:
            return None, [
                Problem(
                    "template-refuses",
                    f"the chat template refuses this row: {error}",
                    "change the roles or their order as the template asks",
                )
            ]
        return Rendered(full, spans, add_special_tokens=False, append_eos=False), []

    def _control_in(self, messages: list[Row]) -> tuple[int, str] | None:
        """The first control token that stands in a text, with its turn."""
        for index, message in enumerate(messages):
            text = message.get("content") or ""
            if self._controls and any(start in text for start in self._control_starts):
                match = self._controls.search(text)
                if match:
                    return index, match.group()
        return None

    def _end_of_turn(self, text: str, start: int) -> int | None:
        """The position after the last end-of-turn token of ``text[start:]``; a tool call may end with another stop."""
        if self.turn_end is not None and (position := text.rfind(self.turn_end, start)) >= 0:
            return position + len(self.turn_end)
        ends = [position + len(stop) for stop in self.stops if (position := text.rfind(stop, start)) >= 0]
        return max(ends, default=None)

    def encode(self, row: Row) -> tuple[Example | None, list[Problem]]:
        """A canonical row as token ids and labels, or None and why not."""
        rendered, problems = self.render(row)
        if rendered is None:
            return None, problems
        encoding = self.facts.tokenizer.encode(rendered.text, add_special_tokens=rendered.add_special_tokens)
        ids: list[int] = encoding.ids
        labels = [IGNORED_LABEL] * len(ids)
        for first, stop in scored_slices(encoding, rendered.spans):
            labels[first:stop] = ids[first:stop]
        if rendered.append_eos and ids[-1:] != [self.facts.eos_id]:
            assert self.facts.eos_id is not None
            ids = [*ids, self.facts.eos_id]
            labels.append(self.facts.eos_id)
        return Example(ids, labels), problems + self.token_problems(ids[:2], any(x != IGNORED_LABEL for x in labels))

    def token_problems(self, first_ids: list[int], scored: bool) -> list[Problem]:
        """What only the token ids can show."""
        problems = []
        bos = self.facts.bos_id
        if bos is not None and first_ids[:2] == [bos, bos]:
            problems.append(
                Problem(
                    "two-bos",
                    "the row starts with two BOS tokens",
                    "remove the BOS text from the data: the tokenizer or the template adds it",
                )
            )
        if not scored:
            problems.append(
                Problem("nothing-scored", "no token of this row is scored", "check that the answer has text")
            )
        return problems


def scored_slices(encoding: Encoding, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Token ranges ``[first, stop)`` of character spans. A token that begins before its span is left out."""
    slices = []
    for start, end in spans:
        first = _token_at(encoding, range(start, end))
        last = _token_at(encoding, range(end - 1, start - 1, -1))
        if first is None or last is None:
            continue
        offsets = encoding.token_to_chars(first)
        if offsets is not None and offsets[0] < start:
            first += 1
        if first <= last:
            slices.append((first, last + 1))
    return slices


def _token_at(encoding: Encoding, positions: range) -> int | None:
    """The token of the first position that has one; byte-level tokenizers trim spaces off their offsets."""
    for position in positions:
        token: int | None = encoding.char_to_token(position)
        if token is not None:
            return token
    return None


def _shared(one: str, other: str) -> str:
    """What two texts begin with alike."""
    different = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(different, min(len(one), len(other)))]


def _dropped(messages: list[Row], tools: list[Any] | None, full: str, spans: dict[int, tuple[int, int]]) -> str | None:
    """The first part of a conversation that its rendering does not hold, or None.

    Templates drop what they do not know: tool calls, tools, text where they expect a list of parts. White space around a
    text, and thoughts that the template keeps apart, are not counted.
    """
    at = 0
    for index, message in enumerate(messages):
        role, text = message["role"], (message.get("content") or "").rpartition("</think>")[2].strip()
        start, end = spans.get(index, (0, len(full)))
        found = full.find(text, max(at, start), end)
        if found >= 0:
            at = found + len(text)
        elif full.find(text, start, end) < 0 and full.find(json.dumps(text, ensure_ascii=False)[1:-1], start, end) < 0:
            return f"the text of turn {index + 1} ({role})"
        for call in message.get("tool_calls") or ():
            name = _function_name(call)
            if name and full.find(name, start, end) < 0:
                return f"the call of {name} in turn {index + 1}"
        thoughts = message.get("reasoning_content")
        if index in spans and isinstance(thoughts, str) and full.find(thoughts.strip(), start, end) < 0:
            return f"reasoning_content of turn {index + 1}"
    for tool in tools or ():
        name = _function_name(tool)
        if name and name not in full:
            return f"the tool {name}"
    return None


def _function_name(value: Any) -> str | None:
    """The name in a tool or a tool call, with or without its ``function`` wrapper."""
    inner = value.get("function", value) if isinstance(value, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _not_a_prefix(index: int, scored: int) -> Problem:
    fix = (
        "set data.score: last, or split the conversation into one row per answer"
        if scored > 1
        else "set data.chat_template_kwargs (for example enable_thinking: false), or use a template without rewriting"
    )
    return Problem(
        "template-rewrites",
        f"the chat template renders turn {index + 1} differently once it is answered, "
        "so what is scored would not be what the model is asked later",
        fix,
    )


class TemplateRefusal(Exception):
    """The template raised an error for a conversation."""


class ChatTemplate:
    """A compiled chat template with its special tokens."""

    def __init__(self, source: str, facts: TokenizerFacts, kwargs: Mapping[str, Any]) -> None:
        try:
            self._template = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateRefusal(f"line {error.lineno}: {error.message}") from error
        self._facts = facts
        self._variables = {
            "bos_token": facts.bos or "",
            "eos_token": facts.eos or "",
            "pad_token": facts.pad or "",
            **kwargs,
        }

    def render(self, messages: list[Row], tools: list[Any] | None = None, *, generation_prompt: bool) -> str:
        """The conversation as text. Raises ``TemplateRefusal``."""
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )
        except Exception as error:  # a template is a program of someone else: whatever it raises is its refusal
            raise TemplateRefusal(str(error) or type(error).__name__) from error

    def turn_end(self) -> str | None:
        """The special token with which the template closes an assistant turn, or None where it writes none."""
        probe = "burst-probe-answer"
        try:
            text = self.render(
                [{"role": "user", "content": "x"}, {"role": "assistant", "content": probe}], generation_prompt=False
            )
        except TemplateRefusal:
            return self._facts.eos
        tail = text[text.rfind(probe) + len(probe) :]
        found = [(tail.find(token), token) for token in self._facts.special if token in tail]
        return min(found, key=lambda item: (item[0], -len(item[1])))[1] if found else None


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # a ChainMap otherwise, which every rendering copies key by key in Python
    return template


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks answers for other tools; here its content is rendered as it stands."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (jinja2 declares it on the instance)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)
