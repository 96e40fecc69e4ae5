"""GPUs as a table: what a card can do, from ``data/cards.json``, found by the names that clouds and drivers give it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from burst import shipped

GIB = 1 << 30
WSL_HINT = "under WSL pinned memory is scarce and free memory is shared with Windows"


@dataclass(frozen=True)
class Card:
    """One kind of GPU. ``memory_bytes`` is what programs get; ``tflops`` the dense 16-bit matrix peak."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    tflops: float
    bandwidth_bytes_s: float
    unified: bool = False
    known: bool = True

    @property
    def bf16(self) -> bool:
        """bfloat16 in hardware needs compute capability 8.0 (``torch.cuda.is_bf16_supported`` says True below it)."""
        return self.capability >= (8, 0)

    @property
    def fp8(self) -> bool:
        return self.capability >= (8, 9)

    @property
    def fp4(self) -> bool:
        return self.capability >= (10, 0)

    @property
    def turing_or_older(self) -> bool:
        return self.capability < (8, 0)

    @property
    def wheel(self) -> str | None:
        """The torch build that has kernels for it: ``default`` (PyPI's, CUDA 13), another build's name, or None.

        PyPI's torch 2.13 carries 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0 (11.0 on aarch64); 5.0 to 7.0 are in the cu126 build.
        """
        if self.capability >= (7, 5):
            return "default"
        return "cu126" if self.capability >= (5, 0) else None


@dataclass(frozen=True)
class Unsupported:
    """An accelerator that is known, and known not to train here."""

    vendor: str
    why: str


def find(name: str) -> Card | Unsupported | None:
    """The row of a GPU by SkyPilot's, a cloud's or the driver's name; None for one that is not in the table."""
    return _index().get(_key(name)) or _foreign(name)


def of_device(name: str, capability: tuple[int, int], total_bytes: int) -> Card:
    """A local GPU as a card: memory and capability as the driver says, rates from the table or, unknown, by capability.

    Variants of one name (12 and 16 GB of an RTX 4060 Ti) differ in memory only, which the driver knows best.
    """
    row = find(name)
    if isinstance(row, Card):
        return Card(row.name, capability, total_bytes, row.tflops, row.bandwidth_bytes_s, row.unified)
    return Card(name, capability, total_bytes, 20.0, 300e9, known=False)


def table() -> list[Card]:
    return [_card(row) for row in shipped.read("cards.json")["cards"]]


@cache
def _index() -> dict[str, Card]:
    found: dict[str, Card] = {}
    for row in shipped.read("cards.json")["cards"]:
        for name in (row["name"], *row["aliases"]):
            found[_key(name)] = _card(row)
    return found


def _card(row: dict[str, object]) -> Card:
    major, minor = str(row["capability"]).split(".")
    return Card(
        name=str(row["name"]),
        capability=(int(major), int(minor)),
        memory_bytes=int(float(str(row["memory_gib"])) * GIB),
        tflops=float(str(row["tflops"])),
        bandwidth_bytes_s=float(str(row["bandwidth_gb_s"])) * 1e9,
        unified=bool(row.get("unified")),
    )


@cache
def _others() -> list[tuple[re.Pattern[str], Unsupported]]:
    return [
        (re.compile(row["pattern"], re.IGNORECASE), Unsupported(row["vendor"], row["why"]))
        for row in shipped.read("cards.json")["others"]
    ]


def _foreign(name: str) -> Unsupported | None:
    return next((row for pattern, row in _others() if pattern.match(name)), None)


def _key(name: str) -> str:
    """A name without count, vendor and punctuation: ``NVIDIA GeForce RTX 3090`` and ``RTX3090:2`` are the same card."""
    bare = name.partition(":")[0].lower()
    bare = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", "", bare)
    return re.sub(r"[^a-z0-9]", "", bare)
