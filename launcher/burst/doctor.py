"""``burst doctor``: what this machine is, what each part of it means for training, and what to do. No torch.

``look`` asks the machine; ``judge`` turns what it saw into findings, and is pure.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from burst import cards, gpus, paths

if TYPE_CHECKING:
    from burst.gpus import Gpu, LocalGpus

GIB = 1 << 30
State = Literal["ok", "note", "bad"]
NVIDIA, AMD = "0x10de", "0x1002"
NEWEST_CUDA = (13, 0)
"""What the pinned torch is built with where PyPI is the index."""
MINIMUM_DISK_BYTES = 12 * GIB
"""The training environment with torch's CUDA libraries, and room for an adapter."""


@dataclass(frozen=True)
class Finding:
    """One line: what was seen, what it means for training, and what to do (empty where nothing has to be done)."""

    part: str
    state: State
    what: str
    means: str = ""
    do: str = ""


@dataclass(frozen=True)
class Seen:
    """What the machine answered."""

    gpus: LocalGpus
    pci: tuple[str, ...]
    system: str
    machine: str
    wsl: bool
    ram_bytes: int
    ram_free_bytes: int
    memlock_bytes: int | None
    disk: dict[str, int]
    skypilot: str | None
    clouds: tuple[str, ...] | None
    environment: bool
    tools: dict[str, bool]
    hub_token: bool


def look() -> Seen:
    """Ask the machine. Quick, and asks no network."""
    import psutil

    memory = psutil.virtual_memory()
    return Seen(
        gpus=gpus.detect(),
        pci=_pci_vendors(),
        system=platform.system(),
        machine=platform.machine(),
        wsl="microsoft" in platform.release().lower(),
        ram_bytes=int(memory.total),
        ram_free_bytes=int(memory.available),
        memlock_bytes=_memlock(),
        disk={str(folder): shutil.disk_usage(_existing(folder)).free for folder in (paths.home(), paths.cache())},
        skypilot=_version("skypilot"),
        clouds=None,
        environment=_environment(),
        tools={
            "convert_hf_to_gguf": importlib.util.find_spec("convert_hf_to_gguf") is not None
            or shutil.which("convert_hf_to_gguf.py") is not None,
            "gguf": importlib.util.find_spec("gguf") is not None,
            "llama-quantize": shutil.which("llama-quantize") is not None,
            "ollama": shutil.which("ollama") is not None,
        },
        hub_token=bool(os.environ.get("HF_TOKEN"))
        or (Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "token").is_file(),
    )


def judge(seen: Seen) -> list[Finding]:
    """What was seen, as findings in the order in which people ask."""
    return [*_gpu_findings(seen), *_memory(seen), *_software(seen)]


def _gpu_findings(seen: Seen) -> list[Finding]:
    found = seen.gpus
    if found.problem:
        return [
            Finding(
                "driver",
                "bad",
                f"broken, because {found.problem.removeprefix('the NVIDIA driver is broken: ')}",
                "no GPU can be used until it answers; training would fall back to the CPU",
                "run nvidia-smi; after an update of the driver restart the machine",
            )
        ]
    findings = []
    if found.gpus and found.cuda:
        version = f"{found.cuda[0]}.{found.cuda[1]}"
        old = found.cuda < NEWEST_CUDA
        findings.append(
            Finding(
                "driver",
                "note" if old else "ok",
                f"NVIDIA {found.driver}, up to CUDA {version}",
                f"torch's default build needs CUDA {NEWEST_CUDA[0]}.{NEWEST_CUDA[1]}"
                if old
                else "runs torch's default build",
                "update the driver, or: burst env --torch-backend cu126" if old else "",
            )
        )
    for gpu in found.gpus:
        findings += _one_gpu(gpu)
    if not found.gpus:
        findings.append(_no_gpu(seen))
    if AMD in seen.pci:
        findings.append(
            Finding(
                "gpu",
                "note",
                "an AMD GPU",
                "not used: NF4 and the pinned torch build are for CUDA",
                "rent a card: burst plan",
            )
        )
    return findings


def _no_gpu(seen: Seen) -> Finding:
    if NVIDIA in seen.pci:
        return Finding(
            "gpu",
            "bad",
            "an NVIDIA card is on the bus, and its driver is not installed",
            "it cannot be used",
            "install the NVIDIA driver (in WSL: on Windows)",
        )
    if seen.system == "Darwin":
        return Finding(
            "gpu", "note", f"Apple {seen.machine}", "training is for CUDA or the CPU", "rent a card: burst plan"
        )
    return Finding(
        "gpu", "note", "no GPU", "small models train on the CPU; larger ones need a rented card", "see: burst plan"
    )


