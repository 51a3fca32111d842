"""EngineLoop: the loop that owns an engine; other threads reach it through a queue that is emptied between steps.

While there is nothing to do it runs an empty step about once a second, the group's heartbeat. It does not know who
submits, nor where outputs go.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TypeVar

from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.engine.engine import Engine

HEARTBEAT_SECONDS = 1.0
T = TypeVar("T")


class EngineLoop:
    """`run` in the thread that warmed the model up, or `start` a thread of its own.

    OpenMP keeps a team of threads for each thread that ever computed, and once all teams together outnumber the cores
    it stops spinning for any of them: a second computing thread costs every parallel region a wake-up.

    `on_step` and `on_death` are called in the engine's thread; after `on_death` nothing more happens.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepOutput, EngineStats], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_death = on_death
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self.last_step_at = time.monotonic()

    def start(self) -> None:
        """Begins to step in a thread of its own."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(
        self, request: EngineRequest, on_refused: Callable[[CoatcheckError], None], on_processed: Callable[[], None]
    ) -> None:
        """Queues a request. Both callbacks run in the engine's thread before the next step: `on_refused` if the engine
        refuses the request, and then `on_processed` in any case. The step's stats include exactly the processed
        ones."""

        def command() -> None:
            try:
                self._engine.submit(request)
            except CoatcheckError as error:
                on_refused(error)
            on_processed()

        self._commands.put(command)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Drops a request, or one choice; its blocks are free before the next step is planned."""
        self._commands.put(lambda: self._engine.abort(request_id, choice))

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Runs `function(engine)` between steps."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked has left
            try:
                future.set_result(function(self._engine))
            except BaseException as error:  # handed to whoever waits for it
                future.set_exception(error)

        self._commands.put(command)
        return future

    def stop(self) -> None:
        """Ends after the step under way, and waits for that; a second call does nothing."""
        self._stopping = True
        self._commands.put(lambda: None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def run(self) -> None:
        """Steps in this thread until `stop`."""
        try:
            while not self._stopping:
                self._run_commands()
                output = self._engine.step()
                self.last_step_at = time.monotonic()
                self._on_step(output, self._engine.stats())
        except BaseException as error:  # a dead engine must end its group, whatever killed it
            self._on_death(error)

    def _run_commands(self) -> None:
        """Runs what is queued; with nothing else to do, waits for it up to a heartbeat."""
        try:
            if not self._engine.has_work:
                self._commands.get(timeout=HEARTBEAT_SECONDS)()
            while True:
                self._commands.get_nowait()()
        except Empty:
            return
