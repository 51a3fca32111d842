"""run_cases(): runs cases in several processes at once, each case with a time limit."""

import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from tests.gpu.outcome import Outcome

STARTUP_SECONDS = 120.0  # added to the limit of a worker's first case: imports of many processes at once are slow


def run_cases(
    command: Sequence[str],
    cases: Sequence[str],
    *,
    jobs: int,
    limit_of: Callable[[str], float],
    end: float,
    on_outcome: Callable[[Outcome], None],
) -> list[Outcome]:
    """The outcome of each case, in the order in which they ended. `command` starts a worker (worker.py).

    `end`: of time.monotonic(); cases that have not begun by then are skipped.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def run_worker() -> None:
        worker: _Worker | None = None
        while True:
            try:
                case = waiting.get_nowait()
            except queue.Empty:
                break
            if time.monotonic() > end:
                outcome = Outcome(case, "skipped", 0.0, "no time was left (--minutes)")
            else:
                if worker is not None and not worker.takes_more():
                    worker.close()
                    worker = None
                worker = worker or _Worker(command)
                outcome = worker.run(case, limit_of(case))
            with lock:
                outcomes.append(outcome)
                on_outcome(outcome)
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=run_worker, daemon=True) for _ in range(min(jobs, len(cases)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


class _Worker:
    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self._is_new = True

    def run(self, case: str, limit: float) -> Outcome:
        """Kills the worker if the case takes longer than `limit` seconds."""
        began = time.monotonic()
        deadline = began + limit + (STARTUP_SECONDS if self._is_new else 0)
        self._is_new = False
        assert self._process.stdin is not None and self._process.stdout is not None
        said = b""
        try:
            self._process.stdin.write(f"{case}\n".encode())
            while not said.endswith(b"\n"):
                ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                part = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
                if not part:
                    why = "its process ended" if ready else f"it took more than {limit:.0f} s"
                    self.kill()
                    return Outcome(case, "failed", round(time.monotonic() - began, 1), f"{why}; see its log")
                said += part
        except BrokenPipeError:
            self.kill()
            return Outcome(case, "failed", 0.0, "its process ended before the case began")
        return Outcome.from_json(said.decode())

    def takes_more(self) -> bool:
        """Whether the worker takes another case. One whose device is lost ends right after its report."""
        if self._process.poll() is not None:
            return False
        assert self._process.stdout is not None
        has_closed, _, _ = select.select([self._process.stdout], [], [], 0.05)
        return not has_closed

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the worker and free its pipes."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
