"""StopSignals: SIGINT, SIGTERM and SIGHUP for `coatcheck serve`. The first signal requests a drain. A second SIGINT or
SIGTERM requests an immediate stop."""

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

    SIGHUP comes when the terminal is closed. It never counts as the second signal: a shell and the kernel may both send
    one, and systemd may send one after SIGTERM. If it was ignored before, as under nohup, it stays ignored.

    Signals are only recorded, because an exception from a handler would interrupt Ray's code at any point. A thread
    records them, because Python runs handlers in the main thread, which Ray may block for minutes. While `ends_at_once`
    is True, the first signal kills this process's descendants, deletes `folder_to_delete`, and ends this process.
    """

    def __init__(self) -> None:
        self.drain_requested = threading.Event()
        self.kill_requested = threading.Event()
        self.ends_at_once = True
        self.folder_to_delete: Path | None = None
        self._arrivals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._numbers = {signal.SIGINT, signal.SIGTERM} | (set() if is_ignored else {signal.SIGHUP})
        self._wakeup = wakeup  # Python writes each signal's number to this socket, even if the main thread is blocked
        self.install_handlers()
        threading.Thread(target=self._record_signals, daemon=True).start()

    def install_handlers(self) -> None:
        """Call this again after connecting to Ray, which installs handlers of its own."""
        for number in self._numbers:
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _record_signals(self) -> None:
        while True:
            number = self._arrivals.recv(1)[0]
            if number in self._numbers:
                is_second = self.drain_requested.is_set() and number != signal.SIGHUP
                (self.kill_requested if is_second else self.drain_requested).set()
                if self.ends_at_once:
                    # A local Ray ends with this process, but Ray's agents would first try for a minute to reach the
                    # head that has ended.
                    try:
                        kill_descendants()
                        if self.folder_to_delete is not None:
                            shutil.rmtree(self.folder_to_delete, ignore_errors=True)
                    finally:  # in any case: no other thread would end this process
                        os._exit(EXIT_STOPPED)
