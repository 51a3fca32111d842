"""What Ray reads from the environment as it is imported. This module therefore does not import it."""

import os
import secrets
from pathlib import Path

from .own_ray import ray_folder, token_of

_LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"


def quiet_driver() -> None:
    """Keeps Ray's own remarks on dead processes off the terminal: `coatcheck serve` says in a line what died."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")


def confine_local_ray() -> None:
    """For a Ray of our own: loopback only, nothing reported home, and a token that only its own processes know."""
    # Made for other systems, on Linux this too has Ray listen on the loopback interface alone.
    os.environ.setdefault(_LOOPBACK_ALONE, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at nice 15, so that anything else on the host would slow every token down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Whoever reaches a Ray may run code in it, also another user of this host.
    if os.environ.setdefault(_MODE, "token") == "token":
        os.environ.setdefault(_TOKEN, secrets.token_hex(32))


def environment_token() -> str:
    """What Ray will show of itself, found where Ray finds it; empty where it is to show nothing."""
    if os.environ.get(_MODE) != "token":
        return ""
    file = Path(os.environ.get(f"{_TOKEN}_PATH") or "~/.ray/auth_token").expanduser()
    try:
        return os.environ.get(_TOKEN) or file.read_text().strip()
    except OSError:
        return ""


def show_token(address: str) -> None:
    """For a command that joins a Ray which `coatcheck serve` has started. Others are for the environment to know."""
    if (token := token_of(ray_folder(), address)) is not None:
        os.environ[_LOOPBACK_ALONE] = "0"
        os.environ[_MODE] = "token" if token else "disabled"
        os.environ[_TOKEN] = token
