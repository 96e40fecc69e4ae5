"""The GPUs of this machine, through NVIDIA's management library. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A local GPU. ``processes`` are the other processes that hold memory on it, as ``pid name``."""

    uuid: str
    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    processes: tuple[str, ...] = ()

    @property
    def bf16(self) -> bool:
        """bfloat16 in hardware needs compute capability 8.0."""
        return self.capability >= (8, 0)


@dataclass(frozen=True)
class LocalGpus:
    """What was found; ``problem`` is why nothing could be seen, where that is not simply the absence of a driver."""

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None


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
        return LocalGpus(
            tuple(_describe(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount()))
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
            try:
                processes.append(f"{process.pid} {psutil.Process(process.pid).name()}")
            except psutil.Error:
                processes.append(str(process.pid))
    except pynvml.NVMLError:
        pass  # containers and WSL may not show processes
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=tuple(processes),
    )
