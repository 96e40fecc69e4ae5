"""How long a job takes on a card, by phase, as a range. Pure. The formulas and their calibration: ``docs/estimates.md``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from burst import estimate

if TYPE_CHECKING:
    from burst.cards import Card
    from burst.estimate import Job
    from burst.measures import Settings


@dataclass(frozen=True)
class Span:
    """Seconds: if all goes well, as expected, if much goes badly."""

    low_s: float
    expected_s: float
    high_s: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low_s + other.low_s, self.expected_s + other.expected_s, self.high_s + other.high_s)

    def times(self, factor: float) -> Span:
        return Span(self.low_s * factor, self.expected_s * factor, self.high_s * factor)


NOTHING = Span(0.0, 0.0, 0.0)
UTILIZATION = (0.50, 0.42, 0.20)
"""Share of the dense 16-bit peak that the matrix products reach, once the launch overhead is counted apart."""
LAYER_S = {"dense": (0.008, 0.015, 0.030), "moe": (0.012, 0.024, 0.060)}
"""Overhead of one layer in one pass (forward, recompute, backward): kernel launches and Python."""
LINEAR_TOKEN_S = (10e-6, 25e-6, 40e-6)
"""One token in one linear-attention layer without its kernels, forward, recompute and backward."""
WSL_HIGH = 2.0
CPU_FLOPS = (60e9, 20e9, 7e9)
"""Per core, in float32."""
IMPORTS = Span(10.0, 20.0, 40.0)
PROVISION = Span(90.0, 180.0, 600.0)
ENVIRONMENT = Span(90.0, 240.0, 900.0)
FIRST_COMPILE = Span(900.0, 1350.0, 1800.0)
DOWNLOAD_BYTES_S = {"cloud": (400e6, 150e6, 30e6), "local": (100e6, 25e6, 4e6)}
LOAD_BYTES_S = (2e9, 600e6, 110e6)
FETCH_BYTES_S = (50e6, 15e6, 2e6)


@dataclass(frozen=True)
class Surroundings:
    """What a place needs before and after the training. ``faster``: a measured correction of the training's speed."""

    rented: bool
    downloads: bool = True
    environment: bool = True
    wsl: bool = False
    cores: int = 2
    faster: float = 1.0


def flops_per_token(job: Job, how: Settings) -> float:
    """Products of one token, forward to backward, and its share of the attention.

    6·N of the active matrices with checkpointing (forward, recompute, backward through frozen weights), 4·N without;
    with the graph cut below the last k of L layers, 2·N + 4·N·k/L. Attention: three times two products of the row's mean
    length, capped by a sliding window.
    """
    model = job.architecture
    count = len(model.layers)
    share = (job.last_layers or count) / count if how.graph_cut else 1.0
    passes = 2.0 + (4.0 if how.checkpointing else 2.0) * share
    mean = job.squared / job.tokens if job.tokens else 0.0
    attention = sum(2 * layer.q * min(mean, 2 * (layer.window or mean)) for layer in model.layers if layer.q)
    head = 2.0 * model.hidden * model.vocabulary * job.scored_share * 2
    return passes * (model.active + attention / 2) + head


def step_s(job: Job, card: Card | None, how: Settings, around: Surroundings) -> Span:
    """One pass over a batch, forward and backward: products, overhead a layer, linear attention, dequantization."""
    model = job.architecture
    mean_tokens = job.tokens / max(1, job.rows) * job.batch
    work = flops_per_token(job, how) * mean_tokens
    if card is None:
        low, expected, high = (work / (rate * around.cores) for rate in CPU_FLOPS)
        return Span(low, expected, high)
    linear = 0 if how.linear_kernels else sum(1 for layer in model.layers if layer.state)
    traffic = 3 * 4.5 * model.quantizable if job.quantization == "nf4" else 3 * 2.0 * model.active
    passes = (2 + 4 * (job.last_layers or len(model.layers)) / len(model.layers)) / 6 if how.graph_cut else 1.0
    spans = [
        work / (card.tflops * 1e12 * share)
        + len(model.layers) * layer * passes * (1.0 if how.checkpointing else 0.75)
        + linear * mean_tokens * token * passes
        + traffic / card.bandwidth_bytes_s
        for share, layer, token in zip(
            UTILIZATION, LAYER_S["moe" if model.moe else "dense"], LINEAR_TOKEN_S, strict=True
        )
    ]
    low, expected, high = (seconds * how.slower / around.faster for seconds in spans)
    return Span(low, expected, high * (WSL_HIGH if around.wsl else 1.0))


def training(job: Job, card: Card | None, how: Settings, around: Surroundings) -> Span:
    return step_s(job, card, how, around).times(job.micro_steps)


def phases(job: Job, card: Card | None, how: Settings, around: Surroundings) -> dict[str, Span]:
    """Seconds of every phase, in order. A phase that does not happen is not listed."""
    bytes_16bit = estimate.model_file_bytes(job.architecture)
    where = "cloud" if around.rented else "local"
    found: dict[str, Span] = {}
    if around.rented:
        found["provision"] = PROVISION
    if around.environment:
        found["set-up"] = ENVIRONMENT
    if around.downloads:
        found["download"] = _moved(bytes_16bit, DOWNLOAD_BYTES_S[where])
    found["load"] = IMPORTS + _moved(bytes_16bit, LOAD_BYTES_S)
    if card is not None and card.turing_or_older and job.architecture.moe:
        found["compile"] = FIRST_COMPILE
    found["train"] = training(job, card, how, around)
    if job.eval_tokens and job.evaluations:
        share = job.eval_tokens / max(1, job.tokens) * (1 / 3 if how.checkpointing else 1 / 2)
        found["evaluate"] = step_s(job, card, how, around).times(job.rows / job.batch * share).times(job.evaluations)
    if job.probe_tokens:
        found["probes"] = Span(0.02, 0.06, 0.2).times(job.probe_tokens)
    found["save"] = _moved(estimate.adapter_file_bytes(job, card), (1e9, 300e6, 50e6)) + Span(0.5, 1.0, 5.0)
    if around.rented:
        found["fetch"] = _moved(estimate.adapter_file_bytes(job, card), FETCH_BYTES_S) + Span(2.0, 5.0, 30.0)
    return found


def total(found: dict[str, Span]) -> Span:
    return sum(found.values(), NOTHING)


def _moved(size_bytes: int, rates: tuple[float, float, float]) -> Span:
    low, expected, high = (size_bytes / rate for rate in rates)
    return Span(low, expected, high)
