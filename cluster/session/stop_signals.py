"""StopSignals: SIGINT and SIGTERM for `coatcheck serve`. The first asks to drain, the second to stop at once."""

import os
import shutil
import signal
import socket
import threading
from pathlib import Path
from typing import Final

from coatcheck.cluster.ray_cluster.process_tree import kill_descendants

EXIT_STOPPED: Final = 130


class StopSignals:
    """`drain_requested` is set by the first signal, `kill_requested` by the second.

    Signals are only recorded, because an exception from a handler would interrupt Ray's code anywhere. A thread records
    them, because Python runs handlers in the main thread, which Ray may block for minutes. While `ends_at_once`, the
    first signal kills the processes below this one, deletes `folder_to_delete`, and ends this process.
    """

    def __init__(self) -> None:
        self.drain_requested = threading.Event()
        self.kill_requested = threading.Event()
        self.ends_at_once = True
        self.folder_to_delete: Path | None = None
        self._arrivals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        self._wakeup = wakeup  # Python writes each signal's number to this socket, even if the main thread is blocked
        self.install_handlers()
        threading.Thread(target=self._record_signals, daemon=True).start()

    def install_handlers(self) -> None:
        """Call this again after connecting to Ray, which installs handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _record_signals(self) -> None:
        while True:
            if self._arrivals.recv(1)[0] in (signal.SIGINT, signal.SIGTERM):
                (self.kill_requested if self.drain_requested.is_set() else self.drain_requested).set()
                if self.ends_at_once:
                    # A local Ray ends with this process, but Ray's agents would first try for a minute to reach the
                    # head that has ended.
                    try:
                        kill_descendants()
                        if self.folder_to_delete is not None:
                            shutil.rmtree(self.folder_to_delete, ignore_errors=True)
                    finally:  # in any case: no other thread would end this process
                        os._exit(EXIT_STOPPED)
