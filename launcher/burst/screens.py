"""What people look at. Values come in, rich renderables and text go out; nothing here decides anything."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from burst import paths
from burst.run import age

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from burst.fetch import Fetched
    from burst.follow import Probe, View
    from burst.interpreter import Interpreter
    from burst.launch import Prepared
    from burst.offers import Limits, Offer
    from burst.report import Issue, Report

PLAIN_INTERVAL_S = 5.0
CHART_HEIGHT = 12
PIPE_WIDTH = 160
WIDE = 110


def out() -> Console:
    """Results: standard output."""
    return Console(highlight=False, width=_width(sys.stdout))


def err(quiet: bool = False) -> Console:
    """Progress and advice: standard error."""
    return Console(stderr=True, highlight=False, quiet=quiet, width=_width(sys.stderr))


def _width(stream: TextIO) -> int | None:
    """The terminal's own width; pipes and files get lines wide enough that nothing is cut or wrapped."""
    return None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH


def size(count: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def printable(text: str) -> str:
    """Text from data or a model for one screen line: control and replacement characters become visible."""
    shown = "".join(char if char.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(char, "·") for char in text)
    return shown.replace("\ufffd", "·")


def unrepeated(text: str) -> str:
    """An answer of one character over and over, as untrained models give them, in short."""
    return re.sub(r"(.)\1{15,}", lambda run: f"{run[1] * 8}… ({len(run[0])} times)", text)


def clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


# --- check -----------------------------------------------------------------------------------------------------------


def check_report(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_files_table(report)] if report.files else []
    if report.tokenized and report.files:
        ends = f", answers end with {report.turn_end}" if report.turn_end else ""
        parts += [_tokens_table(report), Text(f"{report.model}, {report.rendering}{ends}", style="dim")]
        if report.sample:
            parts.append(
                Text.assemble(("scored part of the first row  ", "bold"), clipped(printable(report.sample), 300))
            )
    hidden = _hidden(report)
    for kind in dict.fromkeys(issue.kind for issue in sorted(report.issues.shown, key=lambda issue: not issue.blocks)):
        parts += [_issue(issue) for issue in report.issues.shown if issue.kind == kind]
        if more := hidden.get(kind):
            parts.append(Text(f"         … and {more:,} more of this kind (all: burst check --all)", style="dim"))
    if report.ok:
        parts.append(Text("ok: this data can be trained on", style="bold green"))
    else:
        parts.append(Text(f"not ok: {counted(report.issues.blocking, 'problem')} to fix", style="bold red"))
    return Group(*parts)


def _files_table(report: Report) -> Table:
    table = table_of("file", "split", "format", ("rows", "right"), ("repeat", "right"))
    for file, facts in report.files:
        table.add_row(escape(file.name), file.split, facts.format or "unknown", f"{facts.rows:,}", f"{file.repeat}")
    return table


def _tokens_table(report: Report) -> Table:
    table = table_of(
        "split",
        ("rows", "right"),
        ("tokens", "right"),
        ("scored", "right"),
        ("min", "right"),
        ("median", "right"),
        ("p95", "right"),
        ("max", "right"),
        (f"over {report.max_length:,}", "right"),
    )
    for name, split in (("train", report.train), ("eval", report.evaluation)):
        if split.rows or split.overlong:
            lengths = split.lengths.summary() if split.lengths.rows else {"min": 0, "median": 0, "p95": 0, "max": 0}
            table.add_row(
                name,
                f"{split.rows:,}",
                f"{split.lengths.total:,}",
                f"{split.scored_tokens:,}",
                *(f"{value:,}" for value in lengths.values()),
                f"{split.overlong:,}",
            )
    return table


def _issue(issue: Issue) -> Text:
    kind, style = ("problem", "bold red") if issue.blocks else ("note", "yellow")
    return Text.assemble(
        (f"{kind}  ", style), (issue.where, "bold"), f": {printable(issue.what)}; {printable(issue.fix)}"
    )


def _hidden(report: Report) -> dict[str, int]:
    """How many problems of each kind are counted but not shown."""
    shown: dict[str, int] = {}
    for issue in report.issues.shown:
        shown[issue.kind] = shown.get(issue.kind, 0) + 1
    return {
        kind: count - shown.get(kind, 0) for kind, count in report.issues.counts.items() if count > shown.get(kind, 0)
    }


# --- train -----------------------------------------------------------------------------------------------------------


def preview(prepared: Prepared, python: Interpreter) -> RenderableType:
    report, gpu = prepared.bundle.report, prepared.gpu
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("run", prepared.run.name)
    table.add_row("model", escape(report.model))
    held_out = f", {report.evaluation.rows:,} held out" if report.evaluation.rows else ""
    table.add_row(
        "data", f"{report.train.weighted_rows:,} rows an epoch, {report.train.weighted_tokens:,} tokens{held_out}"
    )
    table.add_row("where", f"this machine, {gpu.name} ({size(gpu.free_bytes)} free)" if gpu else "this machine, CPU")
    if gpu and gpu.processes:
        table.add_row("", Text(f"also on this GPU: {', '.join(gpu.processes)}", style="yellow"))
    table.add_row("python", escape(f"{paths.short(python.path)}: {python.why}"))
    if python.differs:
        table.add_row("", Text(f"not as pinned: {', '.join(python.differs)}", style="yellow"))
    table.add_row("bundle", f"{size(prepared.bundle.size_bytes)}, {prepared.bundle.bundle_id[:12]}")
    table.add_row("folder", escape(paths.short(prepared.run.folder)))
    return table


def cloud_preview(prepared: Prepared, chosen: Sequence[Offer], limit: Limits) -> RenderableType:
    """What will be launched, and what it costs at most."""
    report = prepared.bundle.report
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("run", prepared.run.name)
    table.add_row("model", escape(report.model))
    table.add_row("data", f"{report.train.weighted_rows:,} rows an epoch, {report.train.weighted_tokens:,} tokens")
    for index, offer in enumerate(chosen[:5]):
        table.add_row(
            "" if index else "machine", f"{offer.accelerators} on {offer.infra}, ${offer.hourly_usd:.2f} an hour"
        )
    if len(chosen) > 5:
        table.add_row("", f"and {len(chosen) - 5} more, up to ${limit.hourly_usd:.2f} an hour")
    phases = {"set-up": limit.setup_s, "training": limit.run_s, "export": limit.export_s}
    rest_s = limit.worst_s - sum(phases.values())
    parts = [f"{age(limit_s)} {name}" for name, limit_s in phases.items() if limit_s]
    table.add_row(
        "at worst", f"${limit.worst_usd:.2f}: {', '.join(parts)}, {age(rest_s)} to start, store and be fetched"
    )
    if not all(offer.autodown for offer in chosen):
        table.add_row("", Text("an idle machine there stays until burst or its owner ends it", style="yellow"))
    table.add_row("bundle", f"{size(prepared.bundle.size_bytes)}, {prepared.bundle.bundle_id[:12]}")
    table.add_row("folder", escape(paths.short(prepared.run.folder)))
    return table


class Follower:
    """Shows a run while it goes: a live panel on a terminal, else a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._phase = ""
        self._notes = 0
        self._said = 0.0
        self._step = 0

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, view: View) -> None:
        for note in view.notes[self._notes :]:
            self.console.print(Text.assemble(("note  ", "yellow"), printable(note)))
        self._notes = len(view.notes)
        if self._live:
            self._live.update(progress(view))
        else:
            self._plain(view)

    def _plain(self, view: View) -> None:
        due = time.monotonic() - self._said >= PLAIN_INTERVAL_S
        if view.phase != self._phase:
            self.console.print(f"phase: {view.phase}")
            self._phase = view.phase
        if view.step != self._step and (due or view.step == view.steps):
            self._step, self._said = view.step, time.monotonic()
            self.console.print("  ".join(facts(view)))


def progress(view: View) -> RenderableType:
    """The live panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("phase", escape(view.phase))
    if view.device:
        grid.add_row("device", escape(f"{view.device}, {view.precision}"))
    if view.steps:
        grid.add_row("step", ProgressBar(total=view.steps, completed=view.step, width=40))
        grid.add_row("", "  ".join(facts(view)))
    return grid


def facts(view: View) -> list[str]:
    facts = [f"step {view.step}/{view.steps}"]
    if view.losses:
        facts.append(f"loss {view.losses[-1][1]:.4f}")
    if view.tokens_per_s:
        facts.append(f"{view.tokens_per_s:,.0f} tokens/s")
    if view.eta_s is not None and view.step < view.steps:
        facts.append(f"{age(view.eta_s)} left")
    if view.memory_bytes:
        facts.append(f"peak {size(view.memory_bytes)}")
    return facts


def finished(view: View, fetched: Fetched, run_name: str) -> RenderableType:
    """What a person wants to see at the end: the curve, the answers, the adapter, the next command."""
    parts: list[RenderableType] = []
    if len(view.losses) > 1:
        parts += [Text("loss by step", style="bold"), Text.from_ansi(loss_chart(view))]
    if view.eval_losses:
        parts.append(f"evaluation loss {view.eval_losses[-1][1]:.4f} at step {view.eval_losses[-1][0]}")
    if view.probes:
        parts.append(probes(view.probes))
    parts.append(
        Text.assemble(
            ("adapter  ", "bold"),
            (paths.short(fetched.folder), "green"),
            f"  {size(fetched.seal.size_bytes)}, every hash verified",
        )
    )
    parts.append(Text.assemble(("next     ", "bold"), f"burst show {run_name}"))
    return Group(*parts)


def loss_chart(view: View) -> str:
    """The loss curve as terminal text, as wide as the screen allows."""
    import plotext

    width = min(100, Console().width - 2)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, CHART_HEIGHT)
    losses = [loss for _, loss in view.losses]
    if 0.0 < min(losses) < max(losses) / 20:  # on a plain scale the first steps would press the rest into a line
        plotext.yscale("log")
    steps = [step for step, _ in view.losses]
    ticks = sorted({steps[round(share * (len(steps) - 1) / 4)] for share in range(5)})
    plotext.xticks(ticks, [str(tick) for tick in ticks])
    plotext.plot(steps, losses, marker="braille")
    chart: str = plotext.build()
    return chart


