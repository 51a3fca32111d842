"""What Ray reads from the environment as it is imported. This module therefore does not import it."""

import os
import secrets


def quiet_driver() -> None:
    """Keeps Ray's own remarks on dead processes off the terminal: `coatcheck serve` says in a line what died."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")


def confine_local_ray() -> None:
    """For a Ray of our own: loopback only, nothing reported home, and a token that only its own processes know."""
    # Made for other systems, on Linux this too has Ray listen on the loopback interface alone.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at nice 15, so that anything else on the host would slow every token down.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Whoever reaches a Ray may run code in it, also another user of this host.
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
