"""LateThread: an Executor whose work comes to its end only when it has been asked for several times."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

_ASKED = 3


class _Late(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work, self._asked = work, 0

    def done(self) -> bool:
        self._asked += 1
        if self._asked == _ASKED:
            self.set_result(self._work())
        return super().done()


class LateThread(Executor):
    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return _Late(lambda: work(*args, **kwargs))
