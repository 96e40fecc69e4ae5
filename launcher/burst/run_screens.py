"""What people look at of runs: the list, one run, its machine. Nothing here decides anything."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from burst import launch, paths
from burst.run import SPEC_NAME, State, age
from burst.screens import WIDE, facts, loss_chart, printable, probes, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.follow import View
    from burst.run import Record, Run

_STATE_STYLES = {
    State.ADOPTED: "green",
    State.SEALED: "cyan",
    State.RUNNING: "yellow",
    State.CREATED: "yellow",
    State.FAILED: "red",
    State.STOPPED: "magenta",
}


def state_name(record: Record) -> str:
    """A run's state for people: whoever reads it cares for the adapter."""
    return "done" if record.state is State.ADOPTED else record.state.value


def machine(record: Record) -> Text:
    """Whether a run's machine is there, and what it cost."""
    if record.cluster is None:
        return Text(f"{record.name}: no rented machine")
    cost = launch.cost_usd(record) or 0.0
    took = age((record.gone or time.time()) - (record.launched or record.created))
    if record.gone is not None:
        return Text(f"machine {record.cluster}: gone, ${cost:.2f} for {took} at ${record.hourly_usd or 0:.2f} an hour")
    return Text(
        f"machine {record.cluster} is up: ${cost:.2f} so far; end it with: burst down {record.name}", style="yellow"
    )


def runs_table(items: Sequence[tuple[Run, Record]]) -> Table:
    """What is needed to type the next command stays whole; model and place go where the screen is narrow."""
    wide = Console().width >= WIDE or not sys.stdout.isatty()
    details = ("model", "where") if wide else ()
    table = table_of("run", "state", "adapter", *details, ("started", "right"), ("took", "right"))
    for a_run, record in reversed(items):
        took = age((record.ended or time.time()) - record.created)
        started = (
            datetime.datetime.fromtimestamp(record.created)
            .astimezone()
            .strftime("%Y-%m-%d %H:%M" if wide else "%m-%d %H:%M")
        )
        table.add_row(
            a_run.name,
            Text(state_name(record), style=_STATE_STYLES[record.state]),
            launch.adapter_state(record),
            *((escape(record.model), record.where) if wide else ()),
            started,
            took,
        )
    return table


def run_page(a_run: Run, record: Record, view: View) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("run", a_run.name)
    started = datetime.datetime.fromtimestamp(record.created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    took = age((record.ended or time.time()) - record.created)
    grid.add_row("state", Text(state_name(record), style=_STATE_STYLES[record.state]))
    grid.add_row("started", f"{started}, {'took' if record.state.over else 'since'} {took}")
    if record.error:
        grid.add_row("error", Text(record.error, style="red"))
    grid.add_row(
        "adapter",
        f"{launch.adapter_state(record)}: {paths.short(Path(record.destination))}"
        if record.seal_id
        else launch.adapter_state(record),
    )
    if record.cluster is not None:
        grid.add_row("machine", machine(record))
    grid.add_row("model", escape(record.model))
    if view.device:
        grid.add_row("device", escape(f"{view.device}, {view.precision}"))
    if view.rows:
        grid.add_row("data", f"{view.rows:,} rows, {view.tokens or 0:,} tokens an epoch")
    if view.trainable_parameters:
        grid.add_row("trained", f"{view.trainable_parameters:,} parameters")
    if view.steps:
        grid.add_row("progress", "  ".join(facts(view)))
    if view.eval_losses:
        grid.add_row("evaluation", f"loss {view.eval_losses[-1][1]:.4f} at step {view.eval_losses[-1][0]}")
    for note in view.notes:
        grid.add_row("note", Text(printable(note), style="yellow"))
    if record.bundle_id:
        grid.add_row("bundle", record.bundle_id)
    if record.seal_id:
        grid.add_row("seal", record.seal_id)
    grid.add_row("spec", escape(paths.short(a_run.folder / SPEC_NAME)))
    grid.add_row("folder", escape(paths.short(a_run.folder)))
    parts: list[RenderableType] = [grid]
    if len(view.losses) > 1:
        parts += ["", Text("loss by step", style="bold"), Text.from_ansi(loss_chart(view))]
    if view.probes:
        parts += [probes(view.probes)]
    parts.append(Text.assemble(("next  ", "bold"), next_command(a_run, record), overflow="ignore", no_wrap=True))
    return Group(*parts)


def next_command(a_run: Run, record: Record) -> str:
    """The command that people run next in this state."""
    if record.state in (State.RUNNING, State.CREATED):
        return f"burst logs -f {a_run.name}"
    if record.state is State.SEALED:
        return f"burst fetch {a_run.name}"
    if record.state is State.ADOPTED:
        return f"PeftModel.from_pretrained(model, {str(record.destination)!r})"
    return record.fix or f"burst logs {a_run.name}"
