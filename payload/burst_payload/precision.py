"""Which number formats a run computes in, decided from the device's compute capability alone, with the reason.

``torch.cuda.is_bf16_supported()`` is not asked: it answers True on Turing, where bfloat16 is emulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Precision:
    """``compute`` is the format of the frozen weights' products, ``adapter`` that of the trained weights."""

    compute: Dtype
    adapter: Dtype
    reason: str


def choose(capability: tuple[int, int] | None, model_type: str, quantized: bool) -> Precision:
    """The precision for a device of this CUDA compute capability (None: the CPU).

    bfloat16 needs 8.0. Below it, float16 with float32 adapters (a gradient scaler cannot scale bfloat16 gradients);
    Gemma 3 overflows in float16, so there it computes in float32.
    """
    if capability is None:
        return Precision("float32", "float32", "CPU: full precision")
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        # TRL casts the adapters of a quantized model to bfloat16; beside 16-bit weights PEFT keeps them in float32
        return Precision(
            "bfloat16", "bfloat16" if quantized else "float32", f"{name}: bfloat16 in hardware (8.0 and up)"
        )
    if model_type.startswith("gemma3"):
        return Precision("float32", "float32", f"{name}: no bfloat16 below 8.0, and Gemma 3 overflows in float16")
    return Precision("float16", "float32", f"{name}: no bfloat16 below 8.0, so float16 with float32 adapters")


def has_kernels(capability: tuple[int, int], arch_list: list[str]) -> bool:
    """Whether a torch build can run on this capability.

    ``arch_list`` is ``torch.cuda.get_arch_list()``: machine code ``sm_XY`` runs on the same major version from that
    minor on, and PTX ``compute_XY`` can be compiled for anything newer.
    """
    major, minor = capability
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        number = "".join(char for char in digits if char.isdigit())
        if len(number) < 2:
            continue
        built = (int(number[:-1]), int(number[-1]))
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False
