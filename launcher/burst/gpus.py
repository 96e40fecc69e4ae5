"""The GPUs of this machine, through NVIDIA's management library. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Gpu:
    """A local GPU. ``processes`` are the other processes that hold memory on it, as ``pid name (size)``."""

    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    processes: tuple[str, ...] = ()
    display: bool = False
    mig: bool = False

    @property
    def bf16(self) -> bool:
        """bfloat16 in hardware needs compute capability 8.0."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class LocalGpus:
    """What was found; ``problem`` is why nothing could be seen, where that is not simply the absence of a driver.

    ``driver`` is its version, ``cuda`` the newest CUDA that it runs.
    """

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None


def detect() -> LocalGpus:
    """All NVIDIA GPUs of this machine."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return LocalGpus()
    except pynvml.NVMLError as error:
        return LocalGpus(problem=f"the NVIDIA driver is broken: {error}")
    try:
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        return LocalGpus(
            tuple(_describe(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())),
            driver=str(pynvml.nvmlSystemGetDriverVersion()),
            cuda=(cuda // 1000, cuda % 1000 // 10),
        )
    except pynvml.NVMLError as error:
        return LocalGpus(problem=f"the NVIDIA driver does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def choose(found: LocalGpus, visible: str | None) -> Gpu | None:
    """The GPU for a local run: the most capable one, and among equals the one with most free memory.

    ``visible`` is ``CUDA_VISIBLE_DEVICES``: where the user set it, only those (by index or UUID) count.
    """
    gpus = list(found.gpus)
    if visible is not None:
        wanted = [item.strip() for item in visible.split(",") if item.strip()]
        gpus = [gpu for index, gpu in enumerate(gpus) if str(index) in wanted or gpu.uuid in wanted]
    return max(gpus, key=lambda gpu: (gpu.capability, gpu.free_bytes), default=None)


def _describe(handle: object) -> Gpu:
    import psutil
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = []
    try:
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            held = f" ({process.usedGpuMemory / 2**30:.1f} GiB)" if process.usedGpuMemory else ""
            try:
                processes.append(f"{process.pid} {psutil.Process(process.pid).name()}{held}")
            except psutil.Error:
                processes.append(f"{process.pid}{held}")
    except pynvml.NVMLError:
        pass  # containers and WSL may not show processes
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=tuple(processes),
        display=_asked(lambda: pynvml.nvmlDeviceGetDisplayActive(handle) == pynvml.NVML_FEATURE_ENABLED),
        mig=_asked(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE),
    )


def _asked(question: Callable[[], bool]) -> bool:
    """A yes or no of the driver; what a card cannot be asked is no."""
    import pynvml

    try:
        return bool(question())
    except pynvml.NVMLError:
        return False
