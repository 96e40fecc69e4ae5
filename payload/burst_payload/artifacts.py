"""The adapter on disk: written beside, re-read, checked, sealed, and only then given its name."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from burst_payload import seal, tokens
from burst_payload.manifest import ManifestError
from burst_payload.records import publish_directory, write_json
from burst_payload.stop import ExitCode, Stop

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel


def save(
    model: PeftModel,
    base_folder: Path,
    template: str | None,
    base_name: str,
    revision: str | None,
    metadata: dict[str, Any],
    bundle_id: str,
    output: Path,
) -> seal.Seal:
    """Write ``output/adapter`` in PEFT's layout with tokenizer, metadata and seal.

    The folder appears under its name in one rename, after everything in it was written, fsynced, read back and checked.
    Raises ``Stop`` (verification) where what came back from disk is not what was trained.
    """
    temporary = output / f"{seal.TEMPORARY_PREFIX}{os.getpid()}"
    temporary.mkdir(parents=True)
    verified = False
    try:
        config = next(iter(model.peft_config.values()))
        config.base_model_name_or_path = base_name
        config.revision = revision
        model.save_pretrained(temporary, safe_serialization=True, save_embedding_layers=False)
        (temporary / "README.md").unlink(missing_ok=True)  # PEFT's model card is a form to fill in
        copy_tokenizer(base_folder, template, temporary)
        verify_weights(model, temporary / seal.WEIGHTS_NAME)
        write_json(temporary / seal.METADATA_NAME, metadata)
        written = seal.write_seal(temporary, bundle_id)
        seal.verify_seal(temporary)
        verified = True
        publish_directory(temporary, output / seal.ADAPTER_NAME)
    except seal.SealError as error:
        raise Stop(
            f"the adapter does not read back as it was written: {error}", "check the disk", ExitCode.VERIFICATION
        ) from error
    finally:
        if not verified:  # a verified one that could not get its name is kept: the next start gives it
            shutil.rmtree(temporary, ignore_errors=True)
    return written


def copy_tokenizer(base_folder: Path, template: str | None, folder: Path) -> None:
    """The base's own tokenizer files, byte for byte, and the chat template that the rows were rendered with."""
    for name in tokens.TOKENIZER_FILES:
        if name not in ("config.json", "chat_template.jinja") and (base_folder / name).is_file():
            shutil.copyfile(base_folder / name, folder / name)
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template.encode())


def verify_weights(model: PeftModel, path: Path) -> None:
    """Read the saved weights back: every trained tensor is there, equal, finite, and no ``lora_B`` is all zero."""
    import torch
    from peft import get_peft_model_state_dict
    from safetensors.torch import load_file

    trained = get_peft_model_state_dict(model, save_embedding_layers=False)
    try:
        declared = seal.tensors(path)
    except ManifestError as error:
        raise Stop(f"the saved adapter is damaged: {error}", "check the disk", ExitCode.VERIFICATION) from error
    problems = [f"{name} is missing" for name in trained.keys() - declared.keys()]
    problems += [f"{name} was not trained" for name in declared.keys() - trained.keys()]
    expected = sum(tensor.nbytes for tensor in trained.values())
    found = sum(tensor.size_bytes for tensor in declared.values())
    if found != expected:
        problems.append(f"{found:,} bytes of weights instead of {expected:,}")
    if not problems:
        for name, tensor in load_file(path).items():
            if not torch.equal(tensor, trained[name].detach().cpu()):
                problems.append(
                    f"{name} reads back differently" if torch.isfinite(tensor).all() else f"{name} is not finite"
                )
            elif "lora_B" in name and not tensor.any():
                problems.append(f"{name} is all zero: it was never trained")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise Stop(
            f"the saved adapter is not what was trained: {'; '.join(problems[:3])}{more}",
            "nothing was sealed; run again",
            ExitCode.VERIFICATION,
        )


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that shape the result."""
    import importlib.metadata
    import platform

    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "tokenizers", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_metadata(adapter: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((adapter / seal.METADATA_NAME).read_bytes())
    return value
