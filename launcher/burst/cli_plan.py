"""``burst plan``: what will happen, where, how long, for how much, and why. ``burst doctor``: what is here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from burst.cli_runs import json_option, print_json
from burst.errors import BurstError, ExitCode

if TYPE_CHECKING:
    from burst.doctor import Finding


@click.command()
@click.argument("spec_path", metavar="[SPEC]", default="burst.yaml", type=click.Path(path_type=Path))
@click.option("--where", type=click.Choice(["auto", "local", "cloud"]), help="Where; the spec's where, else auto.")
@click.option("--max-cost", type=click.FloatRange(min=0, min_open=True), metavar="USD", help="The most it may cost.")
@click.option("--max-hours", type=click.FloatRange(min=0, min_open=True), help="The longest it may train.")
@click.option("--offline", is_flag=True, help="Ask nobody: only what is known here.")
@click.option("--explain", is_flag=True, help="Show how each number is made.")
@json_option
def plan(
    spec_path: Path,
    where: str | None,
    max_cost: float | None,
    max_hours: float | None,
    offline: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Say where a job would run, why, how long and for how much."""
    from burst import plan as planning
    from burst import plan_screens, planner, screens, spec, survey

    loaded = spec.load(spec_path)
    if offline or survey.cached(loaded.model, loaded.revision):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what is cached needs no question whether it is the newest
    made = planner.make(loaded, spec_path.absolute().parent, where, max_cost, max_hours, network=not offline)
    if as_json:
        print_json(planning.to_json(made))
    else:
        screens.out().print(plan_screens.page(made, loaded.model))
        if explain:
            screens.out().print(plan_screens.explanation(made))
    raise SystemExit(ExitCode.OK if made.chosen else ExitCode.NOTHING_FITS)


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine has for training, what is missing, and what to do."""
    import dataclasses

    from burst import clouds, plan_screens, screens
    from burst import doctor as looking

    question = clouds.ask()
    seen = dataclasses.replace(looking.look(), clouds=question.answer())
    findings = [*looking.judge(seen), *_machines(seen.skypilot is not None)]
    if as_json:
        print_json(looking.to_json(findings))
    else:
        screens.out().print(plan_screens.findings(findings))
    raise SystemExit(ExitCode.FAILED if any(finding.state == "bad" for finding in findings) else ExitCode.OK)


def _machines(has_skypilot: bool) -> list[Finding]:
    """The rented machines, records against providers; nobody is asked where nothing was ever rented."""
    from burst import launch, machines, screens
    from burst.doctor import Finding
    from burst.places import skypilot
    from burst.waiting import within

    known = [record for _, record in launch.readable_runs()[0] if record.cluster is not None]
    if not known or not has_skypilot:
        return []
    try:
        with screens.err().status("asking the providers for machines"):
            there = within(machines.LIMIT_S, skypilot.machines)
    except (BurstError, TimeoutError) as error:
        why = error.what if isinstance(error, BurstError) else f"no answer in {machines.LIMIT_S:.0f} s"
        return [Finding("machine", "note", f"machines cannot be asked for: {why}", "", "try again, or: sky status -r")]
    return machines.reconcile(known, there)


plan_commands = [plan, doctor]
