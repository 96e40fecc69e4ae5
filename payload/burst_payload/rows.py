"""The row formats that people have, turned into one of two canonical rows. Standard library only.

Canonical rows are plain dictionaries:

- ``{"messages": [{"role", "content", ...}, ...], "tools": [...]}``: rendered with a chat template. A message may carry
  ``"weight": 0`` (not scored).
- ``{"prompt": str, "completion": str}``: raw text, only the completion is scored. ``text`` rows have an empty prompt.

Nothing here drops or repairs a row silently: a row either converts, or comes with its problems.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from burst_payload import strict_json

if TYPE_CHECKING:
    from collections.abc import Callable

_MESSAGE_KEYS = frozenset(
    {"role", "content", "weight", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking"}
)
_TURN_KEYS = frozenset({"from", "value", "weight"})
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMATS = ("messages", "conversations", "prompt_completion", "instruction", "text")

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


class Problem(NamedTuple):
    """What is wrong with a row (``kind`` groups equal problems) and what to do about it."""

    kind: str
    what: str
    fix: str


Row = dict[str, Any]


def detect_format(row: Row) -> str | None:
    """The format of a row from its keys, or None where no known format has these keys."""
    if "messages" in row:
        return "messages"
    if "conversations" in row:
        return "conversations"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    if "instruction" in row and "output" in row:
        return "instruction"
    if "text" in row:
        return "text"
    return None


def known_columns(fmt: str) -> frozenset[str]:
    """The columns of a format that burst uses; others are left alone and named by ``burst check``."""
    return _COLUMNS[fmt]


def canonical(row: Row, fmt: str) -> tuple[Row | None, list[Problem]]:
    """The canonical form of ``row`` read as ``fmt``, and what is wrong with it.

    The row is None where a problem makes it unusable. Problems whose kind starts with ``note-`` do not.
    """
    problems: list[Problem] = []
    result = _CONVERTERS[fmt](row, problems)
    if any(not problem.kind.startswith("note-") for problem in problems):
        return None, problems
    return result, problems


def as_chat(row: Row) -> Row:
    """A raw ``prompt``/``completion`` row as a one-turn conversation."""
    return {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
    }


def _messages(row: Row, problems: list[Problem]) -> Row | None:
    messages = _clean_messages(row["messages"], problems)
    if messages is None:
        return None
    result: Row = {"messages": messages}
    if row.get("tools"):
        tools = _tools(row["tools"], problems)
        if tools is not None:
            result["tools"] = tools
    return result


def _clean_messages(messages: Any, problems: list[Problem]) -> list[Row] | None:
    if not isinstance(messages, list):
        problems.append(Problem("wrong-type", f"messages is {_kind(messages)}, not a list", "write a list of turns"))
        return None
    if not messages:
        problems.append(Problem("no-turns", "messages is empty", "add the turns or remove the row"))
        return None
    cleaned = messages
    scored = 0
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role == "assistant" and message.get("weight", 1) != 0:
            scored += 1
        if type(content) is str and content and not content.isspace() and role in ROLES:
            if "\0" in content:
                problems.append(_nul(f"turn {index + 1}"))
            if len(message) > 2:
                _check_extras(message, index, problems)
            continue
        if isinstance(content, list):
            text = _joined_parts(content, index, problems)
            if text is not None and cleaned is messages:
                cleaned = list(messages)
            if text is not None:
                cleaned[index] = {**message, "content": text}
        _check_message(cleaned[index], index, problems)
    if not scored and not problems:
        problems.append(
            Problem("nothing-scored", "no assistant turn to learn from", "add the assistant's answer or remove the row")
        )
    elif isinstance(messages[-1], dict) and messages[-1].get("role") != "assistant":
        problems.append(
            Problem(
                "note-open-end",
                "the last turn is not the assistant's; it is context that nothing follows",
                "end the row with the assistant's answer",
            )
        )
    return cleaned


def _check_message(message: Any, index: int, problems: list[Problem]) -> None:
    turn = f"turn {index + 1}"
    if not isinstance(message, dict):
        problems.append(
            Problem("wrong-type", f"{turn} is {_kind(message)}, not an object", 'write {"role": ..., "content": ...}')
        )
        return
    role, content = message.get("role"), message.get("content")
    if role is None:
        problems.append(Problem("no-role", f"{turn} has no role", f"use one of {', '.join(ROLES)}"))
    elif role not in ROLES:
        problems.append(
            Problem("unknown-role", f"{turn} has the unknown role {role!r}", f"use one of {', '.join(ROLES)}")
        )
    if message.get("tool_calls") and role == "assistant" and (content is None or content == ""):
        _check_extras(message, index, problems)
        return
    if "content" not in message:
        problems.append(Problem("no-content", f"{turn} ({role}) has no content", "add the text of the turn"))
    elif not isinstance(content, (str, list)):
        problems.append(Problem("wrong-type", f"{turn} ({role}) has {_kind(content)} as content", "write a string"))
    elif isinstance(content, str) and not content.strip() and role != "tool":
        problems.append(Problem("empty-turn", f"{turn} ({role}) is empty", "write its text or remove the turn"))
    elif isinstance(content, str) and "\0" in content:
        problems.append(_nul(turn))
    _check_extras(message, index, problems)


def _check_extras(message: Row, index: int, problems: list[Problem]) -> None:
    if message.get("function_call") is not None:
        problems.append(
            Problem(
                "function-call",
                f"turn {index + 1} has the old key function_call, which templates leave out",
                'write tool_calls: [{"type": "function", "function": {"name": ..., "arguments": {...}}}]',
            )
        )
    _note_unused(message.keys() - _MESSAGE_KEYS - {"function_call"}, index, problems)
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        problems.append(Problem("bad-weight", f"turn {index + 1} has the weight {weight!r}", "use 0 (not scored) or 1"))
    calls = message.get("tool_calls")
    if calls is not None and (not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls)):
        problems.append(
            Problem(
                "wrong-type",
                f"turn {index + 1}: tool_calls is not a list of objects",
                "write the calls as a list of objects",
            )
        )


def _note_unused(keys: set[str], index: int, problems: list[Problem]) -> None:
    if keys:
        problems.append(
            Problem(
                "note-key",
                f"turn {index + 1} has {', '.join(sorted(map(str, keys)))}, which burst does not use",
                "no need to act, unless the template should write it",
            )
        )


def _joined_parts(parts: list[Any], index: int, problems: list[Problem]) -> str | None:
    """Text parts (``[{"type": "text", "text": ...}]``) as one string; images and sound cannot be trained on here."""
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            problems.append(
                Problem(
                    "not-text", f"turn {index + 1} has a part of type {kind!r}", "burst trains on text: remove the part"
                )
            )
            return None
    return "".join(texts)


def _tools(tools: Any, problems: list[Problem]) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = strict_json.loads(tools)
        except ValueError as error:
            problems.append(
                Problem("bad-tools", f"tools is a string that is not JSON: {error}", "write a list of tool schemas")
            )
            return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problems.append(Problem("bad-tools", "tools is not a list of objects", "write a list of tool schemas"))
        return None
    return tools


def _conversations(row: Row, problems: list[Problem]) -> Row | None:
    turns = row["conversations"]
    if not isinstance(turns, list):
        problems.append(Problem("wrong-type", f"conversations is {_kind(turns)}, not a list", "write a list of turns"))
        return None
    messages: list[Any] = []
    if system := _system(row, problems):
        messages.append({"role": "system", "content": system})
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            messages.append(turn)
            continue
        if "role" in turn and "from" not in turn:
            messages.append(turn)
            continue
        role, value = turn.get("from"), turn.get("value")
        extra = {"weight": turn["weight"]} if "weight" in turn else {}
        _note_unused(turn.keys() - _TURN_KEYS, index, problems)
        if role == "function_call":
            messages.append(_function_call(value, index, problems) | extra)
        else:
            name = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
            message = {"role": name, **extra}
            if "value" in turn:
                message["content"] = value
            messages.append(message)
    return _messages({"messages": messages, "tools": row.get("tools")}, problems)


def _function_call(value: Any, index: int, problems: list[Problem]) -> Row:
    try:
        call = strict_json.loads(value) if isinstance(value, str) else value
        name, arguments = call["name"], call["arguments"]
    except (ValueError, TypeError, KeyError):
        problems.append(
            Problem(
                "bad-call",
                f"turn {index + 1}: function_call is not JSON with name and arguments",
                'write {"name": ..., "arguments": {...}}',
            )
        )
        name, arguments = "", {}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def _prompt_completion(row: Row, problems: list[Problem]) -> Row | None:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        context = [{**m, "weight": 0} if isinstance(m, dict) and m.get("role") == "assistant" else m for m in prompt]
        return _messages({"messages": context + completion, "tools": row.get("tools")}, problems)
    for name, value in (("prompt", prompt), ("completion", completion)):
        _check_text(name, value, problems)
    if row.get("tools"):
        problems.append(
            Problem("bad-tools", "tools beside a plain prompt have no place", "use the messages format for tools")
        )
    return {"prompt": prompt, "completion": completion}


def _instruction(row: Row, problems: list[Problem]) -> Row | None:
    instruction, extra, output = row["instruction"], row.get("input"), row["output"]
    for name, value in (("instruction", instruction), ("output", output)):
        _check_text(name, value, problems)
    if extra is not None and not isinstance(extra, str):
        problems.append(Problem("wrong-type", f"input is {_kind(extra)}, not a string", "write a string"))
    if row.get("history"):
        problems.append(
            Problem("history", "history is not read in this format", "use the messages format for several turns")
        )
    system = _system(row, problems)
    if problems:
        return None
    user = f"{instruction}\n\n{extra}" if extra and extra.strip() else instruction
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": output}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _messages({"messages": messages}, problems)


def _system(row: Row, problems: list[Problem]) -> str | None:
    """The text of a row's system column, or None where it has none."""
    system = row.get("system")
    if system is not None and not isinstance(system, str):
        problems.append(Problem("wrong-type", f"system is {_kind(system)}, not a string", "write a string"))
        return None
    return system if system and system.strip() else None


