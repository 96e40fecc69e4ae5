"""The commands about runs that exist: list, look, fetch, end. Imports that cost time happen in the command that needs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from burst.errors import BurstError

if TYPE_CHECKING:
    from burst.run import Record, Run

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON value on standard output.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="No progress and no advice.")
run_argument = click.argument(
    "run_name",
    metavar="[RUN]",
    required=False,
    shell_complete=lambda _context, _parameter, incomplete: _complete_runs(incomplete),
)


@click.group(invoke_without_command=True)
@json_option
@click.pass_context
def runs(context: click.Context, as_json: bool) -> None:
    """List all runs, newest first, as they really are; or carry one to another computer."""
    from burst import launch, paths, run_screens, screens

    if context.invoked_subcommand is not None:
        return

    items, damaged = launch.readable_runs()
    for error in damaged:
        fail(error.what, error.fix)
    if as_json:
        print_json([run_json(item, record) for item, record in reversed(items)])
    elif items:
        screens.out().print(run_screens.runs_table(items))
    else:
        screens.out().print(f"no runs in {paths.short(paths.runs())}; start one with: burst train")


@runs.command("export")
@run_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file; default ./RUN.run.tar.gz.")
def export_run(run_name: str | None, output: Path | None) -> None:
    """Write a rented run's record to a file, for burst runs import elsewhere."""
    from burst import run, run_archive, screens

    found = run.find(run_name)
    target = output or Path(f"{found.name}.run.tar.gz")
    run_archive.export(found, target)
    screens.out().print(f"{target}: there, burst runs import {target.name}; then burst fetch {found.name}")


@runs.command("import")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The adapter's folder; default ./adapters/RUN.")
def import_run(archive: Path, output: Path | None) -> None:
    """Make a run of another computer known here."""
    from burst import run_archive, screens

    new = run_archive.take(archive, output.absolute() if output else None)
    screens.out().print(f"{new.name}: known here; next: burst fetch {new.name}")


@click.command()
@run_argument
@json_option
def show(run_name: str | None, as_json: bool) -> None:
    """Show one run (the newest by default)."""
    from burst import follow, launch, run, run_screens, screens

    found = run.find(run_name)
    record = launch.refresh(found, launch.place_of(found.read()))
    view = follow.replay(found.output / "events.jsonl")
    if as_json:
        print_json(run_json(found, record) | {"progress": follow.to_json(view)})
    else:
        screens.out().print(run_screens.run_page(found, record, view))


@click.command()
@run_argument
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Go on until the run ends. Ctrl-C stops only the showing."
)
def logs(run_name: str | None, following: bool) -> None:
    """Print a run's log."""
    import time

    from burst import follow, launch, run
    from burst_payload import reporter

    found = run.find(run_name)
    place = launch.place_of(found.read())
    rented = follow.Tail(found.output / "events.jsonl") if found.read().where == "cloud" else None
    position = 0
    while True:
        over = launch.refresh(found, place).state.over
        if found.log.exists():
            with open(found.log, "rb") as file:
                file.seek(position)
                text = file.read()
            position += len(text)
            click.echo(text.decode(errors="replace"), nl=False)
        for event in rented.poll() if rented else ():  # the payload's own log is on the machine; its events are here
            click.echo(reporter.line_for(event["event"], event))
        if over or not following:
            return
        time.sleep(0.3)


@click.command()
@run_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The adapter's folder; default: the run's own.")
@json_option
@quiet_option
def fetch(run_name: str | None, output: Path | None, as_json: bool, quiet: bool) -> None:
    """Bring a run's adapter here and verify it. Safe to repeat; continues where it was cut off."""
    from burst import launch, run, screens

    found = run.find(run_name)
    place = launch.place_of(found.read())
    with screens.byte_progress("fetching", None, quiet=quiet) as advance:
        fetched = launch.adopt(found, place, output.absolute() if output else None, advance)
    if as_json:
        print_json(
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


@click.command()
@run_argument
@click.option("--all", "every", is_flag=True, help="The machines of all runs.")
@click.option("--force", is_flag=True, help="Also where an adapter lies on it that is not here.")
@json_option
def down(run_name: str | None, every: bool, force: bool, as_json: bool) -> None:
    """End a run's rented machine, and prove that it is gone."""
    from burst import launch, run, run_screens, screens

    found = [item for item in run.all_runs() if item.read().billing] if every else [run.find(run_name)]
    records = [launch.down(item, force=force) if item.read().billing else item.read() for item in found]
    if as_json:
        print_json([run_json(item, record) for item, record in zip(found, records, strict=True)])
    else:
        for record in records:
            screens.out().print(run_screens.machine(record))


@click.command()
@run_argument
@json_option
def stop(run_name: str | None, as_json: bool) -> None:
    """End a run: the one named, or the only one that is running. What is sealed stays fetchable."""
    from burst import launch, run, run_screens, screens

    found = run.find(run_name) if run_name else launch.only_running()
    if found is None:
        click.echo("null" if as_json else "nothing to stop: no run is at work")
        return
    before = launch.refresh(found)
    record = launch.stop(found)
    if before.state.over and not as_json:
        screens.out().print(f"{found.name}: nothing to stop, it is {run_screens.state_name(record)}")
    elif as_json:
        print_json(run_json(found, record))
    else:
        screens.out().print(f"{found.name}: {run_screens.state_name(record)}")


def end_machine(a_run: Run, console: Any) -> Record:
    """After a run on a rented machine: end it, and say what it cost."""
    from burst import launch, run_screens

    if not a_run.read().billing:
        return launch.refresh(a_run)
    with console.status("ending the machine"):
        record = launch.down(a_run)
    console.print(run_screens.machine(record))
    return record


def warn_of_machines() -> None:
    """At the end of every command: name each rented machine whose run is over, for it costs money until it is ended."""
    from burst import run

    for item in run.all_runs():
        try:
            record = item.read()
        except BurstError:
            continue
        if not record.billing:
            continue
        from burst import launch, run_screens, screens  # only now: this runs after every command

        if launch.forgotten(record):
            screens.err().print(run_screens.machine(record))


def run_json(a_run: Run, record: Record) -> dict[str, Any]:
    from burst import launch, run

    return {
        **run.to_json(record),
        "adapter": launch.adapter_state(record),
        "cost_usd": launch.cost_usd(record),
        "folder": str(a_run.folder),
    }


def fail(what: str, fix: str) -> None:
    """An error for people: what on the first lines, what to do on the last."""
    from burst import screens

    console = screens.err()
    for line in what.splitlines():
        console.print(f"error: {screens.printable(line)}", style="red", markup=False)
    if fix:
        console.print(f"do this: {fix}", markup=False)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _complete_runs(incomplete: str) -> list[str]:
    from burst import run

    return [item.name for item in run.all_runs() if item.name.startswith(incomplete)]


run_commands = [runs, show, logs, fetch, down, stop]
