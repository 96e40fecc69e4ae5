"""Checks before, at and after the first optimizer step. Each one is a ``Stop`` with the reason, never a warning."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from burst_payload.chat import IGNORED_LABEL
from burst_payload.model import NOT_TEXT, layer_count
from burst_payload.stop import ExitCode, Stop

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel

    from burst_payload.chat import Example
    from burst_payload.config import Adapter
    from burst_payload.tokens import TokenizerFacts

NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256
"""bitsandbytes' block sizes: one 8-bit absmax per 64 weights, one float32 per 256 of those (QLoRA, section 3)."""


def nf4_bytes(parameters: int) -> int:
    """Bytes of ``parameters`` weights in NF4 with double quantization, code tables left out."""
    blocks = math.ceil(parameters / NF4_BLOCK)
    return math.ceil(parameters / 2) + blocks + 4 * math.ceil(blocks / NF4_NESTED_BLOCK)


def expected_weight_bytes(skeleton: PreTrainedModel, item_bytes: int, quantized: bool) -> dict[str, int]:
    """Bytes of each parameter as it should be after loading, by name, from a model without storage (meta device).

    In NF4 every matrix of a linear layer and every fused expert tensor is 4-bit; the head, embeddings and norms stay.
    """
    quantizable = set()
    if quantized:
        import torch

        head = skeleton.get_output_embeddings()
        for name, module in skeleton.named_modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                quantizable.add(f"{name}.weight")
        quantizable |= {name for name, parameter in skeleton.named_parameters() if parameter.ndim == 3}
    return {
        name: nf4_bytes(parameter.numel()) if name in quantizable else parameter.numel() * item_bytes
        for name, parameter in skeleton.named_parameters()
    }


def actual_weight_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Bytes that each parameter takes now, quantization statistics included (code tables left out)."""
    sizes = {}
    for name, parameter in model.named_parameters():
        size = parameter.nbytes
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            size += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        sizes[name] = size
    return sizes


def check_weight_bytes(model: PreTrainedModel, item_bytes: int, quantized: bool) -> int:
    """Stop unless every parameter takes exactly its predicted bytes. Returns the total."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    expected = expected_weight_bytes(skeleton, item_bytes, quantized)
    actual = actual_weight_bytes(model)
    wrong = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    if wrong:
        total, planned = sum(actual.values()), sum(expected.values())
        experts = [name for name in wrong if "experts" in name]
        why = (
            f"the experts of this mixture-of-experts model stay in {8 * item_bytes} bits although 4-bit was asked for"
            if experts and quantized
            else f"{wrong[0]} takes {actual.get(wrong[0], 0):,} bytes instead of {expected.get(wrong[0], 0):,}"
        )
        raise Stop(
            f"the weights take {total:,} bytes instead of the predicted {planned:,}: {why} "
            f"({len(wrong)} of {len(expected)} parameters differ)",
            "set quantization: none and a card that holds it, or choose a dense model",
        )
    return sum(actual.values())


def expected_trainable(model: PreTrainedModel, adapter: Adapter, targets: list[str]) -> int:
    """LoRA parameters = sum over targeted matrices of rank·(in + out) (Hu et al. 2021), plus out per matrix for DoRA.

    Fused experts hold one matrix per expert; PEFT gives the fused gate-and-up tensor twice the rank.
    """
    import torch

    excluded = re.compile(NOT_TEXT)
    layers = layer_count(model)
    first = layers - adapter.last_layers if adapter.last_layers is not None else 0
    total = 0
    for name, module in model.named_modules():
        if (
            isinstance(module, torch.nn.Linear)
            and name.rpartition(".")[2] in targets
            and not excluded.fullmatch(name)
            and _layer_index(name) >= first
        ):
            total += adapter.rank * (module.in_features + module.out_features)
            total += module.out_features if adapter.dora else 0
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and ".experts." in name and _layer_index(name) >= first and not excluded.fullmatch(name):
            leaf = name.rpartition(".")[2]
            experts, rows, columns = parameter.shape
            if leaf == "gate_up_proj" and {"gate_proj", "up_proj"} <= set(targets):
                total += experts * 2 * adapter.rank * (rows + columns)
            elif leaf in targets:
                total += experts * adapter.rank * (rows + columns)
    return total


