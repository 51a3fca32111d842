"""EngineThread: an EngineLoop in a thread of its own, beside the event loop of a test."""

import threading
from collections.abc import Callable

from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.engine.engine import Engine
from coatcheck.workers.engine.engine_loop import EngineLoop


class EngineThread(EngineLoop):
    """Runs between `start` and `stop`."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepOutput, EngineStats], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        super().__init__(engine, on_step=on_step, on_death=on_death)
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the current step, and wait for the thread."""
        super().stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
