"""EngineLoop: the loop that owns an engine. Other threads reach the engine through a queue of commands, which the loop
runs between steps.

An engine without work steps about once a second: an empty step is the group's heartbeat.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from coatcheck.proto.errors import CoatcheckError
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.step_output import EngineStats, StepOutput
from coatcheck.workers.engine.engine import Engine

HEARTBEAT_SECONDS = 1.0
# While the engine has work, no further command is begun after this time between two steps. Checking and hashing a
# prompt takes 0.6 us a token: without the limit, 50 prompts of 32,000 tokens that arrive together would delay every
# running request by a second.
_MAX_COMMAND_SECONDS: Final = 0.01
T = TypeVar("T")


class EngineLoop:
    """Call `run` in the thread that ran the warm-up.

    On CPUs another thread would be slower. OpenMP keeps a team of threads for each thread that ever computed. If all
    teams together have more threads than there are cores, no team spins any more, and every parallel region waits for
    its threads to wake up.

    `on_step` and `on_death` are called in the engine's thread. `on_death` is called at most once, and last.
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
        self._is_stopping = False
        self.last_step_at = time.monotonic()
        self.prefill_tokens_per_second = 0.0  # as of the last step; 0 before it is measured

    def submit_request(
        self, request: EngineRequest, on_refused: Callable[[CoatcheckError], None], on_processed: Callable[[], None]
    ) -> None:
        """Queue a request. Both callbacks run in the engine's thread between two steps: `on_refused` if the engine
        refuses the request, and then `on_processed` in any case. A step's stats include exactly the requests processed
        before the step."""

        def command() -> None:
            try:
                self._engine.submit_request(request)
            except CoatcheckError as error:
                on_refused(error)
            on_processed()

        self._commands.put(command)

    def abort_request(self, request_id: str, choice: int | None = None) -> None:
        """Drop a request, or one choice of it, and free its blocks, after the commands queued before."""
        self._commands.put(lambda: self._engine.abort_request(request_id, choice))

    def call_between_steps(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Run `function(engine)` in the engine's thread, after the commands queued before it."""
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has cancelled the future
            try:
                future.set_result(function(self._engine))
            except BaseException as error:  # raised where the future is awaited
                future.set_exception(error)

        self._commands.put(command)
        return future

    def run(self) -> None:
        """Step in this thread until `stop`."""
        try:
            while not self._is_stopping:
                self._run_commands()
                output = self._engine.step()
                stats = self._engine.stats()
                self.last_step_at = time.monotonic()
                self.prefill_tokens_per_second = stats.prefill_tokens_per_second
                self._on_step(output, stats)
        except BaseException as error:  # whatever ends the engine ends its group
            self._on_death(error)

    def stop(self) -> None:
        """End `run` after the current step. May be called in any thread. A second call does nothing."""
        self._is_stopping = True
        self._commands.put(lambda: None)  # wakes a loop that waits for a command

    def _run_commands(self) -> None:
        """Run queued commands for up to _MAX_COMMAND_SECONDS, or all of them while the engine has no work. Without
        work, first wait up to HEARTBEAT_SECONDS for a command."""
        try:
            if not self._engine.has_work:
                self._commands.get(timeout=HEARTBEAT_SECONDS)()
            ends_at = time.monotonic() + _MAX_COMMAND_SECONDS
            self._commands.get_nowait()()
            while not self._engine.has_work or time.monotonic() < ends_at:
                self._commands.get_nowait()()
        except Empty:
            return
