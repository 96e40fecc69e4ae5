"""Prices of rented GPUs."""

from __future__ import annotations

from burst import shipped
from burst.quotes import Quote, sane


def quotes() -> tuple[list[Quote], list[str]]:
    """Every known price, and what could not be asked."""
    return snapshot(), ["prices are from the snapshot that ships with burst"]


def snapshot() -> list[Quote]:
    """The prices that ship with burst."""
    table = shipped.read("prices.json")
    source = f"snapshot copied {table['copied']}"
    return [
        Quote(row["infra"], row["gpu"], sane(row["hourly_usd"]), sane(row["spot_usd"]), source, table["as_of"])
        for row in table["prices"]
    ]
