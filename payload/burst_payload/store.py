"""A durable copy of a sealed adapter outside the machine that made it, for whoever walks away.

A store is a URL that fsspec opens: ``s3://``, ``gs://``, ``r2://``, ``hf://``, or ``file://`` for a folder that outlives the
machine (a cluster's shared file system). The seal goes last: where it lies, the copy was complete.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from burst_payload import seal

if TYPE_CHECKING:
    from burst_payload.seal import Seal

SCHEMES = ("s3", "gs", "r2", "hf", "file")
PACKAGES = {"s3": "s3fs", "r2": "s3fs", "gs": "gcsfs"}
"""What has to be installed beside fsspec."""


class StoreError(Exception):
    """A store that cannot be used; the message says why."""


def connect(url: str) -> tuple[Any, str]:
    """The file system of a store and the path in it. Raises ``StoreError``."""
    import fsspec

    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest.strip("/"):
        raise StoreError(f"{url!r} is not one of {', '.join(f'{name}://...' for name in SCHEMES)}")
    options: dict[str, Any] = {"auto_mkdir": True} if scheme == "file" else {}
    if scheme == "r2":
        scheme, options = "s3", _r2()
    try:
        system = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        raise StoreError(f"{url}: {PACKAGES.get(scheme, 'fsspec')} is not installed ({error})") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{url}: {error}") from error
    return system, "/" + rest.strip("/") if scheme == "file" else rest.strip("/")


def _r2() -> dict[str, Any]:
    """Cloudflare's S3, with the credentials where SkyPilot keeps them: a profile, and the account's number."""
    account = Path("~/.cloudflare/accountid").expanduser()
    if not account.is_file():
        raise StoreError(f"r2 needs {account}, and the profile r2 in ~/.cloudflare/r2.credentials")
    os.environ.setdefault("AWS_SHARED_CREDENTIALS_FILE", str(account.with_name("r2.credentials")))
    endpoint = f"https://{account.read_text().strip()}.r2.cloudflarestorage.com"
    return {"profile": "r2", "client_kwargs": {"endpoint_url": endpoint, "region_name": "auto"}}


def check_writable(url: str) -> None:
    """Write and remove a small file: asked before anything is paid for. Raises ``StoreError``."""
    system, root = connect(url)
    path = f"{root}/.burst-may-write"
    try:
        _make(url, root)
        system.pipe_file(path, b"burst may write here\n")
        system.rm_file(path)
    except Exception as error:  # every file system has errors of its own
        raise StoreError(f"{url} cannot be written: {type(error).__name__}: {error}") from error


def save(adapter: Path, url: str) -> bool:
    """Copy a sealed adapter to ``url/adapter``. Returns whether there was anything to do.

    Raises ``SealError`` where it is not whole, ``StoreError`` where it cannot be copied.
    """
    sealed = seal.verify_seal(adapter)
    if read_seal(url) == sealed:
        return False
    system, root = connect(url)
    target = f"{root}/{seal.ADAPTER_NAME}"
    try:
        _make(url, root)
        for name in [*(entry.path for entry in sealed.files), seal.SEAL_NAME]:
            system.put_file(str(adapter / name), f"{target}/{name}")
    except Exception as error:
        raise StoreError(f"{url} cannot be written: {type(error).__name__}: {error}") from error
    return True


def _make(url: str, root: str) -> None:
    """A hub repository has to exist before it is written to; it is made private."""
    if url.startswith("hf://"):
        from huggingface_hub import HfApi

        HfApi().create_repo("/".join(root.split("/")[:2]), private=True, exist_ok=True)


def read_seal(url: str) -> Seal | None:
    """The seal of a complete copy, or None where there is none. Raises ``StoreError`` where the store cannot be asked."""
    system, root = connect(url)
    try:
        return seal.parse_seal(json.loads(system.cat_file(f"{root}/{seal.ADAPTER_NAME}/{seal.SEAL_NAME}")))
    except (FileNotFoundError, ValueError, seal.SealError):  # a torn one is none
        return None
    except Exception as error:
        raise StoreError(f"{url} cannot be read: {type(error).__name__}: {error}") from error


def open_file(url: str, path: str, offset_bytes: int) -> BinaryIO:
    """``path`` below ``url``, from an offset on. Raises ``FileNotFoundError`` or ``StoreError``."""
    system, root = connect(url)
    try:
        file = system.open(f"{root}/{path}", "rb")
        file.seek(offset_bytes)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise StoreError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    return cast("BinaryIO", file)
