"""How many connections of clients a router accepts: a share of the files that its process may have open.

The rest of the files is kept for connections to groups, logs and side processes.
"""

import contextlib
import resource
from typing import Final

HTTP_SHARE: Final = 0.5
GRPC_SHARE: Final = 0.25
_MAX_FILES: Final = 1 << 20  # stands for "no limit"; no host has memory for more connections


def max_connections(share: float) -> int:
    """`share` of this process's current limit of open files."""
    return share_of_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0], share)


def share_of_limit(limit: int, share: float) -> int:
    """`share` of `limit`, which may be RLIM_INFINITY."""
    return int(share * (_MAX_FILES if limit == resource.RLIM_INFINITY else min(limit, _MAX_FILES)))


def raise_open_files_limit() -> None:
    """Raises this process's soft limit of open files, often 1,024, to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
