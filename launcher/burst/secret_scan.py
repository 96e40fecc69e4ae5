"""Finding what looks like a credential before it travels."""

from __future__ import annotations

import re
from typing import NamedTuple


class Finding(NamedTuple):
    """A kind of secret at a line (from 1). The secret itself is never repeated."""

    kind: str
    line: int

    @property
    def sentence(self) -> str:
        return f"looks like {'an' if self.kind[0] in 'AEIOU' else 'a'} {self.kind}"


# (kind, literals of which one must be there for the pattern to match, pattern). The literals are searched first: they are
# cheap. Patterns see JSON escapes as spaces, so that a token after an escaped line break starts at a boundary.
_PATTERNS: tuple[tuple[str, tuple[bytes, ...], re.Pattern[bytes]], ...] = (
    ("Hugging Face token", (b"hf_",), re.compile(rb"\bhf_[A-Za-z0-9]{30,}")),
    ("AWS access key", (b"AKIA",), re.compile(rb"\bAKIA[0-9A-Z]{16}\b")),
    ("AWS temporary key", (b"ASIA",), re.compile(rb"\bASIA[0-9A-Z]{16}\b")),
    (
        "AWS secret key",
        (b"cret_access_key", b"CRET_ACCESS_KEY", b"cretAccessKey"),
        re.compile(rb"(?i)aws_?secret_?access_?key[\"'\s:=]+[a-z0-9/+]{40}"),
    ),
    ("private key", (b"PRIVATE KEY",), re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----")),
    (
        "GitHub token",
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_"),
        re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36,}"),
    ),
    ("GitHub token", (b"github_pat_",), re.compile(rb"\bgithub_pat_[A-Za-z0-9_]{50,}")),
    ("Google API key", (b"AIza",), re.compile(rb"\bAIza[0-9A-Za-z_-]{35}")),
    ("Google service account", (b"private_key_id",), re.compile(rb"private_key_id[\"\s:]+[0-9a-f]{40}")),
    ("OpenAI or Anthropic key", (b"sk-",), re.compile(rb"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}")),
    ("Slack token", (b"xox",), re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20,}")),
    (
        "Weights & Biases key",
        (b"wandb_api_key", b"WANDB_API_KEY"),
        re.compile(rb"(?i)wandb_api_key[\"'\s:=]+[0-9a-f]{40}"),
    ),
)

_ESCAPES = re.compile(rb"\\(?:[nrtbf/]|u[0-9a-fA-F]{4}|(?=[\"\\]))")

_NAMES = re.compile(
    r"(^|/)(\.env(\..+)?|\.netrc|\.npmrc|\.pypirc|credentials(\.json)?|id_(rsa|dsa|ecdsa|ed25519)|.+\.(pem|p12|pfx|key))$",
    re.IGNORECASE,
)


def scan(content: bytes, first_line: int = 1) -> list[Finding]:
    """Everything in ``content`` that looks like a credential, with its line."""
    found: list[Finding] = []
    kinds = [(kind, pattern) for kind, literals, pattern in _PATTERNS if any(text in content for text in literals)]
    if kinds:
        content = _ESCAPES.sub(lambda match: b" " * len(match.group()), content)
        for kind, pattern in kinds:
            found += [
                Finding(kind, first_line + content.count(b"\n", 0, match.start()))
                for match in pattern.finditer(content)
            ]
    return sorted(found, key=lambda finding: finding.line)


def is_secret_name(path: str) -> bool:
    """Whether a file's name says that it holds credentials."""
    return _NAMES.search(path.replace("\\", "/")) is not None