def _layer_index(name: str) -> int:
    """The first number of a module path: the layer it belongs to; a large number outside of layers."""
    match = re.search(r"\.(\d+)\.", name)
    return int(match.group(1)) if match else 1 << 30


def trainable(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def check_trainable(model: PeftModel, expected: int) -> int:
    """Stop unless exactly the predicted number of parameters is trained. Returns it.

    PEFT 0.21 reaches fused experts for some families only, then in all layers, and leaves out shared experts beside them.
    """
    found = trainable(model)
    if found != expected:
        experts = any(parameter.ndim == 3 and ".experts." in name for name, parameter in model.named_parameters())
        raise Stop(
            f"{found:,} parameters would be trained instead of the {expected:,} that the adapter has by formula"
            + (": PEFT does not reach the experts of this model as asked" if experts else ""),
            "set adapter.targets to the attention layers, for example [q_proj, k_proj, v_proj, o_proj]"
            if experts
            else "check adapter.targets and adapter.last_layers against the model's layer names",
            ExitCode.INVALID,
        )
    if found == 0:
        raise Stop("no parameter would be trained", "check adapter.targets against the model's layer names")
    return found


def check_adapter_dtype(model: PeftModel, expected: str) -> None:
    """Stop unless the trained weights have the format that was decided; libraries like to cast them on the way."""
    wrong = {
        str(p.dtype).removeprefix("torch.")
        for n, p in model.named_parameters()
        if p.requires_grad and "lora_magnitude_vector" not in n
    } - {expected}
    if wrong:
        raise Stop(
            f"the adapter is in {', '.join(sorted(wrong))} instead of {expected}",
            "report this: the trainer cast the adapter",
        )


def check_labels(examples: list[Example], facts: TokenizerFacts, vocabulary: int) -> None:
    """Stop unless every row has scored tokens, all ids exist, and answers end where generation ends."""
    unscored = [index for index, example in enumerate(examples) if all(x == IGNORED_LABEL for x in example.labels)]
    if unscored:
        raise Stop(f"{len(unscored)} rows have no scored token, the first is row {unscored[0] + 1}", "run burst check")
    largest = max(max(example.input_ids) for example in examples)
    if largest >= vocabulary:
        raise Stop(
            f"token id {largest} is outside of the model's {vocabulary} embeddings",
            "the tokenizer does not belong to this model",
        )
    if not facts.eos_ids:
        raise Stop(
            "the tokenizer names no EOS token: answers would never end",
            "set eos_token in the model's tokenizer_config.json",
        )


def check_tokenizers_agree(examples: list[Example], facts: TokenizerFacts, tokenizer: Any) -> None:
    """Stop unless transformers' tokenizer, which serving uses, decodes and knows special tokens as burst's does."""
    longest = max(examples, key=lambda example: len(example.input_ids))
    text = facts.tokenizer.decode(longest.input_ids, skip_special_tokens=False)
    if tokenizer.decode(longest.input_ids, skip_special_tokens=False) != text:
        raise Stop(
            "transformers decodes the longest row to another text than the tokenizer file does",
            "save the tokenizer anew with AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)",
        )
    if facts.eos_id is not None and tokenizer.eos_token_id != facts.eos_id:
        raise Stop(
            f"transformers takes {tokenizer.eos_token!r} as EOS, the tokenizer file says {facts.eos!r}",
            "make eos_token agree in the model's tokenizer files",
        )


def untouched(model: PeftModel, initial: dict[str, torch.Tensor]) -> list[str]:
    """The ``lora_B`` matrices that an optimizer step did not move."""
    import torch

    return [
        name
        for name, parameter in model.named_parameters()
        if name in initial and torch.equal(parameter.detach().cpu(), initial[name])
    ]


def lora_b(model: PeftModel) -> dict[str, torch.Tensor]:
    """Copies of all trained ``lora_B`` matrices (zero before the first step), by name."""
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and "lora_B" in name
    }
