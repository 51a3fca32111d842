"""CompileWatch: which kernels Triton compiles, or fetches from its cache on disk, in this process, and when.

Either takes long enough to be felt by whoever waits for the step, so that all of it belongs before readiness; what
comes later is counted and named. The file does not know which kernels there are.
"""

from __future__ import annotations

import logging
from typing import Any

import triton  # type: ignore[import-untyped]

_log = logging.getLogger(__name__)


class CompileWatch:
    """Counts from `start` on; `ready` begins the time in which none should come."""

    def __init__(self) -> None:
        self.kernels: list[str] = []  # each as Triton describes it
        self._early: int | None = None
        self._next: Any = None

    def start(self) -> None:
        """Asks Triton for word of every kernel; whoever asked before still gets it too."""
        self._next = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        """Asks no more; whoever asked later must have stopped before."""
        triton.knobs.runtime.jit_post_compile_hook = self._next

    def ready(self) -> None:
        """Everything should be there."""
        self._early = len(self.kernels)

    def late(self) -> int:
        """How many came after `ready`: what must stay 0."""
        return 0 if self._early is None else len(self.kernels) - self._early

    def _compiled(self, *, repr: str, **others: Any) -> Any:
        self.kernels.append(repr)
        if self._early is not None:
            _log.warning("a kernel was compiled while serving: %s", repr)
        return None if self._next is None else self._next(repr=repr, **others)
