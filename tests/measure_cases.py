"""Run by the payload's interpreter: each measure against the plain model, in float32 on the CPU, as JSON.

    python measure_cases.py

Prints ``{case: {"loss": relative difference, "gradient": largest relative difference of any tensor, ...}}``. The plain
model is transformers' own forward with PEFT's own layers; its loss is the cross entropy of its full logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "payload"))
from burst_payload import model, tiny, trainer
from burst_payload.chat import Example
from burst_payload.config import Adapter, Data, Model, Probes, RunConfig, Source, Train
from burst_payload.measures.apply import Applied, apply
from burst_payload.precision import Precision
from burst_payload.stop import Stop
from model_audits import FAMILIES, SEVEN, SMALL

warnings.filterwarnings("ignore")
WORK = Path(tempfile.mkdtemp())
tiny.write_tokenizer(WORK)
TOKENIZER = AutoTokenizer.from_pretrained(WORK)
FLOAT32 = Precision("float32", "float32", "a test")
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def config_of(checkpointing: bool, measures: list[str] | None, **changes: object) -> RunConfig:
    adapter = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": SEVEN, "last_layers": None, "rslora": False}
    train = {
        "epochs": 1.0, "max_steps": None, "batch": 1, "effective_batch": 4, "learning_rate": 1e-2, "scheduler": "constant",
        "warmup_steps": 0, "weight_decay": 0.0, "max_grad_norm": 0.0, "optimizer": "auto", "seed": 1, "logging_steps": 1,
        "eval_steps": None, "save_steps": None,
    }  # fmt: skip
    return RunConfig(
        Model("tiny", "local"),
        Data([Source("rows", 1)], None, 512, "refuse", "all", "none"),
        Adapter(**{**adapter, "dora": False, **{k: v for k, v in changes.items() if k in adapter}}),
        "none",
        Train(
            **{**train, **{k: v for k, v in changes.items() if k in train}},
            gradient_checkpointing="on" if checkpointing else "off",
            measures=measures,
        ),
        Probes(0, 1),
    )


def adapted(family: str, config: RunConfig, **changes: object):
    """A small random model with an adapter whose B matrices are not zero, so that every gradient says something."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family], "tie_word_embeddings": False, **changes})
    )
    base.requires_grad_(False)
    lora = model.lora_config(config.adapter, config.adapter.targets, model.layer_count(base))
    wrapped = model.attach(base, lora, 1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    return wrapped


def rows_of(lengths: list[int], prefix: int = 0, seed: int = 0, scored: float = 0.5) -> list[Example]:
    """Random rows whose first ``prefix`` tokens are equal; about ``scored`` of the tokens are scored, at random places."""
    chance = torch.Generator().manual_seed(seed)
    shared = torch.randint(3, 120, (prefix,), generator=chance).tolist()
    rows = []
    for length in lengths:
        own = torch.randint(3, 120, (length - prefix,), generator=chance).tolist()
        ids = shared + own
        chosen = torch.rand(length, generator=chance) < scored
        chosen[-1] = True
        rows.append(Example(ids, [x if keep else -100 for x, keep in zip(ids, chosen.tolist(), strict=True)]))
    return rows


def built(wrapped, config: RunConfig, rows: list[Example]):
    """The run's own trainer."""
    arguments = trainer.training_arguments(config, FLOAT32, WORK, on_gpu=False, evaluates=False)
    progress = trainer.Progress(lambda *a, **k: None, {}, config.train, 1, evaluates=False)
    return trainer.build(wrapped, arguments, TOKENIZER, rows, [], progress, None)


def plain(family: str, rows: list[Example], config: RunConfig, **changes: object) -> tuple[float, dict]:
    """Loss of an optimizer window and its gradients: one full forward of each row, nothing kept back."""
    wrapped = adapted(family, config, **changes).train()
    count = sum(label != -100 for row in rows for label in row.labels[1:])
    total = 0.0
    for row in rows:
        logits = wrapped(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:]), reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total, gradients(wrapped)


def measured(
    family: str, rows: list[Example], config: RunConfig, before=lambda loop: None, **changes: object
) -> tuple[float, dict, Applied, object]:
    """The same window through the run's trainer with its measures on: its batches, its loss, its backward."""
    loop = built(adapted(family, config, **changes), config, rows)
    if config.train.gradient_checkpointing == "on":  # what train() does at its start
        loop.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before(loop)
    applied = apply(loop, config, False, lambda *a, **k: None, tile_tokens=7)
    return *window(loop), applied, loop


