"""The head on scored positions only, a tile of tokens at a time; no logits outlive their tile.

The head is frozen, so the gradient of each position's log-probability with respect to its hidden state is made while
its logits are there, and kept in their place: N·H numbers instead of N·V, and two products with the head where a
recomputation would need three. With z the logits and p = softmax(z): d log p_t / dz = onehot(t) - p.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from trl.trainer.utils import FusedCausalLMOutput

from burst_payload.chat import IGNORED_LABEL
from burst_payload.measures.patches import NotHere, Patches
from burst_payload.measures.structure import base_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from burst_payload.measures.apply import Subject

TILE_LOGITS = 2**25
"""Logits made at a time: 128 MiB in float32, 128 tokens of a vocabulary of 262,144."""


class Head(NamedTuple):
    """How a model makes logits of a hidden state: z = softcap·tanh(scale·(W h + b) / softcap)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    softcap: float | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [n, V] of hidden states [n, H]."""
        logits = torch.nn.functional.linear(hidden, self.weight.to(hidden.dtype), self.bias).float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Scores(NamedTuple):
    """Per position [n]: log-probability of the target (differentiable), entropy, and whether the target is the argmax."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    is_top1: torch.Tensor


def score(hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> Scores:
    """Score ``targets`` [n] against hidden states [n, H] of the positions before them."""
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    return Scores(*_Scores.apply(hidden, targets, head))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: Head) -> tuple[torch.Tensor, ...]:
        count, vocabulary = len(hidden), head.weight.shape[0]
        log_probs, entropy = (hidden.new_empty(count, dtype=torch.float32) for _ in range(2))
        is_top1 = torch.empty(count, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        tile = max(1, TILE_LOGITS // vocabulary)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, tile):
                part = slice(start, start + tile)
                z = head.logits(hidden[part])
                target = targets[part, None]
                is_top1[part] = z.argmax(-1) == targets[part]
                log_p = torch.log_softmax(z, -1)
                log_probs[part] = log_p.gather(-1, target).squeeze(-1)
                p = log_p.exp()
                entropy[part] = -(log_p.mul_(p)).sum(-1)
                if gradient is not None:
                    dz = p.neg_().scatter_add_(-1, target, torch.ones_like(target, dtype=p.dtype))
                    if head.softcap is not None:
                        dz.mul_(1 - (z / head.softcap).square_())
                    gradient[part] = dz.mul_(head.scale).to(hidden.dtype) @ head.weight.to(hidden.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None].to(gradient.dtype), None, None


def head_of(model: torch.nn.Module) -> Head:
    """The head of a model, checked on two tokens against the model's own logits. Raises ``NotHere`` where it differs."""
    base = base_of(model)
    module = base.get_output_embeddings()
    if not isinstance(module, torch.nn.Linear):
        raise NotHere("the head is not a plain matrix")
    if any(parameter.requires_grad for parameter in module.parameters()):
        raise NotHere("the head is trained")
    config = base.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    if scale is None:
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    head = Head(module.weight, module.bias, float(scale), getattr(config, "final_logit_softcapping", None))
    ids = torch.tensor([[0, 1]], device=module.weight.device)
    was_training = base.training
    base.eval()
    try:
        with torch.no_grad():
            expected = base(input_ids=ids, use_cache=False).logits[0].float()
            hidden = base.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            found = head.logits(hidden.to(module.weight.dtype))
    finally:
        base.train(was_training)
    if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise NotHere("the model makes its logits in another way than head, scale and soft cap")
    return head


def apply(subject: Subject) -> Patches:
    """Take the place of the trainer's fused head: the same output, for ``fused_lm_head=True`` only."""
    base = base_of(subject.model)
    if "forward" not in vars(base):
        raise NotHere("the trainer put no fused head on this model")
    head = head_of(base)
    patches = Patches(f"tiles of {max(1, TILE_LOGITS // head.weight.shape[0])} tokens")
    patches.set(base, "forward", types.MethodType(_forward(base.forward, head), base))
    return patches


def _forward(original: Any, head: Head) -> Any:
    @functools.wraps(original.__func__)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head or kwargs.get("output_router_logits") or kwargs.get("shift_labels") is not None:
            return original(*args, fused_lm_head=fused_lm_head, **kwargs)
        labels = kwargs.pop("labels")[:, 1:]
        kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        hidden = self.base_model(*args, **kwargs).last_hidden_state[:, :-1]
        mask = labels != IGNORED_LABEL
        scores = score(hidden[mask], labels[mask], head)
        log_probs, entropy, is_top1 = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in scores)
        return FusedCausalLMOutput(
            loss=-log_probs.sum() / mask.sum().clamp(min=1),
            log_probs=log_probs,
            entropy=entropy,
            is_top1=is_top1,
            label_mask=mask,
        )

    return forward
