"""GrammarCompiler: compiles grammars on one rank in the background, and reports how many are compiled on all ranks.

    start_compiling(plan)   ... the step is computed ...   report_compiled()

A large grammar takes as long as many steps, and the steps of other requests must not wait. So each compile queue (see
grammar_registry.py) has a thread. A request is scheduled once every rank has compiled its grammar.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from coatcheck.proto.grammar import Grammar
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.structured.grammar_backend import CompiledGrammar, GrammarBackend
from coatcheck.workers.structured.grammar_registry import MAX_COMPILING, compile_queue_of

_IDLE_WAIT_SECONDS = 0.001
# Niceness of the compile threads. Measured with eight chats while a schema of 500 properties compiles (bench/LOG.md,
# "What somebody's new grammar costs"): the median step, and the time until the grammar is compiled.
#     nice 0     12.2 ms,  91 ms, but the p99 of the steps is 48 ms
#     nice 4     13.7 ms, 162 ms
#     nice 10    13.9 ms, 887 ms
_NICE = 4
# llguidance recurses over rules that refer to rules, and a stack overflow ends the process. The router refuses a
# grammar that overflows 2 MiB (router/event_loop/grammar_validator.py). The default stack of a thread has at most 2 MiB
# if the stack limit (ulimit -s) is unlimited, and less if the limit is low.
_STACK_BYTES = 16 << 20


class GrammarCompiler:
    """Stores compiled grammars in `grammars`, in the thread that steps. `all_reduce_min`: returns the element-wise
    minimum of a list over all ranks."""

    def __init__(self, grammars: GrammarBackend, all_reduce_min: Callable[[list[int]], list[int]]) -> None:
        self._grammars = grammars
        self._all_reduce_min = all_reduce_min
        # One entry per compile queue.
        self._threads = [ThreadPoolExecutor(1, "grammar", initializer=_lower_priority) for _ in MAX_COMPILING]
        self._pending = [deque[tuple[int, Future[CompiledGrammar]]]() for _ in MAX_COMPILING]  # with grammar ids
        self._num_compiled = [0 for _ in MAX_COMPILING]
        self._num_agreed = 0  # compiled on all ranks, over all queues
        self._next_id = 0
        self._is_idle_step = False

    def start_compiling(self, plan: StepPlan) -> None:
        """Drop the plan's `dropped_grammars`, and queue its `new_grammars`."""
        self._is_idle_step = not plan.scheduled
        for grammar_id in plan.dropped_grammars:
            self._grammars.drop(grammar_id)
        for grammar in plan.new_grammars:
            queue = compile_queue_of(grammar)
            self._pending[queue].append((self._next_id, self._submit(queue, grammar)))
            self._next_id += 1

    def _submit(self, queue: int, grammar: Grammar) -> Future[CompiledGrammar]:
        before = threading.stack_size(_STACK_BYTES)  # the executor starts its thread at the first submit
        try:
            return self._threads[queue].submit(self._grammars.compile_grammar, grammar)
        finally:
            threading.stack_size(before)

    def report_compiled(self) -> tuple[int, ...] | None:
        """For each compile queue, how many of the grammars sent so far are compiled on every rank.

        None if no grammar is being compiled. Waits for up to 1 ms if the step computes nothing.
        """
        if self._num_agreed == self._next_id:
            return None
        if self._is_idle_step and (oldest := [pending[0][1] for pending in self._pending if pending]):
            wait(oldest, timeout=_IDLE_WAIT_SECONDS, return_when=FIRST_COMPLETED)
        for queue, pending in enumerate(self._pending):
            while pending and pending[0][1].done():
                grammar_id, compiled = pending.popleft()
                self._grammars.store(grammar_id, compiled.result())
                self._num_compiled[queue] += 1
        agreed = tuple(self._all_reduce_min(self._num_compiled))
        self._num_agreed = sum(agreed)
        return agreed


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
