"""Layer boundaries in host memory.

With checkpointing one hidden state for each layer waits for the backward pass. Here each waits in a host buffer, taken
from a pool that is filled once and used again in every step, so that nothing is allocated or pinned on the way. On a
GPU both directions run on a stream of their own: out while the next layer computes, back one layer ahead of its use.
Pages are pinned where that works; under WSL it does not, and the copies are then plain ones.
"""

from __future__ import annotations

import functools
import platform
import weakref
from typing import TYPE_CHECKING, Any

import torch

from burst_payload.measures.patches import NotHere, Patches
from burst_payload.measures.structure import decoder_layers, first_trained_layer

if TYPE_CHECKING:
    from burst_payload.measures.apply import Subject


def apply(subject: Subject) -> Patches:
    """Needs checkpointing: without it a layer keeps much more than its input."""
    layers = decoder_layers(subject.model)
    layers = layers[first_trained_layer(subject.model) :]
    if not any(layer.gradient_checkpointing for layer in layers) and subject.trainer is None:
        raise NotHere("gradient checkpointing is off")
    device = next(subject.model.parameters()).device
    pool = Pool(device, pinned=can_pin(device))
    how = "pinned memory" if pool.pinned else "pageable memory"
    patches = Patches(f"inputs of {len(layers)} layers in {how}{'' if pool.stream else ', copied in line'}")
    for layer in layers:
        patches.set(layer, "forward", _parking(layer.forward, pool))
    return patches


def can_pin(device: torch.device) -> bool:
    """Whether page-locked memory can be had; WSL's driver grants it and then fails with "device not ready"."""
    if device.type != "cuda" or "microsoft" in platform.release().lower():
        return False
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError:
        return False
    return True


def _parking(forward: Any, pool: Pool) -> Any:
    @functools.wraps(forward)
    def wrapped(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)

        def pack(tensor: torch.Tensor) -> Any:
            same = tensor.data_ptr() == hidden.data_ptr() and tensor.shape == hidden.shape
            return pool.park(tensor) if same else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return forward(hidden, *args, **kwargs)

    return wrapped


def _unpack(kept: Any) -> torch.Tensor:
    return kept.back() if isinstance(kept, Parked) else kept  # type: ignore[no-any-return]


class Pool:
    """Host buffers, each as large as the largest boundary seen; as many as boundaries wait at a time."""

    def __init__(self, device: torch.device, *, pinned: bool) -> None:
        self.pinned = pinned
        self.stream = torch.cuda.Stream(device) if pinned else None
        self.size_bytes = 0
        self.made = 0
        self.free: list[torch.Tensor] = []
        self.last: weakref.ref[Parked] | None = None

    def park(self, tensor: torch.Tensor) -> Parked:
        parked = Parked(self, self._buffer(tensor.nbytes), tensor, self.last() if self.last else None)
        self.last = weakref.ref(parked)
        return parked

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        if size_bytes > self.size_bytes:  # smaller buffers are let go: the next ones are all of the new size
            self.size_bytes = size_bytes
            self.free.clear()
        while self.free:
            buffer = self.free.pop()
            if buffer.nbytes >= size_bytes:
                return buffer
        self.made += 1
        return torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=self.pinned)


class Parked:
    """One tensor in a host buffer. ``back`` brings it to its device again, and sends for the one parked before it."""

    def __init__(self, pool: Pool, buffer: torch.Tensor, tensor: torch.Tensor, before: Parked | None) -> None:
        self.pool, self.device = pool, tensor.device
        self.before = weakref.ref(before) if before is not None else None
        self.host = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.coming: torch.Tensor | None = None
        weakref.finalize(self, pool.free.append, buffer).atexit = False
        if pool.stream is None:
            self.host.copy_(tensor)
            return
        pool.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(pool.stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(pool.stream)  # its memory is not used again before the copy is done

    def back(self) -> torch.Tensor:
        if self.pool.stream is None:
            return self.host.to(self.device, copy=True)
        if self.coming is None:
            self.send()
        tensor, self.coming = self.coming, None
        assert tensor is not None
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.pool.stream)
        tensor.record_stream(current)
        before = self.before() if self.before else None
        if before is not None and before.coming is None:
            before.send()
        return tensor

    def send(self) -> None:
        """Start the copy to the device; same stream as the copies out, so the buffer is never written too early."""
        with torch.cuda.stream(self.pool.stream):
            self.coming = torch.empty_like(self.host, device=self.device)
            self.coming.copy_(self.host, non_blocking=True)
