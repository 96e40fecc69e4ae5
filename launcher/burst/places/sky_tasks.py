"""What SkyPilot is asked for: machines with prices, and the tasks of ``sky/*.yaml`` filled in.

Paths, limits and secrets travel as variables, never as shell text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from burst import cards, paths
from burst.errors import InvalidInput
from burst.offers import Offer
from burst.places.sky_client import client, enabled

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from burst.offers import Limits
    from burst.spec import Cloud

HOOK_LIMIT_S = 600
"""How long a machine that goes may take to save its adapter: it is billed meanwhile, and 500 MB take a minute or two."""


def offers(cloud: Cloud) -> list[Offer]:
    """Every machine with a GPU of ``cloud.gpus`` that the user's SkyPilot reaches, one offer a priced region."""
    return priced(cloud, enabled())


def priced(cloud: Cloud, places: Iterable[str]) -> list[Offer]:
    """The offers of ``places`` by SkyPilot's own catalogs. ``cloud.infra`` narrows them."""
    sky = client()
    from sky.clouds import CloudImplementationFeatures
    from sky.utils import resources_utils

    allowed = set(places)
    found = []
    for infra in cloud.infra or sorted(allowed):
        for gpu in cloud.gpus:
            wanted = sky.Resources(infra=infra, accelerators=gpu if ":" in gpu else f"{gpu}:1")
            if str(wanted.cloud).lower() not in allowed:
                continue
            feasible = wanted.cloud.get_feasible_launchable_resources(wanted, num_nodes=1).resources_list
            for launchable in feasible[:1]:
                for resources in resources_utils.make_launchables_for_valid_region_zones(launchable):
                    features = {CloudImplementationFeatures.AUTODOWN}
                    if (
                        str(resources.cloud) == "Slurm"
                    ):  # names only autostop; its autodown does not fire (skypilot#9815)
                        features.add(CloudImplementationFeatures.AUTOSTOP)
                    found.append(
                        Offer(
                            infra=f"{str(resources.cloud).lower()}/{resources.region}",
                            accelerators=",".join(f"{name}:{count}" for name, count in wanted.accelerators.items()),
                            hourly_usd=float(resources.get_cost(3600)),
                            autodown=_supports(resources, features),
                        )
                    )
    return found


def _supports(resources: Any, features: set[Any]) -> bool:
    try:
        resources.cloud.check_features_are_supported(resources, features)
    except Exception:  # NotSupportedError, whose module moved between versions
        return False
    return True


@dataclass(frozen=True)
class Order:
    """What may be launched.

    Args:
        archive: the bundle as one file.
        chosen: the machines that may be launched, in this order; their dearest price is the quote.
        limit: what ends set-up, run and idle machine without us.
        cloud: the spec's section.
        secrets: variables that go through SkyPilot's secrets and into no file of burst.
    """

    archive: Path
    chosen: list[Offer]
    limit: Limits
    cloud: Cloud
    secrets: dict[str, str] = field(default_factory=dict, repr=False)


def train_task(order: Order, folder: str, store: str | None = None) -> Any:
    """``sky/train.yaml`` filled in.

    ``folder`` is where the bundle goes, relative to the home folder there; ``store`` is where the machine saves the sealed
    adapter by itself.
    """
    sky = client()
    task = sky.Task.from_yaml(str(paths.sky_templates() / "train.yaml"))
    task.set_file_mounts({f"~/{folder}/job.tar.gz": str(order.archive)})
    task.update_envs(
        {
            "BURST_FOLDER": folder,
            "BURST_PYTHON": order.cloud.python or "",
            "BURST_STORE": store or "",
            "BURST_GPUS": str(order.cloud.count),
            "BURST_CAPABILITY": promised_capability(order.chosen),
            "BURST_CANARY": os.environ.get("BURST_CANARY", ""),
            "BURST_SETUP_LIMIT_S": str(order.limit.setup_s),
            "BURST_RUN_LIMIT_S": str(order.limit.run_s),
            "BURST_STORE_LIMIT_S": str(order.limit.store_s),
        }
    )
    if order.secrets:
        task.update_secrets(order.secrets)
    autostop = {"idle_minutes": order.limit.idle_minutes, "down": True, "wait_for": "jobs"}
    task.set_resources(
        [
            sky.Resources(
                infra=offer.infra,
                accelerators=offer.accelerators,
                autostop=autostop if offer.autodown else None,
                hooks=_hooks(folder) if store else None,
            )
            for offer in order.chosen
        ]
    )
    return task


def promised_capability(offers: Iterable[Offer]) -> str:
    """The least compute capability among what may be launched, such as ``8.0``; ``0.0`` where a card is not in the table."""
    found = [cards.find(offer.accelerators) for offer in offers]
    known = [card.capability for card in found if isinstance(card, cards.Card)]
    return "{}.{}".format(*min(known)) if found and len(known) == len(found) else "0.0"


def export_task(folder: str, limit_s: int, cloud: Cloud) -> Any:
    """``sky/export.yaml`` filled in, for a machine that has trained in ``folder``."""
    sky = client()
    task = sky.Task.from_yaml(str(paths.sky_templates() / "export.yaml"))
    task.update_envs({"BURST_FOLDER": folder, "BURST_PYTHON": cloud.python or "", "BURST_EXPORT_LIMIT_S": str(limit_s)})
    return task


def _hooks(folder: str) -> list[dict[str, Any]]:
    """A machine that goes saves its adapter first, if nobody did. Hooks get no variables: the folder's name needs no quoting."""
    return [{"run": f"bash ~/{folder}/job/save.sh", "events": ["down", "preemption"], "timeout": HOOK_LIMIT_S}]


def secrets(cloud: Cloud, *, hub: bool) -> dict[str, str]:
    """What the run needs to know and no file may hold: the hub's token, and the variables of ``cloud.secrets``.

    Raises ``InvalidInput`` naming every one of them that is not set here.
    """
    from huggingface_hub import get_token

    missing = [name for name in cloud.secrets if not os.environ.get(name)]
    if missing:
        raise InvalidInput(f"cloud.secrets: not set here: {', '.join(missing)}", "export it, or take it from the list")
    found = {name: os.environ[name] for name in cloud.secrets}
    token = get_token()  # from the environment, or from where the hub's login keeps it
    if token and (hub or (cloud.store or "").startswith("hf://")):
        found.setdefault("HF_TOKEN", token)
    return found