def window(loop) -> tuple[float, dict]:
    loop.model.zero_grad()
    loop.create_optimizer()
    batches, count = loop.get_batch_samples(iter(loop.get_train_dataloader()), 4, torch.device("cpu"))
    loop.current_gradient_accumulation_steps = len(batches)
    total = sum(loop.training_step(loop.model, batch, count).item() for batch in batches)
    return total, gradients(loop.model)


def gradients(wrapped) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in wrapped.named_parameters() if p.grad is not None}


def difference(expected: tuple[float, dict], found: tuple[float, dict]) -> dict[str, float]:
    assert expected[1].keys() == found[1].keys(), expected[1].keys() ^ found[1].keys()
    relative = [float((found[1][name] - gradient).norm() / gradient.norm()) for name, gradient in expected[1].items()]
    return {"loss": abs(found[0] - expected[0]) / expected[0], "gradient": max(relative), "tensors": len(relative)}


def equal(family: str, measures: list[str], rows: list[Example], checkpointing: bool, **changes: object) -> dict:
    """Differences of a measured window from the plain one, then of a window after the measures were undone."""
    config = config_of(checkpointing, measures, **changes)
    kept = {k: v for k, v in changes.items() if k not in vars(config.adapter) and k not in vars(config.train)}
    reference = plain(family, rows, config, **kept)
    *found, applied, loop = measured(family, rows, config, **kept)
    assert list(applied.patches) == measures, applied.record()
    result = difference(reference, tuple(found)) | {"detail": " ".join(p.detail for p in applied.patches.values())}
    applied.undo()
    result["undone"] = difference(reference, window(loop))["gradient"]
    assert not [name for name, module in loop.model.named_modules() if "forward" in vars(module)][1:], (
        "undo left something"
    )
    return result


@case
def scored_logits() -> dict:
    rows = rows_of([40, 33, 21, 12])
    return {
        f"{family} checkpointing={on}": equal(family, ["scored_logits"], rows, on)
        for family in ("llama", "gemma2", "qwen3")
        for on in (False, True)
    }


@case
def scored_logits_in_several_tiles() -> dict:
    from burst_payload.measures import scored_logits as measure

    measure.TILE_LOGITS, before = 128 * 3, measure.TILE_LOGITS
    try:
        return {"gemma2": equal("gemma2", ["scored_logits"], rows_of([40, 33, 21, 12]), False)}
    finally:
        measure.TILE_LOGITS = before


@case
def graph_cut() -> dict:
    rows = rows_of([24, 17, 9, 5])
    return {
        f"{family} checkpointing={on}": equal(family, ["graph_cut"], rows, on, last_layers=2)
        for family in ("llama", "gemma3_text")
        for on in (False, True)
    }


@case
def graph_cut_keeps_and_recomputes_nothing_below() -> dict:
    """Calls of each layer's own forward in one step, and the tensors that the graph holds of lower layers."""
    rows, counts = rows_of([24]), {}
    for measures in ([], ["graph_cut"]):
        config = config_of(True, measures, last_layers=1, effective_batch=1)
        calls = [0] * 4

        def count(loop, calls=calls) -> None:
            for index, layer in enumerate(loop.model.get_base_model().model.layers):
                layer.input_layernorm.register_forward_pre_hook(lambda *_, i=index: calls.__setitem__(i, calls[i] + 1))

        measured("llama", rows, config, count)
        counts[" ".join(measures) or "plain"] = calls
    return counts


@case
def tiled_mlp() -> dict:
    """Rows of several tiles of 7 tokens, the last one not full; phi3 has gate and up in one matrix."""
    rows = rows_of([40, 33, 14, 5])
    found = {
        f"{family} checkpointing={on}": equal(family, ["tiled_mlp"], rows, on, targets=targets)
        for family, targets in (
            ("llama", SEVEN),
            ("gemma3_text", SEVEN),
            ("phi3", ["qkv_proj", "gate_up_proj", "down_proj"]),
        )
        for on in (False, True)
    }
    return found | {"frozen MLP": equal("llama", ["tiled_mlp"], rows, True, targets=SEVEN[:4])}


@case
def tiled_mlp_sees_tiles() -> dict:
    """Tokens of each call of one down projection: forward, and the second run in the backward pass."""
    seen: list[int] = []

    def watch(loop) -> None:
        mlp = loop.model.get_base_model().model.layers[0].mlp
        mlp.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[-2]))

    measured("llama", rows_of([20]), config_of(False, ["tiled_mlp"], effective_batch=1), watch)
    return {"tokens": seen}


