"""The plan as people read it: one table to decide from, the reasons, the worst case. Nothing here decides anything."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from burst import duration, estimate, measures, screens
from burst.run import age

if TYPE_CHECKING:
    from collections.abc import Sequence

    from burst.doctor import Finding
    from burst.duration import Span
    from burst.offers import Limits
    from burst.plan import Candidate, Money, Plan

SHOWN = 8
"""Candidates in the table; the others are counted."""


def page(plan: Plan, model: str) -> RenderableType:
    """The whole plan."""
    parts: list[RenderableType] = [_facts(plan, model), "", _table(plan), ""]
    parts += _verdict(plan)
    parts += _notes(plan)
    return Group(*parts)


def summary(plan: Plan, model: str) -> RenderableType:
    """What ``burst train`` shows before it starts: the table where there is a choice to pay for, else the verdict."""
    pays = plan.chosen is None or plan.chosen.machine.where == "cloud"
    return page(plan, model) if pays else Group(*_verdict(plan), *_notes(plan))


def _facts(plan: Plan, model: str) -> Table:
    job, table = plan.job, Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    architecture = job.architecture
    active = f", {_billions(architecture.active)} active" if architecture.moe else ""
    table.add_row("model", escape(f"{model}: {_billions(architecture.parameters)} parameters{active}"))
    table.add_row("adapter", f"rank {job.rank}, {job.trainable():,} trainable parameters")
    table.add_row(
        "data",
        f"{job.rows:,} rows an epoch, {job.tokens:,} tokens, the longest row {job.longest:,}; {job.steps:,} steps",
    )
    return table


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "card", "where"):
        table.add_column(name, no_wrap=True)
    for name in ("needs", "has", "time", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
    for candidate in plan.candidates[:SHOWN]:
        taken = candidate is plan.chosen
        machine = candidate.machine
        place = "here" if machine.where == "local" else machine.quote.infra if machine.quote else "cloud"
        table.add_row(
            ">" if taken else "",
            escape(machine.name),
            escape(place),
            _gib(candidate.memory.needed_bytes),
            _gib(machine.memory_bytes),
            _about(candidate.total),
            _money(candidate.cost),
            Text(_why(candidate), style="dim"),
            style="bold green" if taken else "" if candidate.possible else "dim",
        )
    return table


def _why(candidate: Candidate) -> str:
    if candidate.why_not:
        return f"no: {candidate.why_not[0]}"
    passed = [text.removeprefix("not taken: ") for text in candidate.warnings if text.startswith("not taken: ")]
    return passed[0] if passed else ""


def _verdict(plan: Plan) -> list[RenderableType]:
    chosen = plan.chosen
    if chosen is None:
        lines: list[RenderableType] = [Text("nowhere", style="bold red")]
        return lines + [Text(f"  {reason}") for reason in plan.reasons]
    machine, total = chosen.machine, chosen.total
    where = (
        "this machine"
        if machine.where == "local"
        else f"a rented machine, {machine.quote.infra if machine.quote else ''}"
    )
    parts: list[RenderableType] = [
        Text.assemble(("where   ", "bold"), (f"{where}: {machine.name}", "bold green")),
        Text.assemble(("why     ", "bold"), "; ".join(plan.reasons)),
        Text.assemble(("memory  ", "bold"), _memory(chosen)),
        Text.assemble(
            ("time    ", "bold"), f"{_about(total)} ({age(total.low_s)} to {age(total.high_s)}): {_phases(chosen)}"
        ),
    ]
    if chosen.limits is not None:
        parts.append(Text.assemble(("worst   ", "bold"), worst_case(chosen.limits, time.time())))
    return parts


def worst_case(limit: Limits, now: float) -> str:
    """One sentence: the most that it can cost, and when the machine is gone at the latest."""
    last = now + limit.worst_s
    day = time.strftime("%H:%M", time.localtime(last))
    if time.strftime("%F", time.localtime(last)) != time.strftime("%F", time.localtime(now)):
        day = time.strftime("%a %H:%M", time.localtime(last))
    return f"cannot cost more than ${limit.worst_usd:.2f}: the machine ends itself by {day}, counted from now"


def _notes(plan: Plan) -> list[RenderableType]:
    """Warnings of what was chosen (else of what is here), what was not known, and what earlier runs taught."""
    shown = plan.chosen or next((c for c in plan.candidates if c.machine.where == "local"), None)
    warnings = [text for text in (shown.warnings if shown else ()) if not text.startswith("not taken")]
    parts: list[RenderableType] = [Text.assemble(("note    ", "yellow"), text) for text in warnings]
    parts += [Text.assemble(("learned ", "green"), text) for text in plan.learned]
    parts += [Text.assemble(("unknown ", "yellow"), text) for text in plan.unknown]
    hidden = len(plan.candidates) - SHOWN
    if hidden > 0:
        parts.append(Text(f"        and {hidden} more candidates: burst plan --json", style="dim"))
    return parts


def _memory(candidate: Candidate) -> str:
    names = [name for name in measures.TABLE if name in candidate.measures]
    return (
        f"{screens.size(candidate.memory.needed_bytes)} needed of {screens.size(candidate.machine.memory_bytes)}, "
        f"with {', '.join(name.replace('_', ' ') for name in names) or 'no measure'}"
    )


def _phases(candidate: Candidate) -> str:
    return ", ".join(
        f"{name} {age(span.expected_s)}" for name, span in candidate.phases.items() if span.expected_s >= 1
    )


def explanation(plan: Plan) -> RenderableType:
    """How each number of the chosen candidate (else the first) is made."""
    candidate = plan.chosen or plan.candidates[0]
    job, card = plan.job, candidate.machine.card
    how = measures.settings(candidate.measures)
    memory = Table(
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
        title=f"memory on {candidate.machine.name}",
        title_justify="left",
    )
    memory.add_column("component", no_wrap=True)
    memory.add_column("size", justify="right", no_wrap=True)
    memory.add_column("formula", overflow="fold")
    for name, size in (candidate.memory.components | candidate.memory.outside).items():
        memory.add_row(name, screens.size(size), FORMULAS.get(name, ""))
    memory.add_row("needed", screens.size(candidate.memory.needed_bytes), "the sum; must be free on the card")
    times = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", title="time", title_justify="left")
    for name in ("phase", "low", "expected", "high"):
        times.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for name, span in candidate.phases.items():
        times.add_row(name, age(span.low_s), age(span.expected_s), age(span.high_s))
    step = duration.step_s(job, card, how, candidate.machine.around)
    flops = duration.flops_per_token(job, how)
    lines = [
        f"steps {job.steps:,} = epochs {job.epochs:g} x ceil({job.rows:,} rows / {job.effective_batch})"
        if job.max_steps is None
        else f"steps {job.steps:,} = train.max_steps",
        f"trainable {job.trainable():,} = sum of rank x (in + out) over the targeted matrices",
        f"one pass {step.expected_s:.2f} s ({step.low_s:.2f} to {step.high_s:.2f}), {job.micro_steps:,} passes",
        f"one token {flops / 1e9:.3f} GFLOP",
        f"adapter file {screens.size(estimate.adapter_file_bytes(job, card))}, on disk {screens.size(candidate.disk_bytes)} in all",
        "every formula with its source and calibration: docs/estimates.md",
    ]
    return Group("", memory, "", times, "", *(Text(line) for line in lines))


def findings(items: Sequence[Finding]) -> Table:
    """The doctor's lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    marks = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("BAD", "bold red")}
    for item in items:
        mark, style = marks[item.state]
        text = Text(item.what)
        if item.means:
            text.append(f": {item.means}", style="dim")
        if item.do:
            text.append(f"; {item.do}")
        table.add_row(Text(mark, style=style), item.part, text)
    return table


