"""The rules of the house, each with a test that fails when it is broken."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAUNCHER = ROOT / "launcher/burst"
PAYLOAD = ROOT / "payload"
TORCH_FREE = {
    "records",
    "manifest",
    "config",
    "rows",
    "chat",
    "tokens",
    "tiny",
    "seal",
    "strict_json",
    "checkpoints",
    "pulse",
    "ranks",
    "watchdog",
    "supervisor",
    "worker",
    "reporter",
    "stop",
    "libraries",
    "model_files",
    "precision",
    "measures/__init__",
    "measures/table",
    "store",
}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, dotted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    assert found
    return found


@pytest.mark.parametrize("path", sources(LAUNCHER), ids=lambda path: path.name)
def test_the_launcher_imports_no_torch_and_sky_in_one_place(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        assert top not in {"torch", "transformers", "peft", "trl", "accelerate", "datasets", "bitsandbytes"}, name
        if top == "sky":
            assert path.parent == LAUNCHER / "places"
            assert path.name.startswith("sky")
        if name.startswith("burst_payload."):
            module = name.split(".")[1] if "measures" not in name else "/".join(name.split(".")[1:3])
            assert module in TORCH_FREE | {"measures"}, name


@pytest.mark.parametrize("path", sources(PAYLOAD), ids=lambda path: path.name)
def test_the_payload_never_imports_burst(path: Path) -> None:
    assert not [name for name in imports(path) if name.split(".")[0] == "burst"]


@pytest.mark.parametrize(
    "path", [PAYLOAD / f"burst_payload/{name}.py" for name in sorted(TORCH_FREE)], ids=lambda path: path.name
)
def test_torch_free_modules_import_no_torch_at_the_top(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert not {name.split(".")[0] for name in names} & {"torch", "transformers", "peft", "trl"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["runs"], ["check"], ["schema"], ["plan", "--offline"], ["fetch"], ["show"]], ids=" ".join
)
def test_commands_that_never_load_heavy_libraries(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom burst.cli import main\nsys.argv = ['burst', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'sky', 'datasets', 'peft'} & set(sys.modules)\n"
        "assert 'burst.cli' in sys.modules\nprint('LOADED', sorted(heavy), file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT / "examples/quickstart",
        text=True,
        capture_output=True,
        check=True,
        env=os.environ,
    )
    assert result.stderr.splitlines()[-1] == "LOADED []"


def test_help_loads_little() -> None:
    script = "import sys, burst.cli\nprint(*sorted({m.split('.')[0] for m in sys.modules} & {'rich', 'pydantic', 'jinja2', 'tokenizers'}))"
    assert subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True).stdout == "\n"


PURE = ["architecture.py", "duration.py", "estimate.py", "measures.py", "plan.py", "quotes.py"]


@pytest.mark.parametrize("name", PURE)
def test_decisions_do_no_io(name: str) -> None:
    found = set(imports(LAUNCHER / name))
    assert not {item.split(".")[0] for item in found} & {
        "os",
        "subprocess",
        "pathlib",
        "shutil",
        "socket",
        "huggingface_hub",
    }


def test_sky_is_templates_only() -> None:
    files = [path.name for path in (ROOT / "sky").rglob("*") if path.is_file()]
    assert files
    assert all(name.endswith((".yaml", ".md")) for name in files)


@pytest.mark.parametrize("path", sources(LAUNCHER) + sources(PAYLOAD), ids=lambda path: path.name)
def test_modules_hold_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 460


def test_generated_docs_are_up_to_date() -> None:
    subprocess.run([sys.executable, str(ROOT / "tools/generate_docs.py"), "--check"], check=True)