@case
def tiled_mlp_leaves_experts_alone() -> dict:
    found = {}
    for family in ("qwen3_moe", "qwen3_next"):
        try:
            measured(family, rows_of([12, 9, 7, 5]), config_of(False, ["tiled_mlp"], targets=["q_proj", "v_proj"]))
        except Stop as stop:
            found[family] = stop.what
    *_, applied, _ = measured(  # every other layer is dense
        "qwen3_moe", rows_of([12, 9, 7, 5]), config_of(False, ["tiled_mlp"], targets=["q_proj"]), decoder_sparse_step=2
    )
    return found | {"mixed": applied.patches["tiled_mlp"].detail}


@case
def boundary_offload() -> dict:
    rows = rows_of([24, 17, 9, 5])
    return {
        "llama": equal("llama", ["boundary_offload"], rows, True),
        "gemma3_text": equal("gemma3_text", ["boundary_offload"], rows, True),
        "last two layers": equal("llama", ["graph_cut", "boundary_offload"], rows, True, last_layers=2),
    }


@case
def boundary_offload_uses_its_buffers_again() -> dict:
    """Buffers made in one window and in a second one; what waits on the device meanwhile; none is left in use."""
    config = config_of(True, ["boundary_offload"], effective_batch=1)
    *_, applied, loop = measured("llama", rows_of([24]), config)
    layer = loop.model.get_base_model().model.layers[0]
    pool = next(c.cell_contents for c in layer.forward.__closure__ if type(c.cell_contents).__name__ == "Pool")
    first = pool.made
    window(loop)
    return {"first": first, "after": pool.made, "free": len(pool.free), "bytes": pool.size_bytes}


@case
def fused_lora() -> dict:
    rows = rows_of([24, 17, 9, 5])
    found = {
        f"{family} checkpointing={on}": equal(family, ["fused_lora"], rows, on)
        for family in ("llama", "qwen2")
        for on in (False, True)
    }
    return found | {"after the cut": equal("llama", ["graph_cut", "fused_lora"], rows, True, last_layers=2)}


@case
def fused_lora_on_4_bits() -> dict:
    """One bitsandbytes NF4 matrix with PEFT's layer for it: outputs and gradients, of the input too."""
    import bitsandbytes
    from burst_payload.measures import fused_lora as measure
    from burst_payload.measures.apply import Subject
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=True, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = bitsandbytes.nn.Params4bit(torch.randn(128, 64), requires_grad=False, quant_type="nf4")
    wrapped = torch.nn.Sequential(layer.to("cpu"))
    wrapped.is_loaded_in_4bit = True
    wrapped = get_peft_model(wrapped, LoraConfig(r=4, target_modules=["0"]))
    lora = wrapped.base_model.model[0]
    torch.nn.init.normal_(lora.lora_B["default"].weight)
    x = torch.randn(2, 5, 64, requires_grad=True)

    def run() -> tuple[float, dict]:
        wrapped.zero_grad()
        x.grad = None
        loss = wrapped(x).square().mean()
        loss.backward()
        return loss.item(), gradients(wrapped) | {"x": x.grad.clone()}

    expected = run()
    patches = measure.apply(Subject(wrapped))
    ran = type(wrapped(x).grad_fn).__name__
    found = run()
    patches.undo()
    return {"kind": type(lora).__name__, "ran": ran, **difference(expected, found)}


@case
def all_together() -> dict:
    rows = rows_of([40, 33, 14, 5])
    names = ["scored_logits", "graph_cut", "fused_lora", "tiled_mlp", "boundary_offload"]
    return {family: equal(family, names, rows, True, last_layers=2) for family in ("llama", "gemma3_text", "smollm3")}


@case
def refusals() -> dict:
    """What is asked for and cannot be done stops the run; what auto leaves out has its reason."""
    rows, found = rows_of([12, 9, 7, 5]), {}
    try:
        measured("llama", rows, config_of(False, ["graph_cut"]))
    except Stop as stop:
        found["asked"] = stop.what
    *_, applied, _ = measured("llama", rows, config_of(False, None))
    found["auto"] = applied.record()
    return found


def main() -> None:
    chosen = sys.argv[1:] or list(CASES)
    print(json.dumps({name: CASES[name]() for name in chosen}))


if __name__ == "__main__":
    main()
