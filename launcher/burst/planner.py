"""From a spec to a plan, for ``burst plan``, and to a decision that ``burst train`` acts on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burst import plan, survey
from burst.errors import BurstError, NothingFits
from burst_payload.measures import table

if TYPE_CHECKING:
    from pathlib import Path

    from burst.plan import Candidate, Plan
    from burst.spec import Spec

ADVICE = "burst plan shows every candidate; --force trains all the same"


@dataclass(frozen=True)
class Decision:
    """What ``burst train`` does: where, with which spec, and the plan behind it (None where none could be made).

    The spec is the user's with what the plan decided: the cards that fit, and the measures that it takes to fit.
    """

    where: str
    spec: Spec
    plan: Plan | None
    note: str | None = None


def make(
    spec: Spec, folder: Path, where: str | None, max_cost_usd: float | None, max_hours: float | None, *, network: bool
) -> Plan:
    """The plan of a spec. Raises ``BurstError`` where nothing is known of its model or its data cannot be used."""
    wishes = survey.wishes(spec, where, max_cost_usd, max_hours)
    found = survey.survey(spec, folder, wishes, network=network)
    return plan.decide(found.job, found.machines, found.wishes, tuple(found.unknown))


def decide(
    spec: Spec,
    folder: Path,
    where: str,
    max_cost_usd: float | None = None,
    max_hours: float | None = None,
    *,
    force: bool = False,
) -> Decision:
    """Where to train. Raises ``NothingFits`` with the reasons and the nearest change that would work.

    This machine is looked at alone first: where it can do the job soon, nobody else is asked.
    """
    if force:
        return Decision("local" if where == "auto" else where, spec, None, "no plan was asked for (--force)")
    wishes = survey.wishes(spec, where, max_cost_usd, max_hours)
    try:
        found = survey.survey(spec, folder, wishes, rented=where == "cloud")
    except BurstError as error:
        return Decision(
            "local" if where == "auto" else where, spec, None, f"there is no plan: {error.what.splitlines()[0]}"
        )
    made = plan.decide(found.job, found.machines, wishes, tuple(found.unknown))
    if where == "auto" and not _settled(made):
        survey.add_rented(found, spec)
        made = plan.decide(found.job, found.machines, wishes, tuple(found.unknown))
    chosen = made.chosen
    if (chosen is None or where == "cloud") and where != "local" and (able := _able(made)):
        # the machine's real price is asked of SkyPilot before anything is launched: what is not in a price list is no obstacle
        if chosen is None:
            made = dataclasses.replace(made, chosen=able[0], reasons=("it fits; its price is asked of SkyPilot now",))
        return Decision("cloud", _decided(spec, able, chosen or able[0]), made)
    if chosen is None:
        raise NothingFits("\n".join(made.reasons), ADVICE)
    return Decision(chosen.machine.where, _decided(spec, _able(made), chosen), made)


def _settled(made: Plan) -> bool:
    """Whether this machine does it so soon that no rented one has to be looked at."""
    if made.chosen is None:
        return False
    return made.chosen.total.expected_s <= plan.PATIENCE_S or made.reasons == ("this machine was asked for",)


def _able(made: Plan) -> list[Candidate]:
    """The rented cards that can do the job, and that nothing but an unknown price or a limit speaks against."""
    return [c for c in made.candidates if c.machine.where == "cloud" and c.able and not c.machine.blocked]


def _decided(spec: Spec, able: list[Candidate], chosen: Candidate) -> Spec:
    """The spec with the measures that it takes to fit, and, to be rented, only the cards on which it fits with them."""
    changes: dict[str, object] = {}
    if chosen.extra:
        names = [name for name in table.NAMES if name in chosen.measures]
        changes["train"] = spec.train.model_copy(update={"measures": names})
    if chosen.machine.where == "cloud":
        fitting = {c.machine.name for c in able if set(c.extra) <= set(chosen.extra)}
        gpus = [gpu for gpu in spec.cloud.gpus if gpu.partition(":")[0] in fitting]
        changes["cloud"] = spec.cloud.model_copy(update={"gpus": gpus})
    return spec.model_copy(update=changes)
