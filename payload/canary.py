"""Find in cents what would cost hours: ``python canary.py``, on the target machine, before the model is downloaded.

Checks that the GPU that was rented is there and is what was promised, that the installed torch has kernels for it, that
4-bit arithmetic gives the right numbers, that the disk holds the model, and that the hub lets this token have it. All
problems at once; the reasons also go into ``out/status.json``, where the launcher reads them.

    BURST_CAPABILITY  the least compute capability that was promised, such as 8.0
    BURST_GPUS        how many GPUs were promised
    BURST_CANARY      without-gpu: this machine is known to have none (a test rig)

Exit codes: 0 fit to train, 1 failed, 3 this machine cannot do it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from burst_payload import config as run_config  # noqa: E402
from burst_payload.reporter import Reporter  # noqa: E402
from burst_payload.stop import ExitCode, first_line  # noqa: E402

if TYPE_CHECKING:
    from burst_payload.config import RunConfig

HEADROOM_BYTES = 5 << 30
"""Adapter, checkpoints, logs and caches beside the model."""
NF4_TOLERANCE = 0.02
"""Relative error allowed between the 4-bit product and the product of the dequantized weights: both round to 16 bit."""

Problem = tuple[str, str]
"""What is wrong, and what to do."""


def main() -> int:
    config = run_config.load(HERE)
    (HERE / "out").mkdir(exist_ok=True)
    reporter = Reporter(HERE / "out")
    reporter.phase("canary")
    with_gpu = os.environ.get("BURST_CANARY") != "without-gpu"
    problems = gpu_problems() if with_gpu else []
    if not problems and config.quantization == "nf4" and with_gpu:
        problems += nf4_problems("cuda")
    problems += hub_problems(config)
    if not problems:
        reporter.emit("canary", gpu=_gpu_names() or "none", free_bytes=shutil.disk_usage(_model_cache()).free)
        return 0
    what = "\n".join(what for what, _ in problems)
    fix = "; ".join(dict.fromkeys(fix for _, fix in problems))
    reporter.end("failed", ExitCode.NOTHING_FITS, error=what, fix=fix)
    print(f"error: {what}\ndo this: {fix}", file=sys.stderr)
    return ExitCode.NOTHING_FITS


def gpu_problems() -> list[Problem]:
    """What this machine's GPUs lack of what was promised."""
    import torch

    if not torch.cuda.is_available():
        reason = "this torch is built for the CPU" if torch.version.cuda is None else _driver_reason()
        return [(f"no GPU can be used: {reason}", "take another machine, or a torch build for its driver")]
    found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    promised = tuple(int(part) for part in os.environ.get("BURST_CAPABILITY", "0.0").split("."))
    return promise_problems(found, promised, int(os.environ.get("BURST_GPUS") or 1), torch.cuda.get_arch_list())


def promise_problems(
    found: list[tuple[int, int]], promised: tuple[int, ...], count: int, kernels: list[str]
) -> list[Problem]:
    """Pure: the GPUs' compute capabilities and torch's kernels (``sm_90``, ``compute_90``) against what was promised.

    A binary kernel runs on its own major version from its minor version on; PTX (``compute_``) on all later ones
    (CUDA C++ Programming Guide, "Application Compatibility").
    """
    problems: list[Problem] = []
    if len(found) < count:
        problems.append((f"{len(found)} GPUs are there, {count} were asked for", "take another machine"))
    for capability in sorted(set(found)):
        name = f"{capability[0]}.{capability[1]}"
        if capability < promised:
            asked = ".".join(map(str, promised))
            problems.append((f"a GPU has compute capability {name}, {asked} was promised", "take another machine"))
        if not any(_runs(kernel, capability) for kernel in kernels):
            problems.append(
                (
                    f"the installed torch has no kernels for compute capability {name}, only {', '.join(kernels)}",
                    "install a torch build for this card, or take another one",
                )
            )
    return problems


def _runs(kernel: str, capability: tuple[int, int]) -> bool:
    kind, _, digits = kernel.partition("_")
    digits = digits.rstrip("af")  # sm_90a, sm_100f: features of one architecture or family
    made_for = int(digits[:-1]), int(digits[-1])
    if kind == "compute":
        return made_for <= capability
    return made_for[0] == capability[0] and made_for[1] <= capability[1]


def _driver_reason() -> str:
    """Why CUDA does not start, in torch's own words."""
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # torch raises several kinds
        return first_line(error)
    return f"torch for CUDA {torch.version.cuda} sees no device"


def nf4_problems(device: str) -> list[Problem]:
    """One 4-bit matrix product of bitsandbytes against the product with the dequantized weights."""
    import torch
    from bitsandbytes import functional, matmul_4bit

    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False) else torch.half
    weight = torch.randn(512, 256, generator=generator).to(device, dtype)
    inputs = torch.randn(8, 256, generator=generator).to(device, dtype)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    found = matmul_4bit(inputs, packed.t(), quant_state=state).float()
    wanted = inputs.float() @ functional.dequantize_4bit(packed, state).float().t()
    error = float((found - wanted).norm() / wanted.norm())
    if error <= NF4_TOLERANCE:
        return []
    return [
        (
            f"4-bit arithmetic is wrong on this machine: relative error {error:.3g}, at most {NF4_TOLERANCE} is right",
            "take another card, or set quantization: none",
        )
    ]


def hub_problems(config: RunConfig) -> list[Problem]:
    """Whether the hub gives this token the model, and whether the disk can hold it."""
    if config.model.kind != "hub":
        return []
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    api, name = HfApi(), config.model.name
    try:
        info: Any = api.model_info(name, revision=config.model.revision, files_metadata=True)
        api.auth_check(name)
    except GatedRepoError:
        return [(f"{name} is gated and this token has no access", f"ask for access on the page of {name}")]
    except RepositoryNotFoundError:
        return [(f"{name} is not on the hub, or it is private and this token may not see it", "check HF_TOKEN")]
    except (HfHubHTTPError, OSError) as error:
        return [(f"the hub does not answer: {first_line(error)}", "try again, or look at the machine's network")]
    needed = sum(item.size or 0 for item in info.siblings or [] if item.rfilename.endswith(".safetensors"))
    return disk_problems(needed, shutil.disk_usage(_model_cache()).free)


def disk_problems(needed_bytes: int, free_bytes: int) -> list[Problem]:
    """Pure: the model and what a run writes beside it against the free disk."""
    wanted = needed_bytes + HEADROOM_BYTES
    if free_bytes >= wanted:
        return []
    return [
        (
            f"{free_bytes / 1e9:.1f} GB of disk are free, the model and the run need {wanted / 1e9:.1f} GB",
            "take a machine with a larger disk",
        )
    ]


def _model_cache() -> Path:
    """Where the hub's files go, or the nearest folder above that exists."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    return next(path for path in (folder, *folder.parents) if path.exists())


def _gpu_names() -> str:
    import torch

    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


if __name__ == "__main__":
    sys.exit(main())
