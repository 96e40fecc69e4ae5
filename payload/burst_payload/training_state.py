"""What a checkpoint holds: the adapter in PEFT's layout, the optimizer, the schedule, and the random states.

A checkpoint stands between two optimizer steps. What an unfinished accumulation window has summed up is not kept: the
weights have not moved since the step before, so a checkpoint can be taken in the middle of a window, and the window is
done again. Tensors are safetensors, everything else is JSON: nothing is unpickled. The optimizer's tensors carry
the names of their parameters, so a checkpoint does not depend on an order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from burst_payload.checkpoints import FORMAT, STATE_NAME
from burst_payload.records import reach, read_json, write_json
from burst_payload.seal import WEIGHTS_NAME
from burst_payload.stop import ExitCode, Stop

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel

OPTIMIZER_NAME = "optimizer.safetensors"
TRAINER_STATE_NAME = "trainer_state.json"


def random_states() -> dict[str, Any]:
    """The states of all random generators that training draws from, as JSON values."""
    python, numpy = random.getstate(), np.random.get_state(legacy=True)  # noqa: NPY002 - what libraries draw from
    return {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]],  # type: ignore[union-attr]
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Put the generators back. A state of a GPU is passed over on a machine without one, and the other way round."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_unhex(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_unhex(states["cuda"]))


@dataclass(frozen=True)
class Boundary:
    """The moment after an optimizer step: ``random`` as it was then, ``tokens`` and ``seconds`` trained so far."""

    step: int
    random: dict[str, Any]
    tokens: int
    seconds: float


def write(folder: Path, trainer: Any, boundary: Boundary, extra: dict[str, Any]) -> None:
    """Fill ``folder`` with the state of ``trainer`` (a ``trainer.Trainer``) at ``boundary``.

    ``extra`` goes into ``state.json`` beside it, among it the identity of what is trained.
    """
    reach("checkpoint adapter")
    save_adapter(trainer.model, folder)
    reach("checkpoint optimizer")
    tensors, described = optimizer_state(trainer.optimizer, trainer.model)
    save_file(tensors, folder / OPTIMIZER_NAME)
    reach("checkpoint state")
    trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
    scaler = trainer.accelerator.scaler
    write_json(
        folder / STATE_NAME,
        {
            "format": FORMAT,
            "step": boundary.step,
            "tokens": boundary.tokens,
            "seconds": boundary.seconds,
            "optimizer": described,
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "random": boundary.random,
            **extra,
        },
    )


def size_bytes(trainer: Any) -> int:
    """What a checkpoint takes on disk: the adapter and the optimizer's state as they are in memory, and a little more."""
    weights = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad)
    state = trainer.optimizer.state_dict()["state"].values() if trainer.optimizer is not None else ()
    return weights + sum(v.nbytes for item in state for v in item.values() if isinstance(v, torch.Tensor)) + (1 << 20)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """The adapter as PEFT reads it: weights and configuration."""
    from peft import get_peft_model_state_dict

    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_NAME)
    next(iter(model.peft_config.values())).save_pretrained(str(folder))


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Put a checkpoint's adapter into the model, cast to the dtype it is trained in here. Raises ``Stop`` unless all of it fits."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    saved = load_file(folder / WEIGHTS_NAME)
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    other = sorted(saved.keys() ^ wanted.keys()) + [
        name for name in saved.keys() & wanted.keys() if saved[name].shape != wanted[name].shape
    ]
    if other:
        raise Stop(
            f"the checkpoint holds another adapter: {len(other)} tensors differ, the first is {other[0]}",
            "set the checkpoints aside and train anew: python train.py --fresh",
            ExitCode.INVALID,
        )
    set_peft_model_state_dict(model, {name: saved[name].to(wanted[name].dtype) for name in saved})
    loaded = get_peft_model_state_dict(model, save_embedding_layers=False)
    wrong = [n for n in saved if not torch.equal(loaded[n].detach().cpu(), saved[n].to(loaded[n].dtype))]
    if wrong:
        raise Stop(
            f"{len(wrong)} tensors of the checkpoint did not arrive in the model, the first is {wrong[0]}",
            "report this: PEFT did not load them",
            ExitCode.VERIFICATION,
        )


def optimizer_state(optimizer: Any, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An optimizer as tensors by ``parameter|key`` and a JSON value with everything else."""
    value = optimizer.state_dict()
    names = _names(optimizer, model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # paged states are written by the GPU into memory that is read here
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, state in value["state"].items():
        for key, item in _flattened(state).items():
            if isinstance(item, torch.Tensor):
                # cloned: 8-bit optimizers share their code tables between parameters, and safetensors refuses that
                tensors[f"{names[number]}|{key}"] = item.detach().cpu().contiguous().clone()
            else:
                scalars.setdefault(names[number], {})[key] = item
    groups = [
        {key: item for key, item in group.items() if key != "params"} | {"names": [names[n] for n in group["params"]]}
        for group in value["param_groups"]
    ]
    return tensors, {"class": _inner(optimizer).__class__.__name__, "scalars": scalars, "groups": groups}


def load_optimizer(optimizer: Any, model: torch.nn.Module, folder: Path) -> None:
    """Put an optimizer back. Raises ``Stop`` where its parameters are not those of the checkpoint."""
    described = read_json(folder / STATE_NAME)["optimizer"]
    tensors = load_file(folder / OPTIMIZER_NAME)
    value = optimizer.state_dict()
    names = _names(optimizer, model)
    numbers = {name: number for number, name in names.items()}
    if sorted(numbers) != sorted(name for group in described["groups"] for name in group["names"]):
        raise Stop(
            "the checkpoint's optimizer is of other parameters",
            "set the checkpoints aside and train anew: python train.py --fresh",
            ExitCode.INVALID,
        )
    by_name = {name: group for group in described["groups"] for name in group["names"]}
    state: dict[int, dict[str, Any]] = {numbers[name]: dict(items) for name, items in described["scalars"].items()}
    for full, tensor in tensors.items():
        name, _, key = full.rpartition("|")
        state.setdefault(numbers[name], {})[key] = tensor
    groups = [
        {key: tuple(item) if isinstance(item, list) else item for key, item in by_name[names[g["params"][0]]].items()}
        | {"params": g["params"]}
        for g in value["param_groups"]
        if g["params"]
    ]
    if len(groups) != len(value["param_groups"]):  # an empty group keeps its settings
        groups = [g if not g["params"] else groups.pop(0) for g in value["param_groups"]]
    for group in groups:
        group.pop("names", None)
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    _page(_inner(optimizer))


def _page(optimizer: Any) -> None:
    """Move the loaded states of a paged optimizer back into pages, from where the GPU may evict them."""
    if not getattr(optimizer, "is_paged", False):
        return
    for parameter, state in optimizer.state.items():
        for key in ("state1", "state2"):
            if parameter.is_cuda and key in state:
                buffer = optimizer.get_state_buffer(parameter, dtype=state[key].dtype)
                buffer.copy_(state[key])
                state[key] = buffer


def _names(optimizer: Any, model: torch.nn.Module) -> dict[int, str]:
    """Parameter name by the number that the optimizer's state dict uses."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {number: by_id[id(parameter)] for number, parameter in enumerate(parameters)}


def _inner(optimizer: Any) -> Any:
    """The library's optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _flattened(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without the extra level that 8-bit optimizers put around their quantization tensors."""
    flat: dict[str, Any] = {}
    for key, item in state.items():
        flat |= item if isinstance(item, dict) else {key: item}
    return flat


def _hex(state: torch.Tensor) -> str:
    return bytes(state.cpu().numpy()).hex()


def _unhex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
