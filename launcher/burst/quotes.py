"""A price of a machine with where it comes from and how old it is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOWEST_USD, HIGHEST_USD = 0.01, 500.0
"""Hourly prices outside of this are no prices: a free or absurd row in a catalog never wins."""


@dataclass(frozen=True)
class Quote:
    """What one machine with one GPU costs an hour; None where that is not known.

    ``enabled``: whether the user's SkyPilot can launch it; None where that is not known. ``as_of``: the date of the price, where it is known.
    """

    infra: str
    gpu: str
    hourly_usd: float | None
    spot_usd: float | None = None
    source: str = ""
    as_of: str | None = None
    enabled: bool | None = None
    autodown: bool = True


def sane(value: object) -> float | None:
    """A price per hour, or None for zero, missing, not-a-number and absurd ones."""
    try:
        number = float(str(value))
    except ValueError:
        return None
    return number if math.isfinite(number) and LOWEST_USD <= number <= HIGHEST_USD else None
