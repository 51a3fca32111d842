"""What clients' connections may take of the files that this process may have open: beyond that there would be none for
a log, or a group. It does not know protocols.
"""

import contextlib
import resource
from typing import Final

HTTP_SHARE: Final = 0.5
GRPC_SHARE: Final = 0.25
_NO_LIMIT: Final = 1 << 20  # stands for none, and for what no host has memory for


def most_connections(share: float) -> int:
    """As of now."""
    return part_of(resource.getrlimit(resource.RLIMIT_NOFILE)[0], share)


def part_of(limit: int, share: float) -> int:
    """So much of a limit, which may be none."""
    return int(share * (_NO_LIMIT if limit == resource.RLIM_INFINITY else min(limit, _NO_LIMIT)))


def raise_limit() -> None:
    """To all that this process may ask for: what it begins with is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