def _one_gpu(gpu: Gpu) -> list[Finding]:
    """One card: what it can do, its traps, and who else is on it."""
    card = cards.of_device(gpu.name, gpu.capability, gpu.total_bytes)
    version = f"{gpu.capability[0]}.{gpu.capability[1]}"
    name = gpu.name.removeprefix("NVIDIA ")
    what = f"{name}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, compute capability {version}, {gpu.uuid}"
    formats = [name for name, has in (("bf16", card.bf16), ("fp8", card.fp8), ("fp4", card.fp4)) if has]
    if card.wheel is None:
        return [Finding("gpu", "bad", what, "no torch build has kernels for it", "rent a card: burst plan")]
    findings = [
        Finding("gpu", "ok", what, f"trains in {formats[0]}" if formats else "trains in fp16 with fp32 adapters")
    ]
    if card.wheel != "default":
        findings.append(
            Finding(
                "gpu",
                "note",
                f"{name} needs another torch build",
                "the default one has no kernels for it",
                f"burst env --torch-backend {card.wheel}",
            )
        )
    if not card.bf16:
        findings.append(
            Finding(
                "gpu",
                "note",
                f"{name} has no bf16",
                "Gemma 3 computes in fp32; mixtures of experts compile for 15-30 minutes first",
            )
        )
    if gpu.processes:
        findings.append(
            Finding(
                "gpu",
                "note",
                f"in use by {', '.join(gpu.processes)}",
                "what they hold is not there for training; an inference server takes more at its next request",
                "stop them before you train",
            )
        )
    if gpu.display:
        findings.append(
            Finding("gpu", "note", f"{name} drives a display", "windows take some hundred MiB of its memory")
        )
    if gpu.mig:
        findings.append(
            Finding(
                "gpu",
                "note",
                f"{name} is split (MIG)",
                "a run sees one slice: choose it with CUDA_VISIBLE_DEVICES=MIG-...",
            )
        )
    return findings


def _memory(seen: Seen) -> list[Finding]:
    findings = [
        Finding(
            "memory",
            "ok" if seen.ram_free_bytes > 8 * GIB else "note",
            f"{seen.ram_free_bytes / GIB:.1f} of {seen.ram_bytes / GIB:.1f} GiB main memory free",
            "enough" if seen.ram_free_bytes > 8 * GIB else "loading a model and paged optimizer state need more",
        )
    ]
    if seen.memlock_bytes is not None and seen.gpus.gpus and seen.memlock_bytes < GIB:
        findings.append(
            Finding(
                "memory",
                "note",
                f"{seen.memlock_bytes >> 10} KiB may be locked",
                "pinned buffers may be refused",
                "raise ulimit -l",
            )
        )
    if seen.wsl:
        findings.append(
            Finding(
                "system",
                "note",
                "WSL",
                "little memory can be pinned, and free GPU memory is shared with Windows",
                "close what draws on the GPU",
            )
        )
    for folder, free in seen.disk.items():
        enough = free > MINIMUM_DISK_BYTES
        findings.append(
            Finding(
                "disk",
                "ok" if enough else "note",
                f"{free / GIB:.1f} GiB free in {folder}",
                "" if enough else "the training environment and a model need more",
                "" if enough else "free space, or set BURST_CACHE and BURST_HOME",
            )
        )
    return findings


def _software(seen: Seen) -> list[Finding]:
    findings = [
        Finding("training", "ok", "the training environment is built")
        if seen.environment
        else Finding(
            "training",
            "note",
            "the training environment is not built",
            "the first burst train builds it",
            "or now: burst env",
        )
    ]
    if seen.skypilot is None:
        findings.append(
            Finding(
                "cloud", "note", "SkyPilot is not installed", "no rented machines", "pip install 'burst-train[cloud]'"
            )
        )
    elif seen.clouds:
        findings.append(Finding("cloud", "ok", f"SkyPilot {seen.skypilot}: {', '.join(seen.clouds)}"))
    else:
        why = "does not say in time what is enabled" if seen.clouds is None else "has nothing enabled"
        findings.append(Finding("cloud", "note", f"SkyPilot {seen.skypilot} {why}", "", "sky check"))
    findings.append(
        Finding("hub", "ok", "a token for the hub is set")
        if seen.hub_token
        else Finding(
            "hub", "note", "no token for the hub", "gated models (Llama, Gemma) cannot be fetched", "hf auth login"
        )
    )
    missing = [name for name, there in seen.tools.items() if not there]
    here = [name for name, there in seen.tools.items() if there]
    findings.append(
        Finding(
            "export",
            "note" if missing else "ok",
            f"here: {', '.join(here) or 'none'}; not here: {', '.join(missing) or 'none'}",
            "tools that turn an adapter into a GGUF file or an Ollama model",
        )
    )
    return findings


def to_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [{"part": f.part, "state": f.state, "what": f.what, "means": f.means, "do": f.do} for f in findings]


def _pci_vendors() -> tuple[str, ...]:
    """The makers of the display devices on the PCI bus; empty where there is no such list."""
    found = set()
    for folder in Path("/sys/bus/pci/devices").glob("*"):
        try:
            if (folder / "class").read_text().startswith("0x03"):
                found.add((folder / "vendor").read_text().strip())
        except OSError:
            continue
    return tuple(sorted(found))


def _memlock() -> int | None:
    """How much memory a process may lock; None for no limit, or where that is not known."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _environment() -> bool:
    from burst import interpreter

    return bool(os.environ.get("BURST_PYTHON")) or interpreter.cached_folder().is_dir()


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
