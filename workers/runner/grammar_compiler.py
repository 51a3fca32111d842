"""GrammarCompiler: compiles grammars on one rank beside its steps, and says how many are ready on all ranks.

    start(plan) ... the step is computed ... report()

A large grammar takes as long as many steps, and steps of other requests must not wait for it. So each compile queue
has a thread of its own, and a request joins the plans when every rank has compiled its grammar.
"""

import os
import threading
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from coatcheck.proto.grammar import Grammar
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.structured.grammar_backend import CompiledGrammar, GrammarBackend
from coatcheck.workers.structured.grammar_registry import MAX_COMPILING, compile_queue_of

_IDLE_SECONDS = 0.001
_NICE = 4  # of these threads: where cores are few, a third of one beside a step's
# The library recurses over rules that refer to rules, and a stack that overflows ends the process. A router refuses
# what overflows 2 MiB (see router/grammar_compiler). A thread's default is as little where the stack's limit
# (ulimit -s) is unlimited, and less where that is low.
_STACK_BYTES = 16 << 20


class GrammarCompiler:
    """`grammars` gets what is compiled, in the step's own thread."""

    def __init__(self, grammars: GrammarBackend, communicator: Communicator) -> None:
        self._grammars = grammars
        self._communicator = communicator
        self._threads = [ThreadPoolExecutor(1, "grammar", initializer=_give_way) for _ in MAX_COMPILING]
        self._work = [
            deque[tuple[int, Future[CompiledGrammar]]]() for _ in MAX_COMPILING
        ]  # each with its grammar's number
        self._made = [0 for _ in MAX_COMPILING]
        self._agreed = 0  # in all compile queues together
        self._next = 0  # the next grammar's number
        self._idle = False

    def start(self, plan: StepPlan) -> None:
        """Forgets what the plan says, and queues what it announces."""
        self._idle = not plan.rows
        for number in plan.dropped_grammars:
            self._grammars.drop(number)
        for grammar in plan.new_grammars:
            queue = compile_queue_of(grammar)
            self._work[queue].append((self._next, self._submit(queue, grammar)))
            self._next += 1

    def report(self) -> tuple[int, ...] | None:
        """For each compile queue, how many of the grammars sent so far are compiled on every rank; None while none is
        being compiled. Waits for a moment if the step computes nothing."""
        if self._agreed == self._next:
            return None
        if self._idle and (first := [work[0][1] for work in self._work if work]):
            wait(first, timeout=_IDLE_SECONDS, return_when=FIRST_COMPLETED)
        for queue, work in enumerate(self._work):
            while work and work[0][1].done():
                number, made = work.popleft()
                self._grammars.store(number, made.result())
                self._made[queue] += 1
        agreed = tuple(self._communicator.all_reduce_min(self._made))
        self._agreed = sum(agreed)
        return agreed

    def _submit(self, queue: int, grammar: Grammar) -> Future[CompiledGrammar]:
        before = threading.stack_size(_STACK_BYTES)  # a queue's thread starts with its first grammar
        try:
            return self._threads[queue].submit(self._grammars.compile_grammar, grammar)
        finally:
            threading.stack_size(before)


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
