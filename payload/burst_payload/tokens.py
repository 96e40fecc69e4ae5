"""A model's tokenizer and its special tokens, read from its files. Needs ``tokenizers``, not transformers.

The launcher counts with exactly what the payload trains with: one ``tokenizer.json``, one reader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)


class TokenizerError(Exception):
    """The tokenizer files cannot be used; the message says what to do."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What rendering and masking need to know.

    ``eos_ids`` are the ids at which generation stops (tokenizer and generation config together); ``special`` maps
    every added token's text to its id; ``controls`` are those of them that the model reads as structure, not as text.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    bos: str | None
    eos: str | None
    pad: str | None
    eos_ids: frozenset[int]
    special: dict[str, int]
    controls: frozenset[str] = frozenset()

    @property
    def bos_id(self) -> int | None:
        return self.special.get(self.bos) if self.bos else None

    @property
    def eos_id(self) -> int | None:
        return self.special.get(self.eos) if self.eos else None


def load(folder: Path) -> TokenizerFacts:
    """Read the tokenizer of a model folder. Raises ``TokenizerError``."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{folder} has no tokenizer.json; save one with "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _json(folder / "tokenizer_config.json")
    special_map = _json(folder / "special_tokens_map.json")
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: id for id, token in added.items()}
    names: dict[str, str | None] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        names[name] = text = _token_text(config.get(name)) or _token_text(special_map.get(name))
        if text is not None and text not in special:
            id = tokenizer.token_to_id(text)
            if id is None:
                raise TokenizerError(f"{folder}: {name} {text!r} is not in the vocabulary; fix tokenizer_config.json")
            special[text] = id
    eos_ids = set(_eos_ids(_json(folder / "generation_config.json")))
    if names["eos_token"]:
        eos_ids.add(special[names["eos_token"]])
    return TokenizerFacts(
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, config),
        bos=names["bos_token"],
        eos=names["eos_token"],
        pad=names["pad_token"],
        eos_ids=frozenset(eos_ids),
        special=special,
        controls=frozenset(token.content for token in added.values() if token.special),
    )


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template transformers would use: a ``.jinja`` file, else ``.json``, else the tokenizer config's default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    template = _json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _eos_ids(config: dict[str, Any]) -> list[int]:
    value = config.get("eos_token_id")
    if isinstance(value, int):
        return [value]
    return [id for id in value if isinstance(id, int)] if isinstance(value, list) else []


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
