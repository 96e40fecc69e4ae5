"""SkyPilot's client: got lazily (importing it takes 2 s), asked for what is enabled, its errors put into sentences."""

from __future__ import annotations

import os
import sys
from typing import Any

from burst.errors import BurstError, NothingFits

SERVER_FIX = "see what it says: sky api status; start it anew: sky api stop"


def client() -> Any:
    """SkyPilot's client. Raises ``BurstError`` where it cannot be used."""
    if sys.platform == "win32":
        raise BurstError("SkyPilot does not run on Windows itself", "use WSL")
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    try:
        import sky
    except ImportError as error:
        raise BurstError(f"SkyPilot is not installed ({error})", "pip install 'burst-train[cloud]'") from None
    return sky


def enabled() -> set[str]:
    """The places that the user's SkyPilot has credentials for, lower case. Raises ``NothingFits`` where there are none."""
    sky = client()
    from sky.client import sdk

    try:
        found = {name.lower() for name in sky.get(sdk.enabled_clouds())}
        if not found:  # SkyPilot was never asked to look
            sky.get(sdk.check(None, verbose=False))
            found = {name.lower() for name in sky.get(sdk.enabled_clouds())}
    except Exception as error:
        raise explained(error, "SkyPilot does not answer") from error
    if not found:
        raise NothingFits("SkyPilot has no place enabled", "set one up with: sky check")
    return found


def field(value: Any, name: str) -> Any:
    """A field of one of SkyPilot's answers, which are dicts in some versions and models in others."""
    return value[name] if isinstance(value, dict) else getattr(value, name)


def explained(error: BaseException, what: str = "the launch failed") -> BurstError:
    """One of SkyPilot's exceptions as what happened and what to do; where places were tried, one line for each."""
    if isinstance(error, BurstError):
        return error
    sky = client()
    known = sky.exceptions
    if isinstance(error, known.ResourcesUnavailableError):
        tried = [f"  {_one_line(attempt)}" for attempt in error.failover_history]
        lines = [f"no machine was to be had: {_one_line(error)}", *dict.fromkeys(tried)]
        return NothingFits("\n".join(lines), "ask for more quota, allow more GPUs or places in cloud, or try later")
    if isinstance(error, known.NoCloudAccessError):
        return NothingFits("SkyPilot has no place enabled", "set one up with: sky check")
    if isinstance(error, known.APIVersionMismatchError):
        return BurstError(
            f"SkyPilot's server and this client are of different versions: {_one_line(error)}",
            "restart the server (sky api stop), or install the version it names",
        )
    if isinstance(error, known.ApiServerAuthenticationError):
        return BurstError("SkyPilot's server wants a login", "sky api login")
    if isinstance(error, known.ApiServerConnectionError):
        return BurstError("SkyPilot's server does not answer", SERVER_FIX)
    if isinstance(error, known.UserRequestRejectedByPolicy):
        return BurstError(f"your SkyPilot's policy refuses this: {_one_line(error)}", "ask whoever runs it")
    if isinstance(error, (ConnectionError, OSError)):
        return BurstError(f"{what}: no network, or the provider cannot be reached ({_one_line(error)})", "try again")
    return BurstError(f"{what}: {_one_line(error)}", "the run's log has the rest: burst logs")


def _one_line(error: BaseException) -> str:
    """What an exception says, without colours and tables, or its name where it says nothing."""
    import click

    lines = [line.strip() for line in click.unstyle(str(error)).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:300]
