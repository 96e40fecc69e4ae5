"""Greedy answers to held-out rows, so that a person sees what training changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from burst_payload.chat import IGNORED_LABEL

if TYPE_CHECKING:
    from burst_payload.chat import Example
    from burst_payload.tokens import TokenizerFacts


class Probe(NamedTuple):
    """A prompt as token ids, its text's end for people, and the answer that the data gives."""

    prompt_ids: list[int]
    asked: str
    expected: str


def from_example(example: Example, facts: TokenizerFacts) -> Probe:
    """The last scored turn of a row as a question: everything before it is the prompt."""
    stop = max(i for i, label in enumerate(example.labels) if label != IGNORED_LABEL) + 1
    start = stop
    while start > 0 and example.labels[start - 1] != IGNORED_LABEL:
        start -= 1
    prompt = example.input_ids[:start]
    return Probe(
        prompt_ids=prompt,
        asked=last_turn(facts.tokenizer.decode(prompt, skip_special_tokens=False), facts),
        expected=facts.tokenizer.decode(example.input_ids[start:stop], skip_special_tokens=True),
    )


def last_turn(text: str, facts: TokenizerFacts) -> str:
    """The last turn with words in it: what stands between the last two special tokens before the answer."""
    for token in facts.special:
        text = text.replace(token, "\0")
    parts = [part.strip() for part in text.split("\0") if part.strip()]
    turn = parts[-2] if len(parts) >= 2 else (parts[-1] if parts else "")
    role, _, content = turn.partition("\n")
    return content.strip() if content and role.isalpha() else turn


def answer(model: Any, probe: Probe, facts: TokenizerFacts, max_new_tokens: int) -> str:
    """The model's greedy answer, special tokens left out."""
    import torch

    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    ids = torch.tensor([probe.prompt_ids or [facts.eos_id or 0]], device=device)
    try:
        with torch.no_grad():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(facts.eos_ids) or None,
                pad_token_id=min(facts.eos_ids, default=0),
                use_cache=True,
            )
    finally:
        model.train(was_training)
    return str(facts.tokenizer.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=True))
