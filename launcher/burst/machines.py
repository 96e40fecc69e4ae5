"""Rented machines as burst's records have them against those that the provider has. ``reconcile`` is pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst import launch
from burst.doctor import Finding
from burst.places.skypilot import PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from burst.run import Record

LIMIT_S = 60.0
"""How long the providers are waited for: each machine is asked about in its cloud."""


def reconcile(known: Sequence[Record], there: Mapping[str, str]) -> list[Finding]:
    """One finding for each machine.

    Args:
        known: the records of all runs.
        there: SkyPilot's state, such as ``UP``, of each machine that its provider was just seen to have, by name.
    """
    findings = []
    for record in known:
        name = record.cluster
        if name is None or (record.gone is not None and name not in there):
            continue
        if name not in there and launch.forgotten(record):
            what = f"{name} of run {record.name} is not there any more"
            findings.append(Finding("machine", "note", what, "it costs nothing", f"burst down {record.name} notes it"))
        elif name not in there:
            findings.append(Finding("machine", "ok", f"{name} is not up yet: run {record.name}"))
        elif record.gone is not None:
            what = f"{name} of run {record.name} is {there[name]}, although it was seen to be gone"
            findings.append(Finding("machine", "bad", what, "it may cost money", f"sky down {name}"))
        elif launch.forgotten(record):
            what = f"{name} is {there[name]}, but run {record.name} is over and nobody looks after it"
            findings.append(Finding("machine", "bad", what, "it may cost money", f"burst down {record.name}"))
        else:
            findings.append(Finding("machine", "ok", f"{name} is {there[name]}: run {record.name}"))
    strays = sorted(set(there) - {record.cluster for record in known})
    findings += [
        Finding(
            "machine",
            "bad",
            f"{name} is {there[name]}, and no run here has it",
            "it may be another computer's, or of a record that was deleted; it may cost money",
            f"if it is nobody's: sky down {name}",
        )
        for name in strays
        if name.startswith(PREFIX)
    ]
    return findings