def probes(items: Sequence[Probe]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for item in items:
        table.add_row("asked", escape(clipped(printable(item.asked), 200)))
        table.add_row("before", Text(clipped(unrepeated(printable(item.before)), 120) or "(nothing)", style="dim"))
        right = item.after.strip() == item.expected.strip()
        table.add_row(
            "after",
            Text(clipped(unrepeated(printable(item.after)), 200) or "(nothing)", style="green" if right else ""),
        )
        if not right:
            table.add_row("expected", Text(clipped(printable(item.expected), 200), style="dim"))
        table.add_row("", "")
    return table


def byte_progress(text: str, total_bytes: int | None, *, quiet: bool) -> Any:
    """A context manager that yields ``advance(bytes)``, with a bar on a terminal."""
    console = err(quiet)
    if quiet or not console.is_terminal:
        return contextlib.nullcontext(lambda _count: None)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    @contextlib.contextmanager
    def shown() -> Any:
        with Progress(
            TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console, transient=True
        ) as bar:
            task = bar.add_task(text, total=total_bytes)
            yield lambda count: bar.update(task, advance=count)

    return shown()


def bell(console: Console, seconds: float) -> None:
    """Ring after a long run, on a terminal, so that people may look away."""
    if console.is_terminal and seconds > 60 and not os.environ.get("BURST_NO_BELL"):
        console.bell()


def table_of(*columns: str | tuple[str, str]) -> Table:
    """A plain table. The first column is what people type or look for: it stays whole; numbers stand to the right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, column in enumerate(columns):
        if isinstance(column, str):
            table.add_column(column, overflow="ellipsis", no_wrap=True, min_width=None if index else 1)
        else:
            table.add_column(column[0], justify="right", no_wrap=True)
    return table
