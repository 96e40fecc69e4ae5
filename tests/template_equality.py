"""Run by the payload's interpreter: every chat template that TRL ships, rendered by transformers and by burst, as JSON.

    python template_equality.py

Prints ``{"templates": n, "renderings": n, "differences": [...], "scored": {template: {conversation: [answers] or code}}}``.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
import tempfile
from pathlib import Path

import trl
from transformers.utils import chat_template_utils

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "payload"))
from burst_payload import chat, tiny, tokens

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d <é>",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
USER, ANSWER = {"role": "user", "content": "Hi <b> é"}, {"role": "assistant", "content": '{"a": "é"}'}
CONVERSATIONS = {
    "one": [USER, ANSWER],
    "system": [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    "two": [USER, ANSWER, {"role": "user", "content": "More"}, {"role": "assistant", "content": "No"}],
    "tool": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "content": "3"},
        ANSWER,
    ],
}
ENDS = (
    "<|end|> <|eot_id|> <end_of_turn> <turn|> <|return|> <|call|> <|END_OF_TURN_TOKEN|> <end_of_utterance> <|tool_response>"
).split()
REFUSED = "refused"


class Noon(datetime.datetime):
    """Templates that print a date print this one."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 12, 1, 12, tzinfo=datetime.timezone.utc)


def main() -> None:
    chat_template_utils.datetime = chat.datetime.datetime = Noon
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_tokenizer(Path(folder))
        facts = tokens.load(Path(folder))
    ids = {token: 300 + index for index, token in enumerate(ENDS)}
    facts = dataclasses.replace(facts, special={**facts.special, **ids}, eos_ids=facts.eos_ids | set(ids.values()))
    result = {"templates": 0, "renderings": 0, "differences": [], "scored": {}}
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        result["templates"] += 1
        for name, messages in CONVERSATIONS.items():
            for tools in (None, TOOLS):
                for prompt in (False, True):
                    result["renderings"] += 1
                    theirs = by_transformers(source, messages, tools, prompt, facts)
                    ours = by_burst(source, messages, tools, prompt, facts)
                    if ours != theirs:
                        result["differences"].append([path.name, name, prompt, theirs, ours])
        result["scored"][path.stem] = {
            name: scored(source, messages, facts) for name, messages in CONVERSATIONS.items()
        }
    print(json.dumps(result))


def by_transformers(source, messages, tools, prompt, facts) -> str:
    special = {"bos_token": facts.bos or "", "eos_token": facts.eos or "", "pad_token": facts.pad or ""}
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=prompt, **special
        )
    except Exception:
        return REFUSED
    return rendered[0]


def by_burst(source, messages, tools, prompt, facts) -> str:
    try:
        return chat.ChatTemplate(source, facts, {}).render(messages, tools, generation_prompt=prompt)
    except chat.TemplateRefusal:
        return REFUSED


def scored(source, messages, facts) -> list[str] | str:
    rendered, problems = chat.Renderer(facts, source).render({"messages": messages})
    return [rendered.text[start:end] for start, end in rendered.spans] if rendered else problems[0].kind


if __name__ == "__main__":
    main()
