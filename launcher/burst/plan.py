"""Where a job should run, and why: estimates and prices in, a decision with reasons out. Pure.

The rule, in order: what was asked for; this machine, when it can do it and is neither past the deadline nor
unreasonably slower than what can be rented; else the cheapest machine that fits, can be launched and keeps the budget.
Every candidate that was not taken carries its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from burst import architecture, duration, estimate, measures, offers
from burst.errors import NothingFits
from burst.measures import Training
from burst_payload.stop import Stop

if TYPE_CHECKING:
    from burst.cards import Card
    from burst.duration import Span, Surroundings
    from burst.estimate import Job, Memory
    from burst.offers import Limits
    from burst.quotes import Quote

PREFERENCES = ("auto", "local", "cloud", "cheap", "fast")
SLOWER_BY = 10.0
PATIENCE_S = 3600.0
"""A local run that is done within this is never called unreasonably slow."""


@dataclass(frozen=True)
class Money:
    """Dollars for the three durations of a ``Span``."""

    low_usd: float
    expected_usd: float
    high_usd: float


FREE = Money(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Machine:
    """A place that could run the job. ``card`` None is the CPU; its memory is what is free now.

    ``blocked``: why it cannot be taken whatever fits; ``remarks``: what a person should know of it.
    """

    where: Literal["local", "cloud"]
    name: str
    card: Card | None
    around: Surroundings
    memory_bytes: int
    ram_bytes: int | None = None
    disk_bytes: int | None = None
    quote: Quote | None = None
    blocked: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wishes:
    """What the user asked for. ``where``: a fixed place, or ``auto``."""

    where: Literal["auto", "local", "cloud"] = "auto"
    prefer: str = "auto"
    deadline_hours: float | None = None
    slower_by: float = SLOWER_BY
    max_cost_usd: float | None = None
    max_hours: float | None = None
    measures: frozenset[str] | None = None
    """The measures to assume; None: what this version's payload does with the spec's settings."""
    training: Training = field(default_factory=Training)


@dataclass(frozen=True)
class Candidate:
    """One machine, weighed. ``extra``: measures that cost time and are taken because it does not fit without. ``cost`` is None where the price is not known; on this machine it is zero."""

    machine: Machine
    measures: tuple[str, ...]
    extra: tuple[str, ...]
    memory: Memory
    phases: dict[str, Span]
    fits: bool
    why_not: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    cost: Money | None = None
    limits: Limits | None = None
    disk_bytes: int = 0
    able: bool = True
    """Whether it could do the job, whatever its price, access, budget and deadline are."""

    @property
    def possible(self) -> bool:
        return not self.why_not

    @property
    def total(self) -> Span:
        return duration.total(self.phases)


@dataclass(frozen=True)
class Plan:
    """The decision, and everything that it was made from. ``chosen`` is None where nothing can run the job."""

    job: Job
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    reasons: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    learned: tuple[str, ...] = field(default=())


def decide(job: Job, machines: list[Machine], wishes: Wishes, unknown: tuple[str, ...] = ()) -> Plan:
    """Weigh every machine and choose one."""
    weighed = [weigh(job, machine, wishes) for machine in machines]
    weighed.sort(key=_order)
    chosen, reasons = _choose(weighed, wishes)
    final = tuple(candidate if candidate.why_not else _passed_over(candidate, chosen) for candidate in weighed)
    return Plan(job, final, chosen, tuple(reasons), unknown)


def weigh(job: Job, machine: Machine, wishes: Wishes) -> Candidate:
    """Memory, time, cost and every reason against one machine."""
    why_not = list(machine.blocked)
    try:
        names, extra = _measures(job, machine, wishes)
    except Stop as error:
        names, extra = measures.taken(replace(wishes.training, asked=None), on_gpu=machine.card is not None), ()
        why_not.append(error.what)
    how = measures.settings(names)
    memory = estimate.memory(job, machine.card, how)
    fits = memory.needed_bytes <= machine.memory_bytes
    why_not += incapable(job, machine, names)
    changes: list[str] = []
    if not fits:
        free = "free" if machine.where == "local" else "there"
        why_not.append(f"needs {_gib(memory.needed_bytes)}, {_gib(machine.memory_bytes)} {free}")
        changes = nearest_changes(job, machine, names)
    if machine.card is not None and machine.ram_bytes is not None and memory.host_bytes > machine.ram_bytes:
        why_not.append(f"needs {_gib(memory.host_bytes)} of main memory, {_gib(machine.ram_bytes)} free")
    disk = disk_bytes(job, machine)
    if machine.disk_bytes is not None and disk > machine.disk_bytes:
        why_not.append(f"needs {_gib(disk)} on disk, {_gib(machine.disk_bytes)} free")
    able = len(why_not) == len(machine.blocked)
    phases = duration.phases(job, machine.card, how, machine.around)
    total = duration.total(phases)
    cost, limit = _cost(machine, total, wishes, why_not)
    if wishes.deadline_hours is not None and total.expected_s > wishes.deadline_hours * 3600:
        why_not.append(f"takes {total.expected_s / 3600:.1f} h, the deadline is {wishes.deadline_hours:g} h")
    return Candidate(
        machine,
        tuple(sorted(names)),
        extra,
        memory,
        phases,
        fits,
        tuple(why_not),
        warnings(job, machine),
        tuple(changes),
        cost,
        limit,
        disk,
        able,
    )


def _measures(job: Job, machine: Machine, wishes: Wishes) -> tuple[frozenset[str], tuple[str, ...]]:
    """The cheapest set of measures with which the job fits (else the usual one), and what of it costs time."""
    if wishes.measures is not None:
        return wishes.measures, ()
    layers = len(job.architecture.layers)
    training = replace(
        wishes.training,
        first_trained_layer=layers - min(layers, job.last_layers or layers),
        longest_tokens=job.batch * job.longest,
        dora=job.dora,
        gated_mlp=not job.architecture.moe,
    )
    usual: frozenset[str] | None = None
    for names in measures.ladder(training, on_gpu=machine.card is not None):
        usual = names if usual is None else usual
        if estimate.memory(job, machine.card, measures.settings(names)).needed_bytes <= machine.memory_bytes:
            return names, tuple(sorted(names - usual))
    assert usual is not None
    return usual, ()


def incapable(job: Job, machine: Machine, names: frozenset[str]) -> list[str]:
    """Why a machine cannot do the job at all, whatever its memory."""
    found, card, model = [], machine.card, job.architecture
    if card is not None and card.wheel is None:
        found.append(f"no torch build has kernels for compute capability {card.capability[0]}.{card.capability[1]}")
    missing = architecture.missing_targets(model, list(job.targets))
    if missing:
        found.append(f"the model has no layer called {', '.join(missing)}: {', '.join(model.linear_names())}")
    if model.moe and job.quantization == "nf4" and card is not None and "experts_4bit" not in names:
        found.append("experts stay in 16 bits, and the payload refuses that under NF4: set quantization: none")
    if model.moe and job.dora and any(pair.copies > 1 for pair in job.pairs()):
        found.append("PEFT has no DoRA for fused experts: set adapter.dora: false")
    return found


def warnings(job: Job, machine: Machine) -> tuple[str, ...]:
    """Traps of a card with this model, which cost time or quality but do not forbid it."""
    found, card, model = list(machine.remarks), machine.card, job.architecture
    if card is None:
        found.append("no GPU: trains on the CPU in full precision")
        return tuple(found)
    if card.wheel not in ("default", None):
        found.append(f"needs another wheel: burst env --torch-backend {card.wheel}")
    if not card.known:
        found.append("the card is not in the table: speed is a guess from a small card")
    if card.turing_or_older:
        if model.model_type.startswith("gemma3"):
            found.append("no bf16, and Gemma 3 overflows in fp16: computes in fp32, slowly, with twice the memory")
        else:
            found.append("no bf16 below compute capability 8.0: fp16 with fp32 adapters")
        if model.moe:
            found.append("Turing or older with mixture of experts: 15-30 minutes of compilation first, packing hangs")
    if model.linear_attention:
        found.append("linear attention without its kernels is slow and keeps much memory")
        if job.quantization == "nf4":
            found.append("the makers advise against 4-bit training of models with linear attention")
    if machine.around.wsl:
        found.append("WSL: free memory is shared with Windows, and speed varies widely")
    if card.unified:
        found.append("GPU and CPU share this memory")
    return tuple(found)


def nearest_changes(job: Job, machine: Machine, names: frozenset[str]) -> list[str]:
    """What would make the job fit on a card that it does not fit on."""
    if machine.card is None:
        return []
    card = replace(machine.card, memory_bytes=machine.memory_bytes)
    how, found = measures.settings(names), []
    if job.quantization == "none" and not job.architecture.moe:
        smaller = replace(job, quantization="nf4")
        if estimate.fits(smaller, card, how):
            found.append("quantization: nf4")
    if "checkpointing" not in names and estimate.fits(job, card, measures.settings(names | {"checkpointing"})):
        found.append("train.gradient_checkpointing: on")
    if "optimizer_paged" not in names:
        paged = names | {"optimizer_8bit", "optimizer_paged"}
        if estimate.fits(job, card, measures.settings(paged)):
            found.append("train.optimizer: paged_adamw_8bit")
    if job.batch > 1 and estimate.fits(replace(job, batch=1), card, how):
        found.append("train.batch: 1")
    for key, words in (
        ("longest", "data.max_length"),
        ("rank", "adapter.rank"),
        ("last_layers", "adapter.last_layers"),
    ):
        value = estimate.largest(job, card, how, key)  # type: ignore[arg-type]  # the three literals
        if value is not None:
            found.append(f"{words}: {value}")
    return found


def disk_bytes(job: Job, machine: Machine) -> int:
    """What a run writes: the model where it is downloaded, the environment where it is made, checkpoints, two adapters."""
    adapter = estimate.adapter_file_bytes(job, machine.card)
    model = estimate.model_file_bytes(job.architecture) if machine.around.downloads else 0
    environment = (6 << 30) if machine.around.environment else 0
    return model + environment + estimate.checkpoint_bytes(job, machine.card) + 2 * adapter


def _cost(machine: Machine, total: Span, wishes: Wishes, why_not: list[str]) -> tuple[Money | None, Limits | None]:
    """Expected cost, and the limits that keep it within the budget."""
    if machine.where == "local":
        return FREE, None
    hourly = machine.quote.hourly_usd if machine.quote else None
    if hourly is None:
        why_not.append("its price is not known")
        return None, None
    cost = Money(*(seconds / 3600 * hourly for seconds in (total.low_s, total.expected_s, total.high_s)))
    made = offers.Offer(machine.quote.infra if machine.quote else "", machine.name, hourly, autodown=True)
    try:
        limit = offers.limits([made], wishes.max_cost_usd, wishes.max_hours)
    except NothingFits as error:
        why_not.append(error.what)
        return cost, None
    if limit.run_s < total.expected_s - duration.PROVISION.expected_s:
        allowed = "within the budget" if wishes.max_cost_usd is not None else "allowed (--max-hours)"
        why_not.append(f"needs about {total.expected_s / 3600:.1f} h, {limit.run_s / 3600:.1f} h are {allowed}")
    return cost, limit


def _order(candidate: Candidate) -> tuple[bool, float, float]:
    """Cheapest first; what cannot run it last."""
    cost = candidate.cost.expected_usd if candidate.cost else float("inf")
    return (not candidate.possible, cost, candidate.total.expected_s)


def _choose(weighed: list[Candidate], wishes: Wishes) -> tuple[Candidate | None, list[str]]:
    possible = [candidate for candidate in weighed if candidate.possible]
    local = min((c for c in possible if c.machine.where == "local"), key=lambda c: c.total.expected_s, default=None)
    rented = [c for c in possible if c.machine.where == "cloud"]
    cheapest, fastest = _first(rented, _order), _first(rented, lambda c: c.total.expected_s)
    if wishes.where == "local" or (wishes.prefer == "local" and local is not None):
        return (local, ["this machine was asked for"]) if local else (None, _refusal(weighed, "local"))
    if wishes.where == "cloud" or (wishes.prefer == "cloud" and cheapest is not None):
        return (cheapest, ["cheapest that fits"]) if cheapest else (None, _refusal(weighed, "cloud"))
    if wishes.prefer == "fast":
        best = _first(possible, lambda c: c.total.expected_s)
        return (best, ["soonest done"]) if best else (None, _refusal(weighed, "auto"))
    if local is not None:
        if cheapest is None or fastest is None or wishes.prefer == "cheap":
            return local, ["fits here, and costs nothing"]
        slow = local.total.expected_s > PATIENCE_S
        slow = slow and local.total.expected_s > wishes.slower_by * fastest.total.expected_s
        if not slow:
            return local, ["fits here, and is not unreasonably slower than a rented card"]
        times = local.total.expected_s / fastest.total.expected_s
        late = f"this machine would take {_hours(local.total.expected_s)}, {times:.0f} times as long as"
        return cheapest, [f"{late} {fastest.machine.name} (plan.slower_by: {wishes.slower_by:g})"]
    if cheapest is not None:
        here = [f"here: {c.why_not[0]}" for c in weighed if c.machine.where == "local" and c.why_not]
        return cheapest, ["cheapest that fits", *here]
    return None, _refusal(weighed, "auto")


def _refusal(weighed: list[Candidate], where: str) -> list[str]:
    """Why nothing can run it, and the nearest change that would work."""
    meant = [c for c in weighed if where in ("auto", c.machine.where)]
    reasons = [f"{c.machine.name}: {c.why_not[0]}" for c in meant if c.why_not][:6]
    changes = next((c.changes for c in meant if c.changes), ())
    if not meant:
        reasons = ["no machine of that kind is known here"]
    return reasons + ([f"would fit on {_with_changes(meant)}: {' or '.join(changes)}"] if changes else [])


def _with_changes(meant: list[Candidate]) -> str:
    return next(c.machine.name for c in meant if c.changes)


def _passed_over(candidate: Candidate, chosen: Candidate | None) -> Candidate:
    """A candidate that could run it and was not taken, with the reason."""
    if chosen is None or candidate is chosen:
        return candidate
    if candidate.machine.where == "local":
        reason = "slower than what was chosen"
    elif chosen.machine.where == "local":
        reason = "this machine can do it for nothing"
    else:
        mine, best = candidate.cost, chosen.cost
        dearer = mine is not None and best is not None and mine.expected_usd >= best.expected_usd
        reason = "dearer" if dearer else "slower"
    return replace(candidate, warnings=(*candidate.warnings, f"not taken: {reason}"))


def _first(items: list[Candidate], key: Any) -> Candidate | None:
    return min(items, key=key, default=None)


def _gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.0f} min"


def to_json(plan: Plan) -> dict[str, Any]:
    """The whole plan for machines. Sizes in bytes, times in seconds, money in dollars."""
    job, chosen = plan.job, plan.chosen
    return {
        "decision": {
            "where": chosen.machine.where if chosen else None,
            "gpu": chosen.machine.name if chosen else None,
            "reasons": list(plan.reasons),
        },
        "candidates": [_candidate_json(candidate, taken=candidate is chosen) for candidate in plan.candidates],
        "tokens": {
            "per_epoch": job.tokens,
            "total": round(job.tokens * job.epochs_run),
            "longest_row": job.longest,
            "rows": job.rows,
        },
        "optimizer_steps": job.steps,
        "trainable_parameters": job.trainable(),
        "parameters": {
            "total": job.architecture.parameters,
            "active": job.architecture.active,
            "quantizable": job.architecture.quantizable,
            "unquantizable": job.architecture.parameters - job.architecture.quantizable,
        },
        "adapter_bytes": estimate.adapter_file_bytes(job, chosen.machine.card if chosen else None),
        "unknown": list(plan.unknown),
        "learned": list(plan.learned),
    }


def _candidate_json(candidate: Candidate, *, taken: bool) -> dict[str, Any]:
    machine, quote = candidate.machine, candidate.machine.quote
    cost = candidate.cost
    return {
        "where": machine.where,
        "gpu": machine.name,
        "chosen": taken,
        "fits": candidate.fits,
        "possible": candidate.possible,
        "why_not": list(candidate.why_not),
        "warnings": list(candidate.warnings),
        "changes_that_would_fit": list(candidate.changes),
        "measures": list(candidate.measures),
        "measures_that_cost_time": list(candidate.extra),
        "memory": {
            "peak_bytes": candidate.memory.peak_bytes,
            "needed_bytes": candidate.memory.needed_bytes,
            "available_bytes": machine.memory_bytes,
            "host_bytes": candidate.memory.host_bytes,
            "components": {**candidate.memory.components, **candidate.memory.outside},
        },
        "phases_s": {name: [span.low_s, span.expected_s, span.high_s] for name, span in candidate.phases.items()},
        "total_s": [candidate.total.low_s, candidate.total.expected_s, candidate.total.high_s],
        "disk_bytes": candidate.disk_bytes,
        "cost_usd": [cost.low_usd, cost.expected_usd, cost.high_usd] if cost else None,
        "worst_usd": 0.0 if machine.where == "local" else candidate.limits.worst_usd if candidate.limits else None,
        "offer": None
        if quote is None
        else {
            "infra": quote.infra,
            "hourly_usd": quote.hourly_usd,
            "spot_usd": quote.spot_usd,
            "source": quote.source,
            "as_of": quote.as_of,
            "enabled": quote.enabled,
        },
    }
