"""The commands: parse, call, show. Imports that cost time happen in the command that needs them."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from burst import __version__
from burst.cli_plan import plan_commands
from burst.cli_runs import (
    end_machine,
    fail,
    json_option,
    print_json,
    quiet_option,
    run_argument,
    run_commands,
    run_json,
    warn_of_machines,
)
from burst.errors import BurstError, ExitCode

if TYPE_CHECKING:
    from burst.launch import Prepared
    from burst.places import Place
    from burst.run import Run
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

spec_argument = click.argument("spec_path", metavar="[SPEC]", default=DEFAULT_SPEC, type=click.Path(path_type=Path))
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
    """Say whether data can be trained on, and all that is wrong."""
    from burst import check as checking
    from burst import screens

    spec, folder = _spec_for_check(target, model, max_length)
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl")) if not quiet else 0
    with screens.byte_progress("reading", size, quiet=quiet or size < 20_000_000) as advance:
        report = checking.check(spec, folder, every_problem=every, progress=advance)
    if as_json:
        print_json(report.to_json())
    else:
        screens.out().print(screens.check_report(report))
    raise SystemExit(ExitCode.OK if report.ok else ExitCode.INVALID)


@cli.command()
def schema() -> None:
    """Print the JSON Schema of a spec, for editors."""
    from burst import spec

    print_json(spec.schema())


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
        print_json(
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
@click.option(
    "--max-cost", type=click.FloatRange(min=0, min_open=True), metavar="USD", help="Cloud: the most it may cost."
)
@click.option("--max-hours", type=click.FloatRange(min=0, min_open=True), help="Cloud: the longest it may train.")
@click.option("-y", "--yes", is_flag=True, help="Cloud: launch without asking; without a terminal with --max-cost.")
@click.option("--force", is_flag=True, help="Train although the plan says no, or without a plan.")
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
    max_cost: float | None,
    max_hours: float | None,
    yes: bool,
    force: bool,
    detach: bool,
    again: bool,
    allow_secrets: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train an adapter and bring it to ./adapters/RUN, verified."""
    from burst import interpreter, launch, plan_screens, planner, run, screens, spec

    console = screens.err(quiet)
    loaded = spec.load(spec_path)
    launch.resolve_where(where or loaded.where, loaded)
    with console.status("planning"):
        decided = planner.decide(
            loaded, spec_path.absolute().parent, where or loaded.where, max_cost, max_hours, force=force
        )
    loaded, place_name = decided.spec, launch.resolve_where(decided.where, decided.spec)
    if decided.plan is not None:
        console.print(plan_screens.summary(decided.plan, loaded.model))
    elif decided.note:
        console.print(f"note: {decided.note}", style="yellow")
    if loaded.export:  # said although --quiet: something that was asked for will not happen
        screens.err().print("note: export is not built yet; only the adapter is made", style="yellow")
    run_name = run.check_name(name) if name else run.new_name(loaded.model, loaded.adapter.rank)
    home = (output or Path("adapters") / run_name).absolute()

    def prepared_run() -> Prepared:
        made = launch.prepare(
            loaded, spec_path.absolute(), run_name, home, where=place_name, allow_secrets=allow_secrets
        )
        if not again:
            _ask_about_twin(made)
        return made

    place: Place
    if place_name == "cloud":
        with console.status("asking SkyPilot for machines and prices"):
            chosen, limit = launch.quote(loaded.cloud, max_cost, max_hours)
        prepared = prepared_run()
        console.print(screens.cloud_preview(prepared, chosen, limit))
        if not yes or not (max_cost or loaded.cloud.max_cost_usd or sys.stdin.isatty()):
            _ask_to_pay(prepared)
        with console.status(f"launching; log: {prepared.run.log}"):
            place = launch.start_cloud(prepared, loaded, chosen, limit)
    else:
        found = interpreter.find(python, lambda line: console.print(line, style="dim"), torch_backend=torch_backend)
        prepared = prepared_run()
        console.print(screens.preview(prepared, found))
        place = launch.start(prepared, loaded, spec_path.absolute().parent, found)
    if detach:
        if as_json:
            print_json(run_json(prepared.run, prepared.run.read()))
        else:
            screens.out().print(run_name)
        console.print(f"watch it: burst logs -f {run_name}\nget the adapter: burst fetch {run_name}")
        return
    _finish(prepared.run, place, console, as_json=as_json, quiet=quiet)


@cli.command()
@run_argument
@click.option("--detach", is_flag=True, help="Start it and return; it goes on when the terminal closes.")
@json_option
@quiet_option
def resume(run_name: str | None, detach: bool, as_json: bool, quiet: bool) -> None:
    """Go on with a run that was stopped or failed, from its newest whole checkpoint."""
    from burst import resuming, run, screens

    console = screens.err(quiet)
    found = run.find(run_name)
    place = resuming.resume(found)
    console.print(f"going on with {found.name} {resuming.from_where(found)}", markup=False)
    if detach:
        if as_json:
            print_json(run_json(found, found.read()))
        else:
            screens.out().print(found.name)
        console.print(f"watch it: burst logs -f {found.name}\nget the adapter: burst fetch {found.name}")
        return
    _finish(found, place, console, as_json=as_json, quiet=quiet)


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
        record = end_machine(a_run, console)
        if as_json:
            print_json(run_json(a_run, record))
        what = record.error or "the run was stopped before an adapter was sealed"
        fail(what, record.fix or f"burst logs {a_run.name}")
        raise SystemExit(launch.exit_code(record))
    fetched = launch.adopt(a_run, place, None)
    record = end_machine(a_run, console)
    if as_json:
        print_json(run_json(a_run, record))
    elif quiet:
        click.echo(fetched.folder)
    else:
        screens.out().print(screens.finished(view, fetched, a_run.name))
    screens.bell(console, (record.ended or record.created) - record.created)


@cli.command()
@click.option(
    "--torch-backend", metavar="NAME", help="Torch build: cpu, cu126, cu130, ... (default: what fits, or pip's choice)"
)
@json_option
@quiet_option
def env(torch_backend: str | None, as_json: bool, quiet: bool) -> None:
    """Print the Python that trains; build its environment if need be."""
    from burst import interpreter, screens

    console = screens.err(quiet)
    python = interpreter.build(lambda line: console.print(line, style="dim"), torch_backend=torch_backend)
    if as_json:
        print_json({"python": str(python)})
    else:
        click.echo(python)


for command in [*plan_commands, *run_commands]:
    cli.add_command(command)


def main() -> None:
    """Run the command line and end with burst's exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a chart on a screen that knows no braille is better than none
    try:
        try:
            cli(standalone_mode=False)
        finally:
            warn_of_machines()
    except click.exceptions.Exit as exit_:
        sys.exit(exit_.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.INVALID)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(ExitCode.INTERRUPTED)
    except BurstError as error:
        fail(error.what, error.fix)
        sys.exit(error.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has left
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        if error.errno not in USERS_ERRNOS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        fail(
            f"{where}{error.strerror}", "free space, or give a place that can be written (BURST_HOME, BURST_CACHE, -o)"
        )
        sys.exit(ExitCode.FAILED)


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


def _ask_to_pay(prepared: Prepared) -> None:
    """Nothing is launched without a yes."""
    from burst import launch

    if sys.stdin.isatty() and click.confirm("Launch it?", err=True):
        return
    launch.discard(prepared)
    raise BurstError("nothing was launched", "launch it with: --yes --max-cost USD")


if __name__ == "__main__":
    main()