FORMULAS = {
    "weights": "NF4 matrices x 0.516 bytes, all else in 16 bits",
    "embeddings and head": "vocabulary x width x 2 bytes (4 where upcast); once where tied",
    "adapter": "trainable x 2 bytes (4 beside 16-bit weights)",
    "gradients": "as the adapter",
    "optimizer": "two moments; 8-bit: 2.03 bytes a parameter, paged where a tensor has 100,000 or more",
    "layer inputs": "layers x tokens x width x 2 bytes: what checkpointing keeps",
    "layer activations": "what every layer keeps for its backward pass",
    "one layer": "one layer computed again: norms, attention, 4 MLP tensors, and its gradients",
    "attention mask": "sliding windows shorter than the row: 3 bytes x tokens squared",
    "dequantization": "the largest matrix in 16 bits",
    "expert copies": "PEFT adds the adapter's product to whole expert tensors",
    "logits beyond that": "the head's tiles and the last hidden states, where they exceed one layer",
    "context": "CUDA, its libraries and workspaces",
    "fragmentation": "5 % of what is not weights",
}


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _about(span: Span) -> str:
    return age(span.expected_s)


def _money(cost: Money | None) -> str:
    if cost is None:
        return "?"
    if cost.high_usd == 0:
        return "-"
    return f"${cost.expected_usd:.2f}" if cost.expected_usd >= 0.01 else "<$0.01"
