"""``builtin:tiny``: a small Llama-type model made on the spot, so that the main job needs no hub and no download.

Its tokenizer is byte-level (256 bytes and four special tokens, no merges) with a ChatML template. Weights come from a
seeded CPU generator: the same on every machine with the same torch.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from typing import TYPE_CHECKING, Any

from burst_payload.records import publish_directory

if TYPE_CHECKING:
    from pathlib import Path

NAME = "builtin:tiny"
VERSION = 1
EMBEDDING_SCALE = 6.0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "initializer_range": 0.05,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 259,
    "dtype": "float32",
}


def tokenizer_folder(cache: Path) -> Path:
    """A folder with the tokenizer and config files (no weights), made once. Needs ``tokenizers`` only."""
    return _once(cache / f"tiny-{VERSION}-tokenizer", write_tokenizer)


def model_folder(cache: Path) -> Path:
    """A complete checkpoint folder, made once. Needs torch and transformers."""
    return _once(cache / f"tiny-{VERSION}-model", _write_model)


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer, template and config files into ``folder``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "special_tokens_map.json", {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"})
    _write(folder / "generation_config.json", {"eos_token_id": 258, "pad_token_id": 259})
    _write(folder / "config.json", CONFIG)
    (folder / "chat_template.jinja").write_bytes(CHAT_TEMPLATE.encode())


def _write_model(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3407)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        with torch.no_grad():  # the head is tied to it: at the usual scale a frozen one cannot give sharp answers
            model.get_input_embeddings().weight.mul_(EMBEDDING_SCALE)
    model.save_pretrained(folder)
    write_tokenizer(folder)  # save_pretrained rewrites the config; burst's own stays the reference


def _once(final: Path, write: Any) -> Path:
    if final.is_dir():
        return final
    temporary = final.with_name(f".{final.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        publish_directory(temporary, final)
    except OSError:
        if not final.is_dir():  # another process may have been faster: its copy is as good
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _write(path: Path, value: Any) -> None:
    path.write_bytes((json.dumps(value, indent=2) + "\n").encode())
