"""What a rented machine costs, at most: pure arithmetic on prices and limits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from burst.errors import NothingFits

DEFAULT_HOURS = 6.0
"""The limit of a run that names none."""
MINIMUM_RUN_S = 600
SETUP_S = 1800
EXPORT_S = 3600
STORE_S = 600
IDLE_MINUTES = 15
"""How long a machine waits for a fetch after its job ended, before it deletes itself."""
START_S = 600
"""What a machine may be billed for before its job begins: it boots and SkyPilot sets itself up."""
KILL_S = 60
"""What each limit allows a process to end by itself before it is killed."""


@dataclass(frozen=True)
class Offer:
    """One kind of machine in one priced region, such as ``slurm/loopback`` with ``A100:1``.

    ``autodown``: the machine can delete itself; where it cannot, only burst or its owner can.
    """

    infra: str
    accelerators: str
    hourly_usd: float
    autodown: bool


@dataclass(frozen=True)
class Limits:
    """What holds without us: set-up and run each end by themselves, and an idle machine deletes itself."""

    setup_s: int
    run_s: int
    idle_minutes: int
    hourly_usd: float
    export_s: int = 0
    store_s: int = 0

    @property
    def overhead_s(self) -> int:
        """All that a run may take beside training. Each job that ends starts the idle time anew, and a machine that goes
        may store its adapter once more.
        """
        jobs = 2 if self.export_s else 1
        limits = [self.setup_s, self.export_s, self.store_s, self.store_s]
        return START_S + sum(limit + KILL_S for limit in limits if limit) + KILL_S + jobs * 60 * self.idle_minutes

    @property
    def worst_s(self) -> int:
        return self.overhead_s + self.run_s

    @property
    def worst_usd(self) -> float:
        """The most that a run can cost: every limit used up, at the dearest price that may be launched."""
        return self.worst_s / 3600 * self.hourly_usd


def limits(
    offers: list[Offer],
    max_cost_usd: float | None,
    max_hours: float | None,
    *,
    exports: bool = False,
    stores: bool = False,
) -> Limits:
    """The time limits that keep a run within its cost and its hours. Raises ``NothingFits`` where no useful time is left.

    ``exports``: a second job follows on the machine. ``stores``: the machine saves the adapter somewhere itself.
    """
    hourly = max(offer.hourly_usd for offer in offers)
    without = Limits(SETUP_S, 0, IDLE_MINUTES, hourly, EXPORT_S if exports else 0, STORE_S if stores else 0)
    overhead_s = without.overhead_s
    run_s = (max_hours if max_hours is not None else DEFAULT_HOURS) * 3600
    if max_cost_usd is not None and hourly > 0:
        run_s = min(run_s, max_cost_usd / hourly * 3600 - overhead_s)
    if run_s < MINIMUM_RUN_S:
        raise NothingFits(
            f"{run_s / 60:.0f} minutes of training are left within the limits: set-up and fetch may take "
            f"{overhead_s / 60:.0f} minutes at ${hourly:.2f} an hour",
            f"allow more: --max-cost {(overhead_s + 3600) / 3600 * hourly:.2f} gives an hour",
        )
    return dataclasses.replace(without, run_s=int(run_s))


def chosen(offers: list[Offer], *, without_autodown: bool) -> list[Offer]:
    """The offers that may be launched, cheapest first. Raises ``NothingFits``.

    Those that delete themselves and those that do not never mix: SkyPilot wants one autostop for all of a task's resources.
    """
    fitting = sorted(offers, key=lambda offer: offer.hourly_usd)
    if not fitting:
        raise NothingFits("SkyPilot reaches no machine with such a GPU", "see: sky check; then widen cloud.gpus")
    safe = [offer for offer in fitting if offer.autodown or without_autodown]
    if not safe:
        places = ", ".join(sorted({offer.infra for offer in fitting}))
        raise NothingFits(
            f"{places} cannot delete an idle machine: if this computer dies, it bills until someone ends it",
            "choose another cloud.infra, or accept that with cloud.without_autodown: true",
        )
    return [offer for offer in safe if offer.autodown == safe[0].autodown]


def cost_usd(hourly_usd: float, started: float, ended: float) -> float:
    """Unix seconds to dollars, as providers bill: by the second."""
    return max(0.0, ended - started) / 3600 * hourly_usd
