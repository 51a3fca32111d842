"""Sets the environment variables that Ray reads when it is imported. This module does not import Ray."""

import math
import os
import secrets
from pathlib import Path

from coatcheck.cluster.ray_cluster.local_ray import is_too_long, ray_folder, read_token, temporary_folder
from coatcheck.proto.errors import InvalidConfig

TOKEN_HELP = (
    "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN if ~/.ray/auth_token is not its token; a Ray that `coatcheck serve` "
    "has started accepts only commands of the same user on the same host"
)

# "0" makes Ray listen on the loopback interface alone, on Linux too.
_LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RECONNECT_DEFAULT = "60"
_EXTRA_SECONDS = 3600  # added to the limit, so that RayWatch ends the command first

# Time limits of Ray's start, raised because a busy machine exceeds the defaults, which are in the comments.
_START_TIMEOUTS = {
    "RAY_raylet_start_wait_time_s": "60",  # 30: until the raylet has registered with the GCS
    "RAY_gcs_server_port_wait_time_s": "120",  # 30: until the GCS listens
    "RAY_agent_register_timeout_ms": "120000",  # 30 s: until the raylet reaches its runtime environment agent
    "RAY_worker_register_timeout_seconds": "300",  # 60: until a worker process has started; Ray kills slower ones
}


def silence_ray_driver() -> None:
    """Keep Ray's lines about dead processes off the terminal. `coatcheck serve` prints its own line for each."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")


def configure_local_ray() -> None:
    """Set the variables for a Ray that this process starts: it listens on loopback only, sends no usage reports, and
    has a new token and longer time limits. Raises InvalidConfig if RAY_TMPDIR is too long."""
    folder = str(temporary_folder())
    if is_too_long(folder):
        raise InvalidConfig(
            f"RAY_TMPDIR is {folder}, which is too long for the paths of Ray's sockets; set it to a shorter folder"
        )
    if os.environ.get("TMPDIR", folder) != folder:
        os.environ.setdefault("RAY_TMPDIR", folder)
    os.environ.setdefault(_LOOPBACK_ONLY, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # By default Ray runs workers at nice 15. Then any other process of the host would delay every token.
    os.environ.setdefault("RAY_worker_niceness", "0")
    for name, limit in _START_TIMEOUTS.items():
        os.environ.setdefault(name, limit)
    # Without a token every user of this host could run code in this Ray.
    os.environ.setdefault(_MODE, "token")
    if _is_token_mode():
        os.environ.setdefault(_TOKEN, secrets.token_hex(32))


def extend_reconnect_timeout() -> float:
    """Raise the time for which Ray's client tries to reach a lost head, and return the former limit in seconds.

    For a cluster that this process joins. When the time is up, Ray's client ends the process without an error message.
    RayWatch applies the former limit instead. Raises InvalidConfig if the environment has an invalid limit.
    """
    given = os.environ.get(_RECONNECT) or _RECONNECT_DEFAULT
    try:
        seconds = float(given)
    except ValueError:
        raise InvalidConfig(f"{_RECONNECT} is {given!r} in the environment; set it to a number of seconds") from None
    if not 0 <= seconds < math.inf:
        raise InvalidConfig(f"{_RECONNECT} is {given!r} in the environment; set it to 0 or more seconds")
    os.environ[_RECONNECT] = str(math.ceil(seconds) + _EXTRA_SECONDS)
    return seconds


def environment_token() -> str:
    """The token that Ray's client will send; "" if it will send none."""
    return _user_token() if _is_token_mode() else ""


def enable_user_token() -> None:
    """Make Ray's client send the user's token if the user has one, as `ray.init("auto")` does. A Ray that `ray start`
    has started on this host requires it. Does nothing if RAY_AUTH_MODE is set."""
    if _MODE not in os.environ and _user_token():
        os.environ[_MODE] = "token"


def use_local_ray_token(address: str) -> None:
    """If `coatcheck serve` of this user has started the Ray at `address`, make Ray's client send that Ray's token."""
    if (token := read_token(ray_folder(), address)) is not None:
        os.environ[_LOOPBACK_ONLY] = "0"
        os.environ[_MODE] = "token" if token else "disabled"
        os.environ[_TOKEN] = token


def _is_token_mode() -> bool:
    return os.environ.get(_MODE, "").lower() == "token"  # Ray ignores the case


def _user_token() -> str:
    """The token where Ray's client looks for it: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token. "" if none."""
    # os.path.expanduser leaves ~ as it is for a user without a home; Path.expanduser would raise.
    file = Path(os.path.expanduser(os.environ.get(f"{_TOKEN}_PATH") or "~/.ray/auth_token"))
    try:
        return os.environ.get(_TOKEN) or file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