def _text(row: Row, problems: list[Problem]) -> Row | None:
    _check_text("text", row["text"], problems)
    return {"prompt": "", "completion": row["text"]}


def _check_text(name: str, value: Any, problems: list[Problem]) -> None:
    if not isinstance(value, str):
        problems.append(Problem("wrong-type", f"{name} is {_kind(value)}, not a string", "write a string"))
    elif not value.strip():
        problems.append(Problem("empty-turn", f"{name} is empty", "write its text or remove the row"))
    elif "\0" in value:
        problems.append(_nul(name))


def _nul(where: str) -> Problem:
    return Problem("nul", f"{where} holds a NUL character (U+0000)", "remove it: no tokenizer was trained on it")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


_CONVERTERS: dict[str, Callable[[Row, list[Problem]], Row | None]] = {
    "messages": _messages,
    "conversations": _conversations,
    "prompt_completion": _prompt_completion,
    "instruction": _instruction,
    "text": _text,
}
_COLUMNS = {
    "messages": frozenset({"messages", "tools"}),
    "conversations": frozenset({"conversations", "system", "tools"}),
    "prompt_completion": frozenset({"prompt", "completion", "tools"}),
    "instruction": frozenset({"instruction", "input", "output", "system", "history"}),
    "text": frozenset({"text"}),
}
