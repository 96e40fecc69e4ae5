"""What the doctor sees and what it makes of it. NVML is a stand-in here: no machine of the tests has every card."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from burst import doctor, gpus
from burst.doctor import Finding, Seen
from burst.gpus import Gpu, LocalGpus
from jobs import burst

GIB = 1 << 30
SEEN = Seen(
    gpus=LocalGpus(),
    pci=(),
    system="Linux",
    machine="x86_64",
    wsl=False,
    ram_bytes=64 * GIB,
    ram_free_bytes=48 * GIB,
    memlock_bytes=None,
    disk={"/home": 100 * GIB},
    skypilot="0.14.1",
    clouds=("lambda",),
    environment=True,
    tools={"gguf": True},
    hub_token=True,
)
CARD = Gpu("GPU-1", "NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, 23 * GIB)


def with_gpu(**changes: Any) -> Seen:
    return replace(SEEN, gpus=LocalGpus((replace(CARD, **changes),), driver="580.1", cuda=(13, 0)))


def findings(seen: Seen, part: str) -> list[Finding]:
    return [finding for finding in doctor.judge(seen) if finding.part == part]


def test_a_good_machine_has_nothing_to_do() -> None:
    assert {finding.state for finding in doctor.judge(with_gpu())} == {"ok"}
    assert not any(finding.do for finding in doctor.judge(with_gpu()))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "Tesla T4", "capability": (7, 5)}, "has no bf16"),
        ({"name": "Tesla V100-SXM2-16GB", "capability": (7, 0)}, "needs another torch build"),
        ({"name": "Tesla K80", "capability": (3, 7)}, "no torch build has kernels"),
        ({"processes": ("77 ollama (5.2 GiB)",)}, "in use by 77 ollama (5.2 GiB)"),
        ({"display": True}, "drives a display"),
        ({"mig": True}, "is split (MIG)"),
    ],
)
def test_traps_of_a_card(changes: dict[str, Any], text: str) -> None:
    assert any(text in finding.what + finding.means for finding in findings(with_gpu(**changes), "gpu"))


def test_a_broken_driver_is_broken_because_and_not_absent() -> None:
    broken = replace(SEEN, gpus=LocalGpus(problem="the NVIDIA driver is broken: Driver/library version mismatch"))
    (finding,) = findings(broken, "driver")
    assert (finding.state, finding.what) == ("bad", "broken, because Driver/library version mismatch")
    (finding,) = findings(replace(SEEN, pci=("0x10de",)), "gpu")
    assert finding.state == "bad"
    assert "its driver is not installed" in finding.what


def test_no_card_amd_and_apple() -> None:
    assert findings(SEEN, "gpu")[0].what == "no GPU"
    assert any("AMD" in finding.what for finding in findings(replace(SEEN, pci=("0x1002",)), "gpu"))
    assert "Apple" in findings(replace(SEEN, system="Darwin", machine="arm64"), "gpu")[0].what


def test_an_old_driver_names_the_build_that_runs() -> None:
    old = replace(SEEN, gpus=LocalGpus((CARD,), driver="535.1", cuda=(12, 2)))
    assert "cu126" in findings(old, "driver")[0].do


def test_scarce_things_are_said() -> None:
    poor = replace(
        SEEN, ram_free_bytes=GIB, disk={"/": GIB}, environment=False, hub_token=False, skypilot=None, wsl=True
    )
    notes = {finding.part for finding in doctor.judge(poor) if finding.state == "note"}
    assert {"memory", "disk", "training", "hub", "cloud", "system"} <= notes
    assert "sky check" in findings(replace(SEEN, clouds=()), "cloud")[0].do
    assert "in time" in findings(replace(SEEN, clouds=None), "cloud")[0].what
    locked = replace(with_gpu(), memlock_bytes=8 << 20)
    assert any("may be locked" in finding.what for finding in findings(locked, "memory"))


# --- NVML -------------------------------------------------------------------------------------------------------------


class Refused(Exception):
    pass


class NotFound(Refused):
    pass


def nvml(**changes: Any) -> SimpleNamespace:
    """A stand-in for NVIDIA's library with one card."""

    def refuse(*_: Any) -> Any:
        raise Refused("not supported")

    fake = SimpleNamespace(
        NVMLError=Refused,
        NVMLError_LibraryNotFound=NotFound,
        NVML_FEATURE_ENABLED=1,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.159.04",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 13000,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(total=24 * GIB, free=20 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=4_000_000, usedGpuMemory=3 * GIB)],
        nvmlDeviceGetUUID=lambda _: "GPU-7",
        nvmlDeviceGetName=lambda _: "NVIDIA L4",
        nvmlDeviceGetCudaComputeCapability=lambda _: (8, 9),
        nvmlDeviceGetDisplayActive=lambda _: 1,
        nvmlDeviceGetMigMode=refuse,
    )
    return SimpleNamespace(**{**vars(fake), **changes})


def raising(error: Exception) -> Any:
    def call(*_: Any) -> Any:
        raise error

    return call


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    found = gpus.detect()
    assert (found.driver, found.cuda) == ("580.159.04", (13, 0))
    assert found.gpus == (
        Gpu("GPU-7", "NVIDIA L4", (8, 9), 24 * GIB, 20 * GIB, ("4000000 (3.0 GiB)",), display=True, mig=False),
    )


def test_what_a_driver_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=raising(NotFound())))
    assert gpus.detect() == LocalGpus()
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=raising(Refused("Driver Not Loaded"))))
    assert gpus.detect().problem == "the NVIDIA driver is broken: Driver Not Loaded"
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetName=raising(Refused("GPU is lost"))))
    assert gpus.detect().problem == "the NVIDIA driver does not answer: GPU is lost"


def test_the_command(tmp_path: Path) -> None:
    result = burst("doctor", "--json", cwd=tmp_path, check=False)
    parts = {item["part"] for item in json.loads(result.stdout)}
    assert {"memory", "disk", "training", "cloud", "hub", "export"} <= parts
    shown = burst("doctor", cwd=tmp_path, check=False).stdout
    assert "main memory free" in shown
