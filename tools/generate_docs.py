"""Write what is generated: docs/spec.md, docs/cli.md and the dependency header of payload/train.py.

python tools/generate_docs.py            # write
python tools/generate_docs.py --check    # exit 1 and name the files that are not up to date
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from burst import spec
from burst.cli import cli
from burst_payload.measures import table

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    stale = []
    for path, text in generated():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT).as_posix())
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(", ".join(stale), "is not up to date: make docs" if "--check" in sys.argv else "written")
    sys.exit(bool(stale) and "--check" in sys.argv)


def generated() -> Iterator[tuple[Path, str]]:
    yield ROOT / "docs/spec.md", spec_page()
    yield ROOT / "docs/cli.md", cli_page()
    yield ROOT / "docs/measures.md", measures_page()
    yield ROOT / "payload/train.py", with_dependencies((ROOT / "payload/train.py").read_text(encoding="utf-8"))


def spec_page() -> str:
    parts = [
        "# burst.yaml\n",
        (
            "Generated from `launcher/burst/spec.py` by `make docs`. Paths are relative to the file; an unknown key is an error.\n"
            "For completion in an editor: `burst schema > burst.schema.json`, and as the first line of the spec\n"
            "`# yaml-language-server: $schema=burst.schema.json`.\n"
        ),
    ]
    for name, section in spec.sections():
        parts.append(f"## {f'`{name}`' if name else 'Top level'}\n")
        parts.append("| key | type | default | meaning |\n|---|---|---|---|")
        schema = section.model_json_schema()
        for key, field in section.model_fields.items():
            parts.append(
                f"| `{key}` | {type_name(schema['properties'][key], schema)} | {default_of(field)} | "
                f"{cell(field.description or '')} |"
            )
        parts.append("")
    return "\n".join(parts)


def type_name(value: dict[str, Any], schema: dict[str, Any]) -> str:
    """A JSON Schema type in a few words."""
    if "$ref" in value:
        return "section"
    if "anyOf" in value:
        return type_name(next(item for item in value["anyOf"] if item.get("type") != "null"), schema)
    if "enum" in value:
        return " \\| ".join(f"`{item}`" for item in value["enum"])
    if value.get("type") == "array":
        return f"list of {type_name(value.get('items', {}), schema)}"
    limits = [
        f"{sign} {value[key]:g}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        if key in value
    ]
    names = {
        "string": "text",
        "integer": "integer",
        "number": "number",
        "boolean": "true or false",
        "object": "mapping",
    }
    return " ".join([names.get(value.get("type", ""), "value"), ", ".join(limits)]).strip()


def default_of(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or isinstance(value, spec.Section):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`" if value not in ([], {}) else "none"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def cli_page() -> str:
    parts = ["# Commands\n", "Generated from `--help` by `make docs`.\n", "## burst\n", block(cli, "burst")]
    for name in sorted(cli.commands):
        command = cli.commands[name]
        parts += [f"## burst {name}\n", block(command, f"burst {name}")]
        for below in sorted(getattr(command, "commands", ())):
            parts += [f"### burst {name} {below}\n", block(command.commands[below], f"burst {name} {below}")]
    parts.append(
        "## Exit codes\n\n| code | meaning |\n|---|---|\n| 0 | done |\n| 1 | failed |\n"
        "| 2 | wrong usage, invalid spec or data |\n| 3 | nothing fits |\n| 4 | a verification failed |\n"
        "| 130 | interrupted |\n\n"
        '## Completion\n\n`eval "$(_BURST_COMPLETE=bash_source burst)"` (or `zsh_source`, `fish_source`) in the shell\'s\n'
        "start-up file completes commands, options and run names.\n"
    )
    return "\n".join(parts)


def measures_page() -> str:
    """The table of measures as the payload has it."""
    needs = {name: need.otherwise for name, need in table.NEEDS.items()}
    lines = [
        "# Memory and speed measures\n",
        (
            "Generated from `payload/burst_payload/measures/table.py` by `make docs`. `train.measures` in `burst.yaml` is a list of these\n"
            "names; left out, a run takes every one that applies and costs no time. What ran, and why the others did not, is said by\n"
            "the run (`measures` in its log) and kept in the adapter's `metadata.json`. A name in the list that cannot be applied stops\n"
            "the run. Each one is held against the plain model by `tests/test_measures.py`: equal loss and gradients in float32.\n"
        ),
        "| name | what it does | smaller | left out by itself where |\n|---|---|---|---|",
    ]
    for measure in table.MEASURES:
        reasons = [needs[name] for name in measure.needs + measure.pays]
        reasons += ["memory is not short (it costs time)"] if measure.when == "tight" else []
        lines.append(f"| `{measure.name}` | {measure.saves} | {measure.component} | {'; '.join(reasons) or 'never'} |")
    return "\n".join(lines) + "\n"


def block(command: click.Command, name: str) -> str:
    context = click.Context(
        command, info_name=name, max_content_width=100, terminal_width=100, help_option_names=["-h", "--help"]
    )
    return f"```text\n{command.get_help(context)}\n```\n"


def with_dependencies(script: str) -> str:
    """The script with the pins of requirements.in in its PEP 723 header."""
    lines = (ROOT / "payload/requirements.in").read_text(encoding="utf-8").splitlines()
    pins = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    quoted = [f"#     '{pin}'," if '"' in pin else f'#     "{pin}",' for pin in pins]
    listed = "\n".join(["# dependencies = [", *quoted, "# ]"])
    return re.sub(r"# dependencies = \[\n(?:#     .*\n)*# \]", lambda _: listed, script, count=1)


if __name__ == "__main__":
    main()
