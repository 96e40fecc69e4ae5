"""The commands: parse, call, show. Imports that cost time happen in the command that needs them."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from burst import __version__
from burst.errors import BurstError, ExitCode

if TYPE_CHECKING:
    from burst.run import Record, Run
    from burst.spec import Spec

DEFAULT_SPEC = "burst.yaml"
USERS_ERRNOS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}
"""What a disk or a path can be wrong about; any other ``OSError`` is a bug."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value on standard output.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress and no advice.")
spec_argument = click.argument("spec_path", metavar="[SPEC]", default=DEFAULT_SPEC, type=click.Path(path_type=Path))
run_argument = click.argument(
    "run_name",
    metavar="[RUN]",
    required=False,
    shell_complete=lambda _context, _parameter, incomplete: _complete_runs(incomplete),
)
secrets_option = click.option("--allow-secrets", is_flag=True, help="Bundle rows that look like credentials.")


@click.group(
    context_settings={"auto_envvar_prefix": "BURST", "help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="burst")
def cli() -> None:
    """Train a LoRA adapter where it makes sense, and never lose it.

    Start with: burst init DATA.jsonl, then burst check, then burst train.

    Every option can be set with a variable: --where of train is BURST_TRAIN_WHERE. Folders: BURST_HOME for runs,
    BURST_CACHE for environments.
    """


@cli.command()
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--model", default="builtin:tiny", show_default=True, help="Hub id, local folder or builtin:tiny.")
@click.option(
    "-o",
    "--output",
    default=DEFAULT_SPEC,
    show_default=True,
    type=click.Path(path_type=Path),
    help="The spec to write.",
)
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(data: Path, model: str, output: Path, force: bool) -> None:
    """Write a commented spec for DATA, a JSONL file."""
    from burst import screens, starter

    found = starter.write(data, model, output, force=force)
    screens.out().print(f"{output}: {data.name} is in the format {found.format}, {screens.counted(found.rows, 'row')}")
    if found.unusable:
        screens.err().print(f"{screens.counted(found.unusable, 'problem')} in it", style="yellow")
    screens.err().print(f"next: burst check {output}")


@cli.command()
@click.argument("target", metavar="[SPEC|DATA.jsonl]", default=DEFAULT_SPEC, type=click.Path(path_type=Path))
@click.option("--model", help="With a data file: the model whose template and tokenizer count.")
@click.option("--max-length", type=click.IntRange(min=8), help="With a data file: tokens a row may have.")
@click.option("--all", "every", is_flag=True, help="Show every problem, not the first few of each kind.")
@json_option
@quiet_option
def check(target: Path, model: str | None, max_length: int | None, every: bool, as_json: bool, quiet: bool) -> None:
    """Say whether data can be trained on, and everything that is wrong with it."""
    from burst import check as checking
    from burst import screens

    spec, folder = _spec_for_check(target, model, max_length)
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl")) if not quiet else 0
    with screens.byte_progress("reading", size, quiet=quiet or size < 20_000_000) as advance:
        report = checking.check(spec, folder, every_problem=every, progress=advance)
    if as_json:
        _print_json(report.to_json())
    else:
        screens.out().print(screens.check_report(report))
    raise SystemExit(ExitCode.OK if report.ok else ExitCode.INVALID)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from burst import spec

    _print_json(spec.schema())


@cli.command()
@spec_argument
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="A folder, or FILE.tar.gz.")
@secrets_option
@json_option
@quiet_option
def bundle(spec_path: Path, output: Path, allow_secrets: bool, as_json: bool, quiet: bool) -> None:
    """Make a portable bundle that trains anywhere with: python train.py."""
    from burst import bundle as bundling
    from burst import screens, spec

    made = bundling.build(spec.load(spec_path), spec_path.absolute().parent, output, allow_secrets=allow_secrets)
    if as_json:
        _print_json(
            {"path": str(made.path), "bundle_id": made.bundle_id, "files": made.files, "size_bytes": made.size_bytes}
        )
        return
    screens.out().print(f"{output}: {made.files} files, {screens.size(made.size_bytes)}, bundle {made.bundle_id[:12]}")
    screens.err(quiet).print("next: copy it to any machine and run: python train.py (or: uv run train.py)")


@cli.command()
@spec_argument
@click.option(
    "--where", type=click.Choice(["auto", "local", "cloud"]), help="Where to run; the spec's where, else auto."
)
@click.option("--python", envvar="BURST_PYTHON", metavar="PATH", help="Interpreter with the training libraries.")
@click.option("--torch-backend", metavar="NAME", help="Torch build of a new environment: cpu, cu126, cu130, ...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The adapter's folder; default ./adapters/RUN.")
@click.option("--name", help="Name of the run.")
@click.option("--detach", is_flag=True, help="Start it and return; it goes on when the terminal closes.")
@click.option("--again", is_flag=True, help="Train although this very job was trained before.")
@secrets_option
@json_option
@quiet_option
def train(
    spec_path: Path,
    where: str | None,
    python: str | None,
    torch_backend: str | None,
    output: Path | None,
    name: str | None,
    detach: bool,
    again: bool,
    allow_secrets: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train an adapter and bring it to ./adapters/RUN, verified."""
    from burst import interpreter, launch, run, screens, spec

    console = screens.err(quiet)
    loaded = spec.load(spec_path)
    asked = where or loaded.where
    launch.resolve_where(asked)
    if asked == "auto":
        console.print("where: this machine (auto means local in this version)")
    if loaded.export:  # said although --quiet: something that was asked for will not happen
        screens.err().print("note: export is not built yet; only the adapter is made", style="yellow")
    run_name = _valid_name(name) if name else run.new_name(loaded.model, loaded.adapter.rank)
    found = interpreter.find(python, lambda line: console.print(line, style="dim"), torch_backend=torch_backend)
    home = (output or Path("adapters") / run_name).absolute()
    prepared = launch.prepare(loaded, spec_path.absolute(), run_name, home, allow_secrets=allow_secrets)
    if not again:
        _ask_about_twin(prepared)
    console.print(screens.preview(prepared, found))
    place = launch.start(prepared, loaded, spec_path.absolute().parent, found)
    if detach:
        if as_json:
            _print_json(_run_json(prepared.run, prepared.run.read()))
        else:
            screens.out().print(run_name)
        console.print(f"watch it: burst logs -f {run_name}\nget the adapter: burst fetch {run_name}")
        return
    _finish(prepared.run, place, console, as_json=as_json, quiet=quiet)


def _finish(a_run: Run, place: Any, console: Any, *, as_json: bool, quiet: bool) -> None:
    """Watch a run to its end, adopt the adapter, and show the result."""
    from burst import follow, launch, screens

    try:
        with screens.Follower(console) as show:
            record = launch.watch(a_run, place, show)
    except KeyboardInterrupt:
        console.print("stopping the run …")
        record = launch.stop(a_run)
    view = follow.replay(a_run.output / "events.jsonl")
    if record.seal_id is None:
        if as_json:
            _print_json(_run_json(a_run, record))
        what = record.error or "the run was stopped before an adapter was sealed"
        _fail(what, record.fix or f"burst logs {a_run.name}")
        raise SystemExit(launch.exit_code(record))
    fetched = launch.adopt(a_run, place, None)
    record = launch.refresh(a_run)
    if as_json:
        _print_json(_run_json(a_run, record))
    elif quiet:
        click.echo(fetched.folder)
    else:
        screens.out().print(screens.finished(view, fetched, a_run.name))
    screens.bell(console, (record.ended or record.created) - record.created)


@cli.command()
@json_option
def runs(as_json: bool) -> None:
    """List all runs, newest first, as they really are."""
    from burst import launch, paths, screens

    items, damaged = launch.readable_runs()
    for error in damaged:
        _fail(error.what, error.fix)
    if as_json:
        _print_json([_run_json(item, record) for item, record in reversed(items)])
    elif items:
        screens.out().print(screens.runs_table(items))
    else:
        screens.out().print(f"no runs in {paths.short(paths.runs())}; start one with: burst train")


@cli.command()
@run_argument
@json_option
def show(run_name: str | None, as_json: bool) -> None:
    """Show one run (the newest by default)."""
    from burst import follow, launch, run, screens

    found = run.find(run_name)
    record = launch.refresh(found)
    view = follow.replay(found.output / "events.jsonl")
    if as_json:
        _print_json(_run_json(found, record) | {"progress": follow.to_json(view)})
    else:
        screens.out().print(screens.run_page(found, record, view))


@cli.command()
@run_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Go on until the run ends. Ctrl-C stops only the showing."
)
def logs(run_name: str | None, following: bool) -> None:
    """Print a run's log."""
    import time

    from burst import launch, run

    found = run.find(run_name)
    position = 0
    while True:
        over = launch.refresh(found).state.over
        if found.log.exists():
            with open(found.log, "rb") as file:
                file.seek(position)
                text = file.read()
            position += len(text)
            click.echo(text.decode(errors="replace"), nl=False)
        if over or not following:
            return
        time.sleep(0.3)


@cli.command()
@run_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The adapter's folder; default: the run's own.")
@json_option
@quiet_option
def fetch(run_name: str | None, output: Path | None, as_json: bool, quiet: bool) -> None:
    """Bring a run's adapter here and verify it. Safe to repeat; continues where it was cut off."""
    from burst import launch, run, screens
    from burst.places.local import Local

    found = run.find(run_name)
    with screens.byte_progress("fetching", None, quiet=quiet) as advance:
        fetched = launch.adopt(found, Local(), output.absolute() if output else None, advance)
    if as_json:
        _print_json(
            {
                "run": found.name,
                "path": str(fetched.folder),
                "seal_id": fetched.seal.seal_id,
                "size_bytes": fetched.seal.size_bytes,
                "pulled_bytes": fetched.pulled_bytes,
            }
        )
        return
    how = f"{screens.size(fetched.pulled_bytes)} fetched" if fetched.pulled_bytes else "was here already"
    if fetched.replaced:
        how = f"the copy here had been changed or damaged; {how} anew"
    screens.out().print(f"{fetched.folder}: {how}, every hash verified")


@cli.command()
@run_argument
@json_option
def stop(run_name: str | None, as_json: bool) -> None:
    """End a run: the one named, or the only one that is running. What is sealed stays fetchable."""
    from burst import launch, run, screens

    found = run.find(run_name) if run_name else launch.only_running()
    if found is None:
        click.echo("null" if as_json else "nothing to stop: no run is at work")
        return
    before = launch.refresh(found)
    record = launch.stop(found)
    if before.state.over and not as_json:
        screens.out().print(f"{found.name}: nothing to stop, it is {screens.state_name(record)}")
    elif as_json:
        _print_json(_run_json(found, record))
    else:
        screens.out().print(f"{found.name}: {screens.state_name(record)}")


@cli.command()
@click.option(
    "--torch-backend", metavar="NAME", help="Torch build: cpu, cu126, cu130, ... (default: what fits, or pip's choice)"
)
@json_option
@quiet_option
def env(torch_backend: str | None, as_json: bool, quiet: bool) -> None:
    """Build the training environment now, if it is not there, and print its Python."""
    from burst import interpreter, screens

    console = screens.err(quiet)
    python = interpreter.build(lambda line: console.print(line, style="dim"), torch_backend=torch_backend)
    if as_json:
        _print_json({"python": str(python)})
    else:
        click.echo(python)


def main() -> None:
    """Run the command line and end with burst's exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a chart on a screen that knows no braille is better than none
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.INVALID)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(ExitCode.INTERRUPTED)
    except BurstError as error:
        _fail(error.what, error.fix)
        sys.exit(error.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        if error.errno not in USERS_ERRNOS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _fail(
            f"{where}{error.strerror}", "free space, or give a place that can be written (BURST_HOME, BURST_CACHE, -o)"
        )
        sys.exit(ExitCode.FAILED)


def _fail(what: str, fix: str) -> None:
    """An error for people: what on the first lines, what to do on the last."""
    from burst import screens

    console = screens.err()
    for line in what.splitlines():
        console.print(f"error: {screens.printable(line)}", style="red", markup=False)
    if fix:
        console.print(f"do this: {fix}", markup=False)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _run_json(a_run: Run, record: Record) -> dict[str, Any]:
    from burst import launch, run

    return {**run.to_json(record), "adapter": launch.adapter_state(record), "folder": str(a_run.folder)}


def _spec_for_check(target: Path, model: str | None, max_length: int | None) -> tuple[Spec, Path]:
    """The spec of a check: a file, or one made for a data file."""
    from burst import spec
    from burst.errors import InvalidInput

    folder = target.absolute().parent
    if not target.exists():
        raise InvalidInput(f"{target} does not exist", "make a spec with: burst init DATA.jsonl")
    if target.suffix in (".yaml", ".yml"):
        if model or max_length:
            raise click.UsageError("--model and --max-length go with a data file; a spec has its own")
        return spec.load(target), folder
    if not model:
        raise click.UsageError(
            f"{target} is a data file: name the model, for example with --model {spec.BUILTIN_MODEL}"
        )
    if model.startswith((".", "~")):
        model = str(Path(model).expanduser().absolute())
    data = {"train": target.name} | ({"max_length": max_length} if max_length else {})
    return spec.from_values({"model": model, "data": data}, str(target)), folder


def _ask_about_twin(prepared: Any) -> None:
    """The same job twice by mistake costs nothing: ask first, and without a terminal say no."""
    from burst import launch

    found = launch.twin(prepared.bundle.bundle_id)
    if found is None or found[0].name == prepared.run.name:
        return
    earlier, record = found
    what, fix = launch.about_twin(earlier, record)
    if sys.stdin.isatty() and click.confirm(f"{what}. Train it again?", err=True):
        return
    launch.discard(prepared)
    raise BurstError(what, fix)


def _valid_name(name: str) -> str:
    import re

    from burst import paths
    from burst.errors import InvalidInput

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise InvalidInput(f"{name!r} cannot name a run", "use letters, digits, '.', '_' and '-', at most 80")
    if (paths.runs() / name).exists():
        raise InvalidInput(f"a run is called {name} already", "give another --name")
    return name


def _complete_runs(incomplete: str) -> list[str]:
    from burst import run

    return [item.name for item in run.all_runs() if item.name.startswith(incomplete)]


if __name__ == "__main__":
    main()
