"""The small files of a base model that the launcher needs: config, tokenizer, chat template. Never the weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burst import paths
from burst.errors import BurstError, InvalidInput
from burst_payload import tiny, tokens
from burst_payload.model_files import fingerprint

if TYPE_CHECKING:
    from burst.spec import Spec

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelFiles:
    """A folder with a model's small files. ``revision`` is the commit of a hub model."""

    folder: Path
    revision: str | None = None
    fingerprint: str | None = None


def resolve(spec: Spec, spec_folder: Path) -> ModelFiles:
    """Find the model of a spec: made here, in a local folder, or fetched from the hub (a few MB).

    Raises ``InvalidInput`` where the name is wrong and ``BurstError`` where the hub cannot be reached.
    """
    if spec.model_kind == "builtin":
        return ModelFiles(tiny.tokenizer_folder(paths.models_cache()))
    if spec.model_kind == "local":
        folder = (spec_folder / Path(spec.model).expanduser()).resolve()
        if not (folder / "config.json").is_file():
            raise InvalidInput(
                f"model {spec.model}: {folder} has no config.json", "give a folder saved by save_pretrained"
            )
        return ModelFiles(folder, fingerprint=fingerprint(folder))
    return _from_hub(spec.model, spec.revision)


def _from_hub(name: str, revision: str | None) -> ModelFiles:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(tokens.TOKENIZER_FILES)))
    except GatedRepoError:
        raise BurstError(
            f"model {name} is gated", "accept its terms on the hub, then set HF_TOKEN or run: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise InvalidInput(
            f"model {name} is not on the hub, or is private", "check the name; for a private model set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise InvalidInput(f"model {name} has no revision {revision}", "check the branch, tag or commit") from None
    except HFValidationError:
        raise InvalidInput(f"{name!r} is not a hub id", "write owner/name, or ./folder for a local model") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise BurstError(
            f"model {name}: the hub cannot be reached and its tokenizer is not cached here",
            "check the network, or give a local folder as model",
        ) from error
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision
    return ModelFiles(folder, revision=commit)
