"""Gated MLPs a tile of tokens at a time.

The peak of a layer is in its MLP: gate, up and their product are each tokens x intermediate numbers, several times the
hidden state. Tokens do not see each other there, so the MLP runs tile by tile, keeps its input alone, and in the
backward pass runs each tile again with a graph of its own. The cost is that second run. A parameter's gradient is the
sum over tiles, made in float32 and handed to autograd once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from burst_payload.measures.patches import NotHere, Patches
from burst_payload.measures.structure import gated_mlps

if TYPE_CHECKING:
    from burst_payload.measures.apply import Subject


def apply(subject: Subject) -> Patches:
    """Raises ``NotHere`` where the model has no gated MLP outside of its experts."""
    found = gated_mlps(subject.model)
    if not found:
        raise NotHere("no gated MLP was found outside of experts: none was tiled")
    patches = Patches(f"{len(found)} MLPs in tiles of {subject.tile_tokens} tokens")
    for mlp in found:
        patches.set(mlp, "forward", _tiled(mlp, mlp.forward, subject.tile_tokens))
    return patches


def _tiled(mlp: torch.nn.Module, forward: Any, tile: int) -> Any:
    def wrapped(hidden: torch.Tensor) -> torch.Tensor:
        if hidden[..., 0].numel() <= tile:
            return forward(hidden)
        if not torch.is_grad_enabled():
            flat = hidden.reshape(-1, hidden.shape[-1])
            return torch.cat([forward(part) for part in flat.split(tile)]).view(hidden.shape)
        trained = [parameter for parameter in mlp.parameters() if parameter.requires_grad]
        return _Tiles.apply(hidden, forward, tile, *trained)

    return wrapped


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, run: Any, tile: int, *trained: torch.Tensor) -> torch.Tensor:
        device = hidden.device.type
        ctx.run, ctx.tile = run, tile
        ctx.autocast = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        ctx.save_for_backward(hidden, *trained)
        flat = hidden.reshape(-1, hidden.shape[-1])
        with torch.no_grad():
            return torch.cat([run(part) for part in flat.split(tile)]).view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        hidden, *trained = ctx.saved_tensors
        wanted = [p for p, needed in zip(trained, ctx.needs_input_grad[3:], strict=True) if needed]
        of_hidden = ctx.needs_input_grad[0]
        width = hidden.shape[-1]
        hidden_grad = torch.empty_like(hidden) if of_hidden else None
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in wanted]
        dtype, enabled = ctx.autocast
        for index, (part, part_grad) in enumerate(
            zip(hidden.reshape(-1, width).split(ctx.tile), grad.reshape(-1, width).split(ctx.tile), strict=True)
        ):
            leaf = part.detach().requires_grad_(of_hidden)
            with torch.enable_grad(), torch.autocast(hidden.device.type, dtype=dtype, enabled=enabled):
                output = ctx.run(leaf)
            found = torch.autograd.grad(output, ([leaf] if of_hidden else []) + wanted, part_grad)
            if hidden_grad is not None:
                hidden_grad.view(-1, width)[index * ctx.tile : index * ctx.tile + len(part)] = found[0]
            for total, gradient in zip(sums, found[of_hidden:], strict=True):
                total.add_(gradient)
        grads = iter(total.to(p.dtype) for total, p in zip(sums, wanted, strict=True))
        return hidden_grad, None, None, *(next(grads) if needed else None for needed in ctx.needs_input_grad[3:])
