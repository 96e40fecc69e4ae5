"""Prices: the user's own, SkyPilot's catalog as files, and the snapshot; what is broken costs nothing else."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from burst import clouds, prices, quotes
from burst_payload import records
from hypothesis import given
from hypothesis import strategies as st

HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice\n"


@pytest.fixture(autouse=True)
def _catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKY_RUNTIME_DIR", str(tmp_path / "sky"))


def write(cloud: str, *rows: str, header: str = HEADER) -> Path:
    path = prices.folder() / cloud / "vms.csv"
    path.parent.mkdir(parents=True)
    path.write_text(header + "\n".join(rows) + "\n")
    return path


def by_gpu(found: list[quotes.Quote]) -> dict[str, quotes.Quote]:
    return {quote.gpu: quote for quote in found}


def test_the_cheapest_region_of_each_card_and_spot_apart() -> None:
    write(
        "lambda",
        "g1,A100,1.0,30,200,1.99,us-east-1,,",
        "g1,A100,1.0,30,200,1.29,us-west-1,,0.7",
        "g8,A100,8.0,30,200,9.9,us-east-1,,",
    )
    found, problems = prices.catalog()
    assert problems == []
    (quote,) = found
    assert (quote.infra, quote.hourly_usd, quote.spot_usd) == ("lambda/us-west-1", 1.29, 0.7)
    assert quote.source == "SkyPilot's catalog"


@pytest.mark.parametrize("price", ["0", "0.0", "", "nan", "-1", "1e12", "free"])
def test_prices_that_are_none(price: str) -> None:
    write("lambda", f"g1,A100,1.0,30,200,{price},us-east-1,,{price}")
    (quote,) = prices.catalog()[0]
    assert (quote.hourly_usd, quote.spot_usd) == (None, None)


def test_a_card_without_its_machine_is_no_price() -> None:
    write("gcp", ",A100,1.0,,,2.9,us-central1,,1.2", "cpu,,,4,16,0.2,us-central1,,")
    assert prices.catalog()[0] == []


def test_a_broken_file_costs_that_cloud_only() -> None:
    write("lambda", "g1,A100,1.0,30,200,1.29,us-east-1,,")
    write("runpod", "x", header="What,Ever\n")
    (prices.folder() / "aws").mkdir()
    (prices.folder() / "aws/vms.csv").write_bytes(b"\xff\xfe\x00garbage\x00")
    found, problems = prices.catalog()
    assert [quote.infra for quote in found] == ["lambda/us-east-1"]
    assert len(problems) == 2
    assert any("runpod" in problem and "no column" in problem for problem in problems)


def test_the_age_is_that_of_the_download_not_of_the_touched_file() -> None:
    path = write("lambda", "g1,A100,1.0,30,200,1.29,us-east-1,,")
    meta = prices.folder() / ".meta/lambda/vms.csv.md5"
    meta.parent.mkdir(parents=True)
    meta.write_text("x")
    os.utime(meta, (1_700_000_000, 1_700_000_000))
    os.utime(path, None)
    assert prices.catalog()[0][0].as_of == "2023-11-14"


def test_without_a_catalog_the_snapshot_is_used_and_said() -> None:
    found, problems = prices.quotes()
    assert found == prices.snapshot()
    assert "snapshot" in problems[0]
    assert all(quote.hourly_usd is not None and quote.source.startswith("snapshot copied 20") for quote in found)


def test_what_is_reached_and_what_is_the_users_own() -> None:
    write("lambda", "g1,A100,1.0,30,200,1.29,us-east-1,,")
    write("runpod", "g1,H100,1.0,30,200,2.39,US,,")
    found = by_gpu(prices.quotes({"slurm/lab:L4": 0.2, "k8s/mine:A10": 0.0}, ["Lambda"])[0])
    assert (found["A100"].enabled, found["H100"].enabled) == (True, False)
    assert (found["L4"].infra, found["L4"].hourly_usd, found["L4"].source, found["L4"].enabled) == (
        "slurm/lab",
        0.2,
        "yours",
        True,
    )
    assert not found["L4"].autodown
    assert found["A10"].hourly_usd is None
    assert by_gpu(prices.quotes()[0])["A100"].enabled is None


@given(st.floats() | st.text(max_size=8) | st.none())
def test_a_sane_price_is_a_sane_number(value: Any) -> None:
    price = quotes.sane(value)
    assert price is None or quotes.LOWEST_USD <= price <= quotes.HIGHEST_USD


# --- which clouds are reached -----------------------------------------------------------------------------------------


@pytest.fixture
def no_sky_but(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands in for SkyPilot: a package whose import does what a test wants; the real one has nothing enabled here."""

    def install(body: str) -> None:
        package = tmp_path / "stand-in/sky"
        (package / "clouds").mkdir(parents=True)
        (package / "__init__.py").write_text(textwrap.dedent(body))
        (package / "clouds/__init__.py").write_text("")
        (package / "clouds/cloud.py").write_text("class CloudCapability:\n    COMPUTE = 'compute'\n")
        (package / "global_user_state.py").write_text(
            "def get_cached_enabled_clouds(*_):\n    return ['Lambda', 'AWS']\n"
        )
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), *sys.path]))

    return install


def test_clouds_are_asked_in_a_process_and_remembered(no_sky_but: Any) -> None:
    no_sky_but("")
    question = clouds.ask()
    assert question.process is not None
    question.process.wait(30)
    assert clouds.ask().known == ("aws", "lambda")


def test_a_skypilot_that_hangs_is_not_waited_for(no_sky_but: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_sky_but("import time; time.sleep(60)")
    monkeypatch.setattr(clouds, "LIMIT_S", 0.3)
    question = clouds.ask()
    started = time.monotonic()
    assert question.answer() is None
    assert time.monotonic() - started < 5
    assert question.process is not None
    question.process.kill()
    question.process.wait()


def test_a_skypilot_that_fails_is_unknown(no_sky_but: Any) -> None:
    no_sky_but("raise RuntimeError('broken')")
    question = clouds.ask()
    assert question.process is not None
    question.process.wait(30)
    assert question.answer() is None


def test_a_damaged_memory_is_asked_anew(no_sky_but: Any) -> None:
    no_sky_but("")
    for value in ({"clouds": 3, "time": time.time()}, [], {"time": "x"}):
        records.write_json(clouds._file(), value)
        assert clouds._remembered(1e9) is None
    records.write_json(clouds._file(), {"clouds": ["aws"], "time": time.time() - 7200})
    assert clouds._remembered(clouds.FRESH_S) is None
    assert clouds._remembered(clouds.USABLE_S) == ("aws",)
