"""Count exactly right JSON answers of a model, with or without an adapter.

    PYTHON examples/evaluate.py MODEL --data heldout.jsonl [--adapter FOLDER] [--rows N] [--json]

PYTHON is the training environment's (``burst env`` prints it). A row's last turn is the expected answer; an answer is right
when it is one JSON value, nothing around it, equal to the expected one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MAX_NEW_TOKENS = 48


def main() -> None:
    parser = argparse.ArgumentParser(description="Count exactly right JSON answers.")
    parser.add_argument("model", help="the base model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--rows", type=int, help="only the first so many rows")
    parser.add_argument("--json", action="store_true", help="print counts and answers as JSON")
    options = parser.parse_args()

    rows = [json.loads(line)["messages"] for line in options.data.read_text(encoding="utf-8").split("\n") if line]
    rows = rows[: options.rows]
    given = answers(options.model, options.adapter, [row[:-1] for row in rows])
    right = [is_right(answer, row[-1]["content"]) for answer, row in zip(given, rows, strict=True)]
    if options.json:
        print(json.dumps({"rows": len(rows), "right": sum(right), "answers": given}))
    else:
        print(f"{sum(right)} of {len(rows)} exactly right")


def answers(model_name: str, adapter: Path | None, conversations: list[list[dict[str, str]]]) -> list[str]:
    """Greedy answers, one conversation at a time."""
    tokenizer = AutoTokenizer.from_pretrained(adapter or model_name)
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype="auto")
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    model.eval().to("cuda" if torch.cuda.is_available() else "cpu")
    given = []
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
        with torch.no_grad():
            output = model.generate(
                **inputs,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        given.append(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
    return given


def is_right(answer: str, expected: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(expected))
    except ValueError:
        return False


if __name__ == "__main__":
    main()
