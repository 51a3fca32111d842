"""The environment that a rank's process needs before torch is imported, and the end of the process after a failure.

OpenMP reads its environment once, when torch loads OpenMP. This module therefore imports no torch.
"""

import logging
import os
from collections.abc import MutableMapping, Sequence
from typing import NoReturn

from coatcheck.workers.host.cgroup_limits import cpu_quota

_log = logging.getLogger(__name__)


def set_thread_environment(*, threads: int, host: str) -> None:
    """Set the environment variables that OpenMP, gloo and NCCL read when they start.

    `threads`: OpenMP threads of this rank. `host`: the address on which the ranks connect.
    """
    # The threads of all ranks together must not outnumber the cores: two thread pools that spin on the same cores stall
    # each other for milliseconds.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # A thread that waits at a barrier sleeps after this many spins (about 0.1 ms). By default it keeps spinning, and
    # wastes its core while the thread that it waits for has lost its core to the router. With the limit a step took
    # 7.9 ms, without it 8.3 ms; the noise was as large (bench/LOG.md, 2026-11-21).
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    if host in ("127.0.0.1", "localhost"):
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def divide_cores(threads: int, ranks_on_host: int) -> int:
    """Intra-op threads of one rank: `threads` if set, else an equal share of this process's cores.

    A container's CPU quota is rounded down, because the kernel stops threads that exceed the quota for the rest of each
    period of 0.1 s.
    """
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    if quota is not None:
        cores = min(cores, int(quota))
    return threads or max(1, cores // max(1, ranks_on_host))


def exit_process(name: str, error: BaseException) -> NoReturn:
    """End the process at once, so that the other ranks see closed connections instead of waiting in a collective."""
    _log.critical("%s ends: %s: %s", name, type(error).__name__, error, exc_info=error)
    logging.shutdown()
    os._exit(1)


def show_assigned_gpus(assigned: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Make only this process's GPUs visible if Ray was told not to (RAY_EXPERIMENTAL_NOSET_…_VISIBLE_DEVICES).

    Otherwise every rank of a host would take the first GPU. Call this before CUDA starts. `assigned`: the ids of the
    GPUs that Ray gave the process.
    """
    for vendor in ("CUDA", "HIP"):
        if assigned and environment.get(f"RAY_EXPERIMENTAL_NOSET_{vendor}_VISIBLE_DEVICES", "") not in ("", "0"):
            environment[f"{vendor}_VISIBLE_DEVICES"] = ",".join(assigned)
