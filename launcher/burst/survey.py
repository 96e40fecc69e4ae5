"""What a plan is made from: the model's facts, the data's lengths, this machine, and what can be rented. I/O only.

Whatever cannot be had in time is said in ``Survey.unknown`` and stands in for by something worse, never by a guess that
looks like knowledge. Nothing here waits for a network longer than ``NETWORK_S``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst import architecture, cards, clouds, gpus, lengths, models, paths, prices, shipped
from burst.duration import Surroundings
from burst.errors import BurstError, InvalidInput
from burst.estimate import Job
from burst.measures import Training
from burst.plan import Machine, Wishes
from burst.waiting import within
from burst_payload import tiny

if TYPE_CHECKING:
    from burst.quotes import Quote
    from burst.spec import Spec

NETWORK_S = 1.5


@dataclass
class Survey:
    """Everything that ``plan.decide`` takes."""

    job: Job
    machines: list[Machine]
    wishes: Wishes
    unknown: list[str] = field(default_factory=list)


def survey(spec: Spec, folder: Path, wishes: Wishes, *, network: bool = True, rented: bool = True) -> Survey:
    """Look at the spec's model and data, at this machine, and (``rented``) at what can be rented."""
    unknown: list[str] = []
    question = clouds.ask() if network and rented else None
    config = model_config(spec, folder, unknown, network=network)
    job = make_job(spec, folder, architecture.read(config), unknown)
    found = Survey(job, local_machines(spec), wishes, unknown)
    if rented:
        found.machines += cloud_machines(spec, unknown, question.answer() if question else None)
    return found


def add_rented(found: Survey, spec: Spec) -> None:
    """Look at what can be rented, too."""
    found.machines += cloud_machines(spec, found.unknown, clouds.ask().answer())


def wishes(spec: Spec, where: str | None, max_cost_usd: float | None, max_hours: float | None) -> Wishes:
    """What the spec and the options of a command ask for together; an option wins."""
    return Wishes(
        where=where or spec.where,  # type: ignore[arg-type]  # the options are the three words
        prefer=spec.plan.prefer,
        deadline_hours=spec.plan.deadline_hours,
        slower_by=spec.plan.slower_by,
        max_cost_usd=spec.cloud.max_cost_usd if max_cost_usd is None else max_cost_usd,
        max_hours=spec.cloud.max_hours if max_hours is None else max_hours,
        training=Training(
            optimizer=spec.train.optimizer,
            gradient_checkpointing=spec.train.gradient_checkpointing,
            asked=None if spec.train.measures is None else tuple(spec.train.measures),
            dropout=spec.adapter.dropout > 0,
        ),
    )


# --- the model -------------------------------------------------------------------------------------------------------


def model_config(spec: Spec, folder: Path, unknown: list[str], *, network: bool = True) -> dict[str, Any]:
    """The model's ``config.json``: of the local folder, the hub's cache, the built-in table, or the hub, in this order.

    Raises ``InvalidInput`` where a local folder has none and ``BurstError`` where nothing knows the model.
    """
    if spec.model_kind == "builtin":
        return dict(tiny.CONFIG)
    if spec.model_kind == "local":
        path = models.resolve(spec, folder).folder / "config.json"
        return _read_config(path)
    here = cached(spec.model, spec.revision)
    if here is not None:
        return _read_config(here)
    known = known_config(spec.model)
    if known is not None:
        unknown.append(f"the config of {spec.model} is from burst's table, not from the hub")
        return known
    if network:
        try:
            return _read_config(within(NETWORK_S, lambda: _download(spec.model, spec.revision)))
        except (TimeoutError, OSError, ImportError, ValueError):
            pass
    raise BurstError(
        f"nothing is known of the model {spec.model}: it is not in burst's table, not cached, and the hub does not answer",
        "check the network, or give a local folder as model; burst train --force trains without a plan",
    )


def known_config(name: str) -> dict[str, Any] | None:
    """The built-in config of a model, or of the one that it is a tuned variant of."""
    table: dict[str, dict[str, Any]] = shipped.read("models.json")["models"]
    lower = {key.lower(): value for key, value in table.items()}
    wanted = name.lower()
    if wanted in lower:
        return lower[wanted]
    stem = re.sub(r"-(instruct|it|pt|chat|base|thinking|hf)(-\d{4})?(-unquantized)?$", "", wanted)
    stems = {re.sub(r"-(instruct|base)(-\d{4})?$", "", key): value for key, value in lower.items()}
    return lower.get(stem) or stems.get(stem)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}", "give the folder as save_pretrained wrote it") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{path} is no JSON object", "give the folder as save_pretrained wrote it")
    return value


def cached(name: str, revision: str | None) -> Path | None:
    """The hub's cached ``config.json``, by the cache's layout: importing the library costs a third of a second."""
    home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    folder = Path(home).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text().strip()
    except OSError:
        commit = revision or ""
    path = folder / "snapshots" / commit / "config.json"
    return path if commit and path.is_file() else None


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, "config.json", revision=revision, etag_timeout=NETWORK_S))


# --- the data --------------------------------------------------------------------------------------------------------


