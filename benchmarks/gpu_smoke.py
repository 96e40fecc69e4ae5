"""The payload on a real GPU, with every audit on: a random-weight model of a few hundred million parameters.

    python benchmarks/gpu_smoke.py [--steps 20] [--only NAME,NAME] [--work FOLDER]

Needs torch with CUDA and the payload's libraries, not the launcher. Each case is a bundle of its own, run as a user
would (``python train.py``) in its own process; figures come from the metadata that the run sealed. The last case must
stop: a mixture of experts whose experts stay 16-bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "payload"))

from burst_payload import manifest, records, seal, tiny  # noqa: E402
from burst_payload.model_files import fingerprint  # noqa: E402

DENSE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

CASES = (
    # name, model, quantization, adapter settings, train settings, expected exit code
    ("bf16", "dense", "none", {}, {}, 0),
    ("nf4", "dense", "nf4", {}, {}, 0),
    ("nf4, last 4 layers, rslora", "dense", "nf4", {"last_layers": 4, "rslora": True}, {}, 0),
    ("nf4, DoRA, no checkpointing", "dense", "nf4", {"dora": True}, {"gradient_checkpointing": "off"}, 0),
    ("experts, bf16", "experts", "none", {"targets": ["q_proj", "v_proj"]}, {}, 0),
    ("experts, nf4", "experts", "nf4", {"targets": ["q_proj", "v_proj"]}, {}, 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--work", type=Path, help="keep bundles and logs here")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="burst-gpu-smoke-"))
    folders = {"dense": make_model(work / "dense", DENSE), "experts": make_model(work / "experts", EXPERTS)}
    chosen = [case for case in CASES if options.only is None or case[0] in options.only.split(",")]
    results = [run_case(work, folders, case, options.steps) for case in chosen]
    print(json.dumps(results, indent=1))
    print_table(results)
    if options.work is None:
        shutil.rmtree(work)
    sys.exit(any(result["exit_code"] != result["expected"] for result in results))


def make_model(folder: Path, changes: dict) -> Path:
    """A checkpoint with random weights and the tiny model's byte tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    tiny.write_tokenizer(folder)
    config = {**tiny.CONFIG, **changes, "initializer_range": 0.02, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder.name}: {parameters:,} parameters", flush=True)
    del model
    torch.cuda.empty_cache()
    return folder


def run_case(work: Path, folders: dict[str, Path], case: tuple, steps: int) -> dict:
    name, model, quantization, adapter, train, expected = case
    bundle = work / "".join(char if char.isalnum() else "-" for char in name)
    write_bundle(bundle, folders[model], quantization, adapter, {"max_steps": steps, **train})
    began = time.monotonic()
    process = subprocess.run(
        [sys.executable, "train.py", "--model", str(folders[model])],
        cwd=bundle,
        text=True,
        capture_output=True,
        check=False,
    )
    result = {
        "case": name,
        "exit_code": process.returncode,
        "expected": expected,
        "wall_s": round(time.monotonic() - began, 1),
    }
    print(f"{name}: exit {process.returncode} after {result['wall_s']} s", flush=True)
    if process.returncode != expected:
        print(process.stdout[-3000:], process.stderr[-3000:], flush=True)
    if process.returncode == 0:
        seal.verify_seal(bundle / "out" / "adapter")
        metadata = json.loads((bundle / "out/adapter/metadata.json").read_bytes())
        events = [event for event in records.read_events(bundle / "out/events.jsonl") if event["event"] == "step"]
        rates = sorted(event["tokens_per_s"] for event in events if event["tokens_per_s"])
        result |= {
            "device": metadata["device"],
            "versions": metadata["versions"],
            "precision": metadata["precision"],
            "weight_bytes": metadata["weight_bytes"],
            "trainable": metadata["adapter"]["trainable_parameters"],
            "tokens_per_s": round(rates[len(rates) // 2]) if rates else None,
            "first_loss": metadata["losses"][0][1],
            "last_loss": metadata["losses"][-1][1],
            "phases_s": metadata["phases_s"],
        }
    else:
        result["error"] = process.stderr.strip()[-400:]
    return result


def write_bundle(bundle: Path, model: Path, quantization: str, adapter: dict, train: dict) -> None:
    """A bundle as the launcher writes it, without the launcher's dependencies."""
    shutil.copytree(ROOT / "payload", bundle, ignore=shutil.ignore_patterns("__pycache__", "requirements.in"))
    (bundle / "data").mkdir()
    rows = (ROOT / "examples/quickstart/train.jsonl").read_bytes().splitlines(keepends=True)
    (bundle / "data/train-000.jsonl").write_bytes(b"".join(rows))
    run = {
        "format": 1,
        "model": {"name": model.name, "kind": "local", "fingerprint": fingerprint(model)},
        "data": {
            "sources": [{"path": "data/train-000.jsonl", "rows": len(rows)}],
            "eval": None,
            "max_length": 1024,
            "on_overlong": "refuse",
            "score": "all",
            "chat_template": "model",
        },
        "adapter": {
            "rank": 16,
            "alpha": 32.0,
            "dropout": 0.0,
            "last_layers": None,
            "rslora": False,
            "dora": False,
            "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            **adapter,
        },
        "quantization": quantization,
        "train": {
            "epochs": 1.0,
            "max_steps": None,
            "batch": 4,
            "effective_batch": 8,
            "learning_rate": 1e-3,
            "scheduler": "cosine",
            "warmup_steps": 2,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "optimizer": "auto",
            "seed": 3407,
            "logging_steps": 1,
            "eval_steps": None,
            "save_steps": None,
            "gradient_checkpointing": "auto",
            **train,
        },
        "probes": {"rows": 1, "max_new_tokens": 16},
    }
    records.write_json(bundle / "run.json", run)
    entries = [
        manifest.Entry(path.relative_to(bundle).as_posix(), path.stat().st_size, records.sha256_file(path))
        for path in sorted(bundle.rglob("*"))
        if path.is_file()
    ]
    records.write_json(bundle / manifest.MANIFEST_NAME, manifest.to_json(entries))


def print_table(results: list[dict]) -> None:
    print(
        f"\n{'case':30} {'exit':>4} {'weights MiB':>11} {'trained':>11} {'peak GiB':>8} {'tokens/s':>9} {'loss':>16} {'s':>6}"
    )
    for result in results:
        if "device" not in result:
            print(f"{result['case']:30} {result['exit_code']:>4}  {result['error'].splitlines()[-2:]}")
            continue
        print(
            f"{result['case']:30} {result['exit_code']:>4} {result['weight_bytes'] / 2**20:>11.1f} "
            f"{result['trainable']:>11,} {result['device']['peak_memory_bytes'] / 2**30:>8.2f} "
            f"{result['tokens_per_s'] or 0:>9,} {result['first_loss']:>7.3f} → {result['last_loss']:<6.3f} "
            f"{result['wall_s']:>6}"
        )


if __name__ == "__main__":
    main()
