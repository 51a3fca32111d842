"""StopSignals: what SIGINT and SIGTERM ask of `coatcheck serve`. It does not know what is served, nor how that ends."""

import os
import signal
import socket
import threading
from typing import Final

from coatcheck.cluster.ray_cluster.process_tree import end_descendants

EXIT_STOPPED: Final = 130


class StopSignals:
    """The first SIGINT or SIGTERM asks to drain, the second to stop at once.

    Both are only noted: an exception out of a handler would tear through Ray's own code. A thread notes them, since
    Python's handlers wait for the main thread, which Ray may keep for minutes. `ends_at_once`: as long as nothing is
    there that has to be put away, the first one ends the process.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.forced = threading.Event()
        self.ends_at_once = True
        self._arrivals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        self._wakeup = wakeup  # Python writes each signal's number into it, whatever the main thread does
        self.install()
        threading.Thread(target=self._listen, daemon=True).start()

    def install(self) -> None:
        """Ray installs handlers of its own when it connects."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def _listen(self) -> None:
        while True:
            if self._arrivals.recv(1)[0] in (signal.SIGINT, signal.SIGTERM):
                (self.forced if self.asked.is_set() else self.asked).set()
                if self.ends_at_once:
                    # A Ray of our own ends with its parent, but for what has been started by what then ends: Ray's
                    # agents would first try for a minute to tell a head that is gone.
                    try:
                        end_descendants()
                    finally:  # whatever becomes of them: no other thread would end this process
                        os._exit(EXIT_STOPPED)
