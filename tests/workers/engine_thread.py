"""EngineThread: an EngineLoop in a thread of its own, beside the event loop of a test."""

import threading

from coatcheck.workers.engine.engine_loop import EngineLoop


class EngineThread(EngineLoop):
    """Call `start` once, then `stop`."""

    _thread: threading.Thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the current step, and wait for the thread."""
        super().stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()