def make_job(spec: Spec, folder: Path, model: architecture.Architecture, unknown: list[str]) -> Job:
    """The job of a spec: its lengths counted as training counts them, or estimated from characters.

    Raises ``InvalidInput`` where the data cannot be trained on.
    """
    found = lengths.measure(spec, folder, unknown, NETWORK_S)
    train, adapter = spec.train, spec.adapter
    has_eval = found.eval_tokens > 0
    steps = Job(
        model, (), 1, 1, 1, 1, 1, found.rows, _epochs(spec), train.max_steps, train.batch, train.effective_batch
    ).steps
    evaluations = (1 + (steps // train.eval_steps if train.eval_steps else 0)) if has_eval else 0
    return Job(
        architecture=model,
        targets=tuple(adapter.targets),
        rank=adapter.rank,
        longest=found.longest,
        scored=found.longest_scored,
        tokens=found.tokens,
        squared=found.squared,
        rows=found.rows,
        epochs=_epochs(spec),
        max_steps=train.max_steps,
        batch=train.batch,
        effective_batch=train.effective_batch,
        last_layers=adapter.last_layers,
        dora=adapter.dora,
        quantization=spec.quantization,
        eval_tokens=found.eval_tokens,
        evaluations=evaluations,
        probe_tokens=2 * spec.probes.rows * spec.probes.max_new_tokens,
        scored_share=min(1.0, found.scored / max(1, found.tokens)),
    )


def _epochs(spec: Spec) -> float:
    return spec.train.epochs if spec.train.epochs is not None else 3.0


# --- machines --------------------------------------------------------------------------------------------------------


def local_machines(spec: Spec) -> list[Machine]:
    """This machine's GPUs, each as it is free now; without any, its CPU."""
    import psutil

    ram = int(psutil.virtual_memory().available)
    disk = _free_disk()
    around = Surroundings(
        rented=False,
        downloads=spec.model_kind == "hub" and _weights_cached(spec) is False,
        environment=not _environment_exists(),
        wsl="microsoft" in platform.release().lower(),
        cores=psutil.cpu_count(logical=False) or 1,
    )
    found = gpus.detect()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    usable = [gpu for gpu in found.gpus if gpus.choose(gpus.LocalGpus((gpu,)), visible) or visible is None]
    machines = []
    for gpu in usable:
        remarks = (f"in use by {', '.join(gpu.processes)}",) if gpu.processes else ()
        card = cards.of_device(gpu.name, gpu.capability, gpu.total_bytes)
        machines.append(
            Machine("local", gpu.name.removeprefix("NVIDIA "), card, around, gpu.free_bytes, ram, disk, remarks=remarks)
        )
    if not machines:
        remarks = (found.problem,) if found.problem else ()
        machines.append(Machine("local", "CPU", None, around, ram, ram, disk, remarks=remarks))
    return machines


def cloud_machines(spec: Spec, unknown: list[str], enabled: tuple[str, ...] | None) -> list[Machine]:
    """One machine a kind of GPU that can be rented, each with its cheapest known price."""
    quotes, problems = prices.quotes(spec.cloud.prices, enabled)
    unknown += problems
    if enabled is None:
        unknown.append("which clouds SkyPilot reaches is not known yet: prices are of all clouds")
    if spec.cloud.infra is not None:
        wanted = tuple(place.lower() for place in spec.cloud.infra)
        quotes = [quote for quote in quotes if quote.infra.lower().startswith(wanted)]
    cheapest: dict[str, Quote] = {}
    for quote in quotes:
        best = cheapest.get(quote.gpu)
        if best is None or _rank(quote) < _rank(best):
            cheapest[quote.gpu] = quote
    count = spec.cloud.count
    several = (f"{count} GPUs share each step: counted as {count} times as fast and dear as one",) if count > 1 else ()
    machines = []
    for name in dict.fromkeys([*(gpu.partition(":")[0] for gpu in spec.cloud.gpus), *cheapest]):
        card = cards.find(name)
        if not isinstance(card, cards.Card):
            why = card.why if card is not None else "it is not in burst's table of cards"
            unknown.append(f"{name}: {why}")
            continue
        found = cheapest.get(name)
        blocked = []
        if name not in {gpu.partition(":")[0] for gpu in spec.cloud.gpus}:
            blocked.append("not in cloud.gpus")
        if spec.model_kind == "local":
            blocked.append("a local model does not travel to a rented machine")
        if found is not None and found.enabled is False:
            blocked.append(f"SkyPilot does not reach {found.infra.partition('/')[0]} here: sky check")
        if found is not None and not found.autodown and not spec.cloud.without_autodown:
            blocked.append("it cannot delete itself when idle: accept that with cloud.without_autodown: true")
        if found is not None and found.hourly_usd is not None:
            found = dataclasses.replace(found, hourly_usd=found.hourly_usd * count)
        around = Surroundings(
            rented=True, downloads=spec.model_kind == "hub", environment=spec.cloud.python is None, faster=count
        )
        machines.append(
            Machine(
                "cloud",
                name,
                card,
                around,
                card.memory_bytes,
                quote=found,
                blocked=tuple(blocked),
                remarks=several,
            )
        )
    return machines


def _rank(quote: Quote) -> tuple[bool, float]:
    return quote.enabled is False, quote.hourly_usd or 1e9


def _free_disk() -> int | None:
    import shutil

    folder = paths.home()
    while not folder.exists():
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _weights_cached(spec: Spec) -> bool:
    config = cached(spec.model, spec.revision)
    return config is not None and any(config.parent.glob("*.safetensors"))


def _environment_exists() -> bool:
    from burst import interpreter

    return bool(os.environ.get("BURST_PYTHON")) or interpreter.cached_folder().is_dir()
