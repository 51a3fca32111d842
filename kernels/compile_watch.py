"""CompileWatch: records the kernels that Triton compiles in this process, or loads from its cache on disk.

Both delay a step noticeably, so both should happen before the group is ready. Kernels that are compiled or loaded later
are counted and logged.
"""

from __future__ import annotations

import logging
from typing import Any

import triton  # type: ignore[import-untyped]

_log = logging.getLogger(__name__)


class CompileWatch:
    """Records kernels from `start` on. After `mark_ready` no kernel should be compiled."""

    def __init__(self) -> None:
        self.kernels: list[str] = []  # Triton's description of each kernel
        self._num_ready: int | None = None
        self._next: Any = None

    def start(self) -> None:
        """Install a hook in Triton. A hook that was installed before is still called."""
        self._next = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        """Remove the hook. Hooks must be removed in reverse order."""
        triton.knobs.runtime.jit_post_compile_hook = self._next

    def mark_ready(self) -> None:
        """Count kernels from now on as late."""
        self._num_ready = len(self.kernels)

    def num_late(self) -> int:
        """Kernels compiled after `mark_ready`. Should be 0."""
        return 0 if self._num_ready is None else len(self.kernels) - self._num_ready

    def _compiled(self, *, repr: str, **others: Any) -> Any:
        self.kernels.append(repr)
        if self._num_ready is not None:
            _log.warning("a kernel was compiled while serving: %s", repr)
        return None if self._next is None else self._next(repr=repr, **others)
