"""The table of GPUs: every name that a catalog, a cloud or a driver uses finds its row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from burst import cards, shipped
from burst.cards import Card, Unsupported

CATALOG = """A10 A100 A100-80GB A100-80GB-SXM A10G A30 A40 A4000 A6000 A800 B200 GH200 GTX1660S H100 H100-MEGA H100-NVL
H100-NVLINK H100-SXM H200 H200-SXM K80 L4 L40 L40S M4000 M60 P100 P4 P4000 RTX3060 RTX3070 RTX3080 RTX3090 RTX4000-Ada
RTX4090 RTX5060 RTX5090 RTX6000 RTX6000-Ada RTX6000Ada RTXA4000 RTXA4500 RTXA5000 RTXA6000 RTXPRO6000S RTXPRO6000WS T4 T4g
V100 V100-32GB""".split()
"""The NVIDIA names of SkyPilot's catalog v8, common/accelerators.csv."""


@pytest.mark.parametrize("name", CATALOG)
def test_names_of_the_catalog(name: str) -> None:
    assert isinstance(cards.find(name), Card)
    assert cards.find(f"{name}:8") == cards.find(name) == cards.find(name.lower())


def test_names_in_skypilot_itself() -> None:
    gpu_names = pytest.importorskip("sky.utils.gpu_names")
    fetchers = Path(gpu_names.__file__).parents[1] / "catalog/data_fetchers"
    names = set(gpu_names.CANONICAL_GPU_NAMES)
    for name in ("fetch_runpod.py", "fetch_lambda_cloud.py", "fetch_fluidstack.py"):
        names |= set(re.findall(r"'((?:[A-Z]{1,4}\d{1,4}|RTX)[A-Za-z0-9-]*)'\s*:", (fetchers / name).read_text()))
    assert len(names) > 60
    assert [name for name in sorted(names) if cards.find(name) is None] == []


@pytest.mark.parametrize("name", ["MI300X", "Radeon Pro V520", "Gaudi HL-205", "tpu-v5p", "Trainium", "Apple M4"])
def test_other_makers_are_known_and_not_supported(name: str) -> None:
    found = cards.find(name)
    assert isinstance(found, Unsupported)
    assert found.why


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA GeForce RTX 3070 Ti", "RTX3070Ti"),
        ("Quadro RTX 8000", "RTX8000"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000-Ada"),
        ("Tesla T4", "T4"),
    ],
)
def test_names_of_drivers(name: str, row: str) -> None:
    found = cards.find(name)
    assert isinstance(found, Card)
    assert found.name == row


def test_capabilities_decide() -> None:
    t4, v100, l4, thor = (cards.find(name) for name in ("T4", "V100", "L4", "Thor"))
    assert isinstance(t4, Card)
    assert isinstance(v100, Card)
    assert isinstance(l4, Card)
    assert isinstance(thor, Card)
    assert not t4.bf16
    assert (t4.wheel, v100.wheel) == ("default", "cu126")
    assert l4.bf16
    assert (l4.fp8, l4.fp4, thor.fp4, thor.unified) == (True, False, True, True)
    k80 = cards.find("K80")
    assert isinstance(k80, Card)
    assert k80.wheel is None


def test_a_local_card_has_the_memory_that_its_driver_names() -> None:
    known = cards.of_device("NVIDIA GeForce RTX 4060 Ti", (8, 9), 16 << 30)
    assert (known.memory_bytes, known.known, known.tflops) == (16 << 30, True, 44)
    assert not cards.of_device("NVIDIA Something New", (12, 0), 1 << 30).known


def test_no_two_rows_share_a_name_and_every_row_has_its_source() -> None:
    table = shipped.read("cards.json")
    names = [re.sub(r"[^a-z0-9]", "", n.lower()) for row in table["cards"] for n in {row["name"], *row["aliases"]}]
    rows = [row["name"] for row in table["cards"]]
    assert len(set(rows)) == len(rows)
    found = {name: cards.find(name) for row in table["cards"] for name in (row["name"], *row["aliases"])}
    assert all(isinstance(card, Card) for card in found.values())
    for row in table["cards"]:
        assert {cards.find(name) for name in (row["name"], *row["aliases"])} == {cards.find(row["name"])}, row["name"]
        assert row["source"] in table["sources"]
        assert 0.9 * row["nominal_gb"] < row["memory_gib"] * 1.0737 < 1.08 * row["nominal_gb"], row["name"]
    assert len(names) > 150
