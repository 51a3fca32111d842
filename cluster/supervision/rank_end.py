"""RankEnded: raised when a rank has ended or hangs; makes its message for `serve` and `status`. Imports no Ray."""

import os
from collections.abc import Mapping
from typing import Final

from coatcheck.workers.host.cgroup_limits import memory_kills

# A rank of a serving group that has not answered for this long hangs. Ranks that are suspended, swapped out or on a
# busy host answer later, and a restart takes a large model minutes.
HANG_SECONDS: Final = 30.0
PROCESS_DIED: Final = "its process died"
MEMORY_KILL: Final = "the kernel killed a process of this container"
_TAIL_BYTES: Final = 4096
_TAIL_LINES: Final = 3
_TAIL_LINE_CHARACTERS: Final = 200
# Messages of ranks and routers for each request. They say nothing about the end of a process.
_REQUEST_MESSAGES: Final = ("submission ended", "request ended")


class RankEnded(Exception):
    """A rank has ended or hangs. The message names the rank and the reason."""


def describe_end(rank: int, what: str, log: str, *, show_tail: bool) -> str:
    """The message of RankEnded: the event `what`, the path of the rank's log file and, with `show_tail`, its last 3
    lines."""
    tail = read_log_tail(log) if show_tail else ""
    last_lines = f"; its last lines: {tail}" if tail else ""
    return f"rank {rank} has ended: {what} (log: {log}{last_lines})"


def describe_memory_kill(before: Mapping[int, int]) -> str:
    """The clause about a process of this host's container that the kernel has killed for lack of memory; "" if there
    was none, or if the container has no memory limit. `before`: memory_kills() when the ranks were started."""
    limits = [limit for limit, count in memory_kills().items() if count > before.get(limit, 0)]
    if not limits:
        return ""
    return (
        f"; {MEMORY_KILL} for lack of memory, and the container's limit is {min(limits) / 2**20:,.0f} MiB: raise the "
        "limit, or lower --kv-memory"
    )


def read_log_tail(path: str) -> str:
    """The last lines of a log file as one line, without those about single requests; "" if the file is not on this host
    or has no others."""
    try:
        with open(path, "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    lines = lines[begin > 0 and len(lines) > 1 :]  # the first one may be cut
    about_process = [line.strip() for line in lines if not any(message in line for message in _REQUEST_MESSAGES)]
    shown = [line[-_TAIL_LINE_CHARACTERS:] for line in about_process if line][-_TAIL_LINES:]
    return " | ".join(shown).replace("(", "[").replace(")", "]")  # `serve` compares reasons without their brackets
