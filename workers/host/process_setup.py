"""What a rank's process must have settled before torch is imported: threads and network interface, and its last word.

OpenMP reads its environment once, when torch loads it. This module therefore imports no torch.
"""

import logging
import os
from typing import NoReturn

_log = logging.getLogger(__name__)


def set_thread_environment(*, threads: int, host: str) -> None:
    """Sets what OpenMP, gloo and NCCL read at their start. `host`: where ranks meet."""
    # Two pools that spin on shared cores stall each other for milliseconds, so every rank has its own share of them.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # How long a thread that waits at a barrier spins (some 0.1 ms) before it sleeps. By default it spins on: a thread
    # whose core the router has just taken then holds all others up, where it could be moved to a core that fell idle.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    if host in ("127.0.0.1", "localhost"):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def divide_cores(threads: int, ranks_on_host: int) -> int:
    """Intra-op threads of one rank: as configured, or an equal share of the cores that this process may use."""
    return threads or max(1, len(os.sched_getaffinity(0)) // max(1, ranks_on_host))


def die(name: str, error: BaseException) -> NoReturn:
    """Ends the process at once: the other ranks see its connections close, and nothing waits for a collective."""
    _log.critical("%s ends: %s: %s", name, type(error).__name__, error, exc_info=error)
    logging.shutdown()
    os._exit(1)
