"""A projection and its LoRA pair as one autograd function that keeps its input alone.

y = x Wᵀ + s (x Aᵀ) Bᵀ, and with g = dL/dy: dx = g W + s (g B) A, dA = s (g B)ᵀ x, dB = s gᵀ (x Aᵀ). A 4-bit W is
dequantized once forward and once backward; x Aᵀ, rank numbers a token, is made again rather than kept; nothing is cloned
or added out of place.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer

from burst_payload.measures.patches import NotHere, Patches

if TYPE_CHECKING:
    from burst_payload.measures.apply import Subject


def apply(subject: Subject) -> Patches:
    """Raises ``NotHere`` where no projection has a plain LoRA pair (one adapter, no dropout, no DoRA, no bias)."""
    found = [module for module in subject.model.modules() if isinstance(module, LoraLayer) and _is_plain(module)]
    if not found:
        raise NotHere("no projection has a plain LoRA pair")
    patches = Patches(f"{len(found)} projections")
    for layer in found:
        patches.set(layer, "forward", _fused(layer, layer.forward))
    return patches


def _is_plain(layer: LoraLayer) -> bool:
    base = layer.get_base_layer()
    adapters = list(layer.lora_A)
    return (
        isinstance(base, torch.nn.Linear)
        and base.weight.ndim == 2
        and len(adapters) == 1
        and not layer.lora_variant
        and not layer.lora_bias[adapters[0]]
        and isinstance(layer.lora_dropout[adapters[0]], torch.nn.Identity)
        and not any(parameter.requires_grad for parameter in base.parameters())
    )


def weight_of(base: torch.nn.Linear, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in] of a linear layer in ``dtype``; a 4-bit one is dequantized."""
    state = getattr(base.weight, "quant_state", None)
    if state is None:
        return base.weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(base.weight.data, state).to(dtype)


def _fused(layer: Any, forward: Any) -> Any:
    (name,) = layer.lora_A

    @functools.wraps(forward)
    def wrapped(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args or kwargs or layer.disable_adapters or layer.merged or layer.active_adapters != [name]:
            return forward(x, *args, **kwargs)
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        return _LoraLinear.apply(x, layer.get_base_layer(), a, b, layer.scaling[name])

    return wrapped


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, base: torch.nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float
    ) -> torch.Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        ctx.base, ctx.scale = base, scale
        ctx.compute = torch.get_autocast_dtype(device) if autocast else x.dtype
        ctx.low = ctx.compute if autocast else a.dtype  # PEFT's rule: without autocast the pair works in its own format
        ctx.save_for_backward(x, a, b)
        with torch.autocast(device, enabled=False):
            flat = x.reshape(-1, x.shape[-1]).to(ctx.compute)
            bias = None if base.bias is None else base.bias.to(ctx.compute)
            y = torch.nn.functional.linear(flat, weight_of(base, ctx.compute), bias)
            low = flat.to(ctx.low) @ a.to(ctx.low).t()
            if ctx.low == ctx.compute:
                y.addmm_(low, b.to(ctx.low).t(), alpha=scale)
            else:
                y += ((low @ b.to(ctx.low).t()) * scale).to(ctx.compute)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, a, b = ctx.saved_tensors
        need_x, _, need_a, need_b, _ = ctx.needs_input_grad
        flat = x.reshape(-1, x.shape[-1])
        g = grad.reshape(-1, grad.shape[-1]).to(ctx.compute)
        low_x, low_g = flat.to(ctx.low), g.to(ctx.low)
        low_a, low_b = a.to(ctx.low), b.to(ctx.low)
        through_b = (low_g @ low_b) * ctx.scale  # [n, rank]
        x_grad = a_grad = b_grad = None
        if need_a:
            a_grad = (through_b.t() @ low_x).to(a.dtype)
        if need_b:
            b_grad = (low_g.t() @ (low_x @ low_a.t()) * ctx.scale).to(b.dtype)
        if need_x:
            out = g @ weight_of(ctx.base, ctx.compute)
            if ctx.low == ctx.compute:
                out.addmm_(through_b, low_a)
            else:
                out += (through_b @ low_a).to(ctx.compute)
            x_grad = out.view(x.shape).to(x.dtype)
        return x_grad, None, a_grad, b_grad, None
