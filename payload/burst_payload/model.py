"""Loading the base model and putting the adapter on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_payload import precision, ranks, tiny
from burst_payload.model_files import fingerprint
from burst_payload.stop import ExitCode, Stop, first_line

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

    from burst_payload.config import Adapter, Model, RunConfig
    from burst_payload.precision import Precision

NOT_TEXT = r".*(vision|visual|audio|image|multi_modal_projector|mm_projector).*"
"""Module paths that are not part of the language model in multimodal checkpoints."""

_ROUTERS = ("gate", "router", "lm_head", "score")


def resolve_folder(model: Model, override: str | None, cache: Path) -> Path:
    """The folder that holds the base model, downloaded at the pinned revision where it is a hub id.

    Raises ``Stop`` for a local model that is not here, or that is not the one the bundle was made for.
    """
    if model.kind == "builtin":
        return tiny.model_folder(cache)
    if model.kind == "local":
        if not override:
            raise Stop(
                f"this bundle trains the local model {model.name!r}, which does not travel with it",
                "start with --model FOLDER",
                ExitCode.INVALID,
            )
        folder = Path(override)
        if not (folder / "config.json").is_file():
            raise Stop(
                f"{folder} is not a model folder: it has no config.json", "give --model FOLDER", ExitCode.INVALID
            )
        found = fingerprint(folder)
        if found != model.fingerprint:
            raise Stop(
                f"{folder} is not the model that the bundle was made for (config or tokenizer differ)",
                "give the same model, or make the bundle anew",
                ExitCode.VERIFICATION,
            )
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(
            snapshot_download(
                model.name,
                revision=model.revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            )
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise Stop(
            f"{model.name} cannot be fetched from the hub: {type(error).__name__}: {first_line(error)}",
            "check the name, the revision, access (HF_TOKEN) and the network",
        ) from error


def lora_config(adapter: Adapter, targets: list[str], layers: int, *, text_only: bool = True) -> LoraConfig:
    """PEFT's configuration of an adapter on the ``targets`` of the last ``adapter.last_layers`` of ``layers``.

    ``text_only``: the model has no vision or audio part that would have to be left out.
    """
    from peft import LoraConfig

    chosen = None if adapter.last_layers is None else list(range(layers - adapter.last_layers, layers))
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]  # a float is fine: it only scales
        lora_dropout=adapter.dropout,
        target_modules=targets,
        exclude_modules=None if text_only else NOT_TEXT,
        layers_to_transform=chosen,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        bias="none",
        task_type="CAUSAL_LM",
    )


def quantization_config(compute: torch.dtype) -> Any:
    """NF4 with double quantization (QLoRA, Dettmers et al. 2023): 0.516 bytes a parameter."""
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )


def device_capability() -> tuple[int, int] | None:
    """The visible GPU's compute capability, or None without one. Raises ``Stop`` where this torch has no kernels for it."""
    import torch

    if not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(0)
    if not precision.has_kernels(capability, torch.cuda.get_arch_list()):
        raise Stop(
            f"torch {torch.__version__} has no kernels for {torch.cuda.get_device_name(0)} (compute capability "
            f"{capability[0]}.{capability[1]}); it was built for {', '.join(torch.cuda.get_arch_list())}",
            "install the build for this card, for example the cu126 build for Volta and Pascal",
        )
    return capability


def load_base(folder: Path, precise: Precision, quantized: bool, on_gpu: bool) -> PreTrainedModel:
    """The frozen base model, on the one visible GPU or on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    if on_gpu:  # cuDNN's attention plans anew for every sequence length: measured on an H200, docs/performance.md
        torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = getattr(torch, precise.compute)
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa", "local_files_only": True}
    if on_gpu:
        arguments["device_map"] = {
            "": ranks.local()
        }  # exactly one device: dispatching over several breaks LoRA training
    if quantized:
        arguments["quantization_config"] = quantization_config(dtype)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **arguments)
    except torch.cuda.OutOfMemoryError as error:
        raise Stop(
            "out of GPU memory while loading the model",
            "take a smaller model, quantization: nf4, or a larger card",
            ExitCode.NOTHING_FITS,
        ) from error
    model.config.use_cache = False
    model.requires_grad_(False)
    return model


def is_text_only(model: PreTrainedModel) -> bool:
    return not any(re.fullmatch(NOT_TEXT, name) for name, _ in model.named_modules())


def layer_count(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return int(config.num_hidden_layers)


def resolve_targets(model: PreTrainedModel, targets: list[str]) -> list[str]:
    """The target names that exist as linear layers of the language model.

    ``["all-linear"]`` is every linear layer but the head and mixture-of-experts routers. Raises ``Stop`` where a name
    matches nothing, naming what there is.
    """
    import torch

    excluded = re.compile(NOT_TEXT)
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not excluded.fullmatch(name)
    ]
    if targets == ["all-linear"]:
        return sorted({name.rpartition(".")[2] for name in linear} - set(_ROUTERS))
    fused = {name.rpartition(".")[2] for name, parameter in model.named_parameters() if parameter.ndim == 3}
    present = {name.rpartition(".")[2] for name in linear} | fused
    if "gate_up_proj" in fused:  # PEFT takes the names that the experts had before they were fused
        present |= {"gate_proj", "up_proj"}
    missing = [target for target in targets if target not in present]
    if missing:
        raise Stop(
            f"no layer is called {', '.join(missing)}",
            f"set adapter.targets from: {', '.join(sorted(present - set(_ROUTERS)))}; or to all-linear",
            ExitCode.INVALID,
        )
    return targets


def attach(model: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """The model with a fresh adapter whose initial weights depend on ``seed`` alone.

    Raises ``Stop`` for what PEFT refuses, such as DoRA on fused experts.
    """
    import torch
    from peft import get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)  # type: ignore[return-value]
        except ValueError as error:
            raise Stop(
                f"PEFT refuses this adapter: {first_line(error)}",
                "change adapter.targets, adapter.dora, adapter.rslora or adapter.dropout",
                ExitCode.INVALID,
            ) from error


def optimizer_name(config: RunConfig, on_gpu: bool) -> str:
    """``auto`` is the paged 8-bit AdamW on a GPU and torch's AdamW on a CPU."""
    if config.train.optimizer == "auto":
        return "paged_adamw_8bit" if on_gpu else "adamw_torch"
    return config.train.optimizer
