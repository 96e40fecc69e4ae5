"""Prices of rented GPUs: the user's own, SkyPilot's catalog files, and the snapshot that ships with burst.

The catalog is read as files, one cloud at a time: asking SkyPilot costs two seconds of imports, and its download has no
time limit. What a cloud's file cannot give (it is broken, or the time is over) is said, and costs nothing else.
"""

from __future__ import annotations

import csv
import datetime
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from burst import shipped
from burst.quotes import Quote, sane

if TYPE_CHECKING:
    from collections.abc import Iterable

CATALOG_VERSION = "v8"
"""The schema of SkyPilot 0.14's catalog files."""
LIMIT_S = 0.8
NEEDED = {"InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "Region"}
NO_AUTODOWN = ("slurm",)


def quotes(own: dict[str, float] | None = None, enabled: Iterable[str] | None = None) -> tuple[list[Quote], list[str]]:
    """Every known price of one GPU, and what could not be read.

    Args:
        own: the user's prices, by ``place:GPU``.
        enabled: the clouds that the user's SkyPilot reaches; None where that is not known.
    """
    found, problems = catalog()
    if not found:
        found = snapshot()
        problems.append("there is no price list of SkyPilot here: prices are from the snapshot that ships with burst")
    reached = None if enabled is None else {name.lower() for name in enabled}
    marked = [_with_access(quote, reached) for quote in found]
    mine = [
        Quote(place, gpu, sane(usd), source="yours", enabled=True, autodown=not place.startswith(NO_AUTODOWN))
        for place, _, gpu in (key.rpartition(":") for key in own or {})
        for usd in [(own or {})[f"{place}:{gpu}"]]
    ]
    return mine + marked, problems


def catalog() -> tuple[list[Quote], list[str]]:
    """The cheapest region of each GPU in every cloud whose catalog file lies here."""
    found: list[Quote] = []
    problems: list[str] = []
    started = time.monotonic()
    for path in sorted(folder().glob("*/vms.csv"), key=_size):
        cloud = path.parent.name
        if time.monotonic() - started > LIMIT_S:
            problems.append(f"prices of {cloud}: there was no time to read them")
            continue
        try:
            found += _read(path, cloud)
        except (OSError, ValueError, KeyError, csv.Error, UnicodeDecodeError) as error:
            problems.append(f"prices of {cloud}: {path} cannot be read: {error}")
    return found, problems


def folder() -> Path:
    """Where SkyPilot keeps its catalog."""
    home = Path(os.environ.get("SKY_RUNTIME_DIR") or Path.home())
    return home / ".sky/catalogs" / CATALOG_VERSION


def snapshot() -> list[Quote]:
    """The prices that ship with burst."""
    table = shipped.read("prices.json")
    source = f"snapshot copied {table['copied']}"
    return [
        Quote(row["infra"], row["gpu"], sane(row["hourly_usd"]), sane(row["spot_usd"]), source, table["as_of"])
        for row in table["prices"]
    ]


def _read(path: Path, cloud: str) -> list[Quote]:
    """A cloud's file. A row without an instance type has the price of a card without its machine: no price at all."""
    as_of = _date(path)
    best: dict[str, Quote] = {}
    with open(path, encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        missing = NEEDED - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
        for row in rows:
            gpu = row["AcceleratorName"]
            if not gpu or not row["InstanceType"] or sane(row["AcceleratorCount"]) != 1.0:
                continue
            price, spot = sane(row["Price"]), sane(row.get("SpotPrice"))
            infra = f"{cloud}/{row['Region']}" if row["Region"] else cloud
            old = best.get(gpu)
            if old is None or (price or 1e9) < (old.hourly_usd or 1e9):
                best[gpu] = Quote(infra, gpu, price, spot, "SkyPilot's catalog", as_of)
    return list(best.values())


def _date(path: Path) -> str | None:
    """When SkyPilot fetched a file. Offline it sets the file's own time to now, so its checksum's time is the true one."""
    meta = path.parents[1] / ".meta" / path.parent.name / "vms.csv.md5"
    for candidate in (meta, path):
        try:
            stamp = candidate.stat().st_mtime
        except OSError:
            continue
        return datetime.datetime.fromtimestamp(stamp, datetime.timezone.utc).date().isoformat()
    return None


def _with_access(quote: Quote, reached: set[str] | None) -> Quote:
    cloud = quote.infra.partition("/")[0].lower()
    enabled = None if reached is None else cloud in reached
    return Quote(
        quote.infra, quote.gpu, quote.hourly_usd, quote.spot_usd, quote.source, quote.as_of, enabled, quote.autodown
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
