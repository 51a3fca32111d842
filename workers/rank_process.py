"""The process of a rank that runs without Ray: a child of `coatcheck serve --no-ray`.

    python -m coatcheck.workers.rank_process FD [early]

reads a RankStart from the socket FD and serves. It answers the message "progress" with its RankProgress. The message
"stop" ends its group. An error that ends the rank is sent to the parent. When the parent ends, this process ends.
With `early` it imports its libraries before it reads (see cluster/early_process.py).
"""

import ctypes
import importlib
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

from coatcheck.proto.errors import CoatcheckError
from coatcheck.proto.log_lines import configure_logging
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.core.rank_progress import RankProgress
from coatcheck.workers.host.fast_imports import import_transformers, without_garbage_collection
from coatcheck.workers.host.numa import bind_rank
from coatcheck.workers.host.process_setup import divide_cores, set_thread_environment

if TYPE_CHECKING:
    from coatcheck.workers.rank import Rank

_HOST: Final = "127.0.0.1"
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class RankStart:
    """What a rank needs to start. `listener`: the descriptor of rank 0's socket for the rendezvous, else None.

    `parent`: the process id of the parent. `rank_on_host` and `ranks_on_host`: see RankActor.
    `record_base`: see Rank. `log`: the file for the output of a process that was started early; None if the parent has
    opened it for the process.
    """

    config: GroupConfig
    rank: int
    rendezvous: str
    listener: int | None
    rank_on_host: int
    ranks_on_host: int
    record_base: str
    parent: int
    log: str | None = None


class RankFailed(Exception):
    """A rank ended with an error that is no CoatcheckError. The message has the error's type and its last line."""


class RankProcess:
    """Runs one rank and answers its parent."""

    def __init__(self, start: RankStart, parent: Connection) -> None:
        self._start = start
        self._config, self._binding = bind_rank(start.config, start.rank_on_host, start.ranks_on_host)
        set_thread_environment(threads=divide_cores(self._config.threads, start.ranks_on_host), host=_HOST)
        self._parent = parent
        self._send_lock = threading.Lock()
        self._rank: Rank | None = None
        self._is_stopping = False

    def run(self) -> None:
        """Serve until the rank ends. If an error ends the rank, send it to the parent and raise it."""
        threading.Thread(target=self._answer_parent, daemon=True).start()
        start = self._start
        try:
            # Imported here: torch reads the environment that __init__ has set, and the thread that answers the parent
            # runs meanwhile.
            import_libraries()
            from coatcheck.workers.rank import Rank

            listener = None if start.listener is None else socket.socket(fileno=start.listener)
            self._rank = Rank(
                self._config,
                start.rank,
                ranks_on_host=start.ranks_on_host,
                host=_HOST,
                listener=listener,
                record_base=start.record_base,
            )
            if self._is_stopping:
                self._rank.stop()
            self._rank.run(start.rendezvous)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            is_ours = isinstance(error, CoatcheckError)
            self._send(error if is_ours else RankFailed(f"{type(error).__name__}: {lines[-1]}"))
            raise

    def _answer_parent(self) -> None:
        try:
            while True:
                message = self._parent.recv()
                if message == "progress":
                    self._send(self._progress())
                elif message == "stop":
                    self._is_stopping = True
                    if self._rank is not None:
                        self._rank.stop()
        finally:
            os._exit(1)  # the parent has ended, or no longer understands this process

    def _progress(self) -> RankProgress:
        progress = self._rank.progress if self._rank is not None else RankProgress()
        return replace(progress, numa_nodes=self._binding.num_nodes, numa_node=self._binding.node_number)

    def _send(self, message: object) -> None:
        with self._send_lock:
            self._parent.send(message)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` ends. Linux only. Elsewhere this process ends when it
    reads the end of the parent's socket, which it cannot while C code holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def import_libraries() -> None:
    """Import torch, transformers and the rank's own modules."""
    with without_garbage_collection():
        import_transformers()
        importlib.import_module("coatcheck.workers.rank")


def prepare_early() -> None:
    """Import the libraries for the one rank of this host. If that fails, the rank fails later, with a log."""
    die_with_parent(os.getppid())
    set_thread_environment(threads=divide_cores(0, 1), host=_HOST)
    with suppress(Exception):
        import_libraries()


def write_log(path: str) -> None:
    """Append the output of this process to the file from now on."""
    with open(path, "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def main() -> None:
    """Serve one rank. Stderr is the rank's log."""
    connection = Connection(int(sys.argv[1]))
    # systemd sends these signals to every process of a service. The parent drains first, and then stops this process.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if len(sys.argv) > 2:
        prepare_early()
    start: RankStart = connection.recv()
    die_with_parent(start.parent)
    if start.log is not None:
        write_log(start.log)
    config = start.config
    configure_logging(config.log_format, rank=f"{config.name}/{start.rank}")
    RankProcess(start, connection).run()


if __name__ == "__main__":
    # Import the module under its own name: the parent cannot unpickle an error of a class of __main__.
    from coatcheck.workers import rank_process

    rank_process.main()
