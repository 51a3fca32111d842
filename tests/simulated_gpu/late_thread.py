"""LateThread: an Executor that runs a task only when its `done` is asked for the third time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_ASKS = 3


class _Late(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work, self._num_asked = work, 0

    def done(self) -> bool:
        self._num_asked += 1
        if self._num_asked == _ASKS:
            self.set_result(self._work())
        return super().done()


class LateThread(Executor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _Late(lambda: work(*args, **kwargs))
