"""GrammarPress: compiles grammars on one rank beside its steps, and says how many are ready on all ranks.

    start(plan) ... the step is computed ... report()

A large grammar takes as long as many steps, and those whose step it is have nothing to do with it. So plans announce
grammars, a thread of the rank's own makes them in that order, and a request joins the plans when every rank has its
grammar. It does not know who waits for one.
"""

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait

from .communicator import Communicator
from .grammars import Compiled, Grammars
from .step_plan import StepPlan

_IDLE_SECONDS = 0.001
_NICE = 4  # of this thread: where cores are few, a third of one beside a step's


class GrammarPress:
    """`grammars` gets what is compiled, in the step's own thread."""

    def __init__(self, grammars: Grammars, communicator: Communicator) -> None:
        self._grammars = grammars
        self._communicator = communicator
        self._thread = ThreadPoolExecutor(1, "grammar", initializer=_give_way)
        self._work: deque[Future[Compiled]] = deque()
        self._asked = self._made = self._agreed = 0
        self._idle = False

    def start(self, plan: StepPlan) -> None:
        """Queues what the plan announces."""
        self._idle = not plan.rows
        self._asked += len(plan.grammars)
        self._work += [self._thread.submit(self._grammars.compile, grammar) for grammar in plan.grammars]

    def report(self) -> int | None:
        """Of all that were announced, how many are ready on every rank, oldest first; None while none is under way.
        Where the step computes nothing, it is worth a moment's wait."""
        if self._agreed == self._asked:
            return None
        if self._idle and self._work:
            wait((self._work[0],), timeout=_IDLE_SECONDS)
        while self._work and self._work[0].done():
            self._grammars.keep(self._work.popleft().result())
            self._made += 1
        (self._agreed,) = self._communicator.least([self._made])
        return self._agreed


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
