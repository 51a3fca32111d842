"""GrammarRegistry: which grammars the ranks have compiled, and which requests wait for one.

Rank 0 numbers the grammars and sends compile and drop orders with the step plans, so all ranks hold the same grammars.
Ranks compile in threads beside the steps (see GrammarCompiler). A request waits here, outside the scheduler, until
every rank has compiled its grammar.

Small and large grammars have separate compile queues, so that a small grammar never waits for a large one. Within a
queue, tenants take turns (round-robin). A grammar stays compiled while a live sequence uses it. Of the unused grammars
the most recently used ones are kept.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from coatcheck.proto.grammar import Grammar
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import StepPlan

MAX_CACHED_GRAMMARS: Final = 256
# How many grammars of the small and of the large queue may be sent to the ranks and not compiled yet. A low limit keeps
# the tenants' turns fair, because a grammar that was sent to the ranks cannot be overtaken.
MAX_COMPILING: Final = (4, 1)
# A JSON schema of 3,000 characters compiles in 8 ms on one core. One of 33,000, the largest that routers let pass,
# takes 0.4 s.
_MAX_SMALL_CHARACTERS: Final = 8192


def compile_queue_of(grammar: Grammar) -> int:
    """The grammar's compile queue: 0 small, 1 large. Ranks compile each queue in its own thread, in order."""
    return int(len(grammar.text) > _MAX_SMALL_CHARACTERS)


class GrammarQueue:
    """Grammars to compile. Owners take turns, one grammar each. Grammars of one owner stay in order."""

    def __init__(self) -> None:
        self._by_owner: dict[str, deque[Grammar]] = {}  # the owner whose turn is next comes first

    def add(self, owner: str, grammar: Grammar) -> None:
        self._by_owner.setdefault(owner, deque()).append(grammar)

    def pop_next(self, is_wanted: Callable[[Grammar], bool]) -> Grammar | None:
        """Remove and return the next wanted grammar, or None. Unwanted ones are dropped and use up no turn."""
        for owner in list(self._by_owner):
            grammars = self._by_owner.pop(owner)
            while grammars:
                grammar = grammars.popleft()
                if is_wanted(grammar):
                    if grammars:
                        self._by_owner[owner] = grammars
                    return grammar
        return None


class GrammarRegistry:
    """`max_cached`: how many compiled grammars ranks keep, unless more are in use."""

    def __init__(self, max_cached: int = MAX_CACHED_GRAMMARS) -> None:
        self._max_cached = max_cached
        self._uses: Counter[Grammar] = Counter()  # live sequences
        self._waiting: dict[Grammar, list[list[Sequence]]] = {}  # the live choices of each waiting request
        self._to_compile = [GrammarQueue() for _ in MAX_COMPILING]
        self._ids: dict[Grammar, int] = {}  # of the grammars that are compiling or ready
        self._next_id = 0
        self._compiling = [deque[Grammar]() for _ in MAX_COMPILING]
        self._num_compiled = [0 for _ in MAX_COMPILING]  # since the start
        self._ready: dict[Grammar, None] = {}  # on every rank, least recently used first
        self._failed: set[Grammar] = set()  # ready grammars that failed a sequence

    def waiting_sequences(self) -> Iterator[Sequence]:
        """The sequences whose grammar is not ready."""
        for requests in self._waiting.values():
            for choices in requests:
                yield from choices

    def ready_id(self, grammar: Grammar | None) -> int | None:
        """The id under which every rank has the grammar, or None."""
        return self._ids[grammar] if grammar in self._ready else None

    def add_request(self, choices: list[Sequence]) -> bool:
        """Add the sequences of one request. Return True if they can be scheduled now.

        If False, the request waits here until `record_compiled` returns it. Call `remove_sequence` for each sequence
        when it ends.
        """
        request = choices[0].request
        grammar = request.sampling.structured
        if grammar is None:
            return True
        self._uses[grammar] += len(choices)
        if grammar in self._ready:
            self._ready[grammar] = self._ready.pop(grammar)
            return True
        self._waiting.setdefault(grammar, []).append(choices)
        if grammar not in self._ids:
            self._to_compile[compile_queue_of(grammar)].add(request.owner, grammar)
        return False

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove an ended sequence. If it was the last that waits for a grammar, the grammar is not compiled any more,
        unless it was sent already."""
        grammar = sequence.request.sampling.structured
        if grammar is None:
            return
        self._uses[grammar] -= 1
        if not self._uses[grammar]:
            del self._uses[grammar]
            if grammar not in self._ids:
                del self._waiting[grammar]

    def mark_failed(self, sequence: Sequence) -> None:
        """Record that a sequence failed because of its grammar. Ranks drop the grammar once no sequence uses it.

        The parser state of a grammar that exceeds the parser's limits takes up to 90 MB on each rank. A full cache of
        256 such grammars would take 23 GB.
        """
        if sequence.request.sampling.structured in self._ready:
            self._failed.add(sequence.request.sampling.structured)

    def fill_plan(self, plan: StepPlan) -> None:
        """Add the grammars to drop and to compile to the plan, and the grammar id to each of its new sequences."""
        plan.dropped_grammars = self._drop_unused()
        for new in plan.new_sequences:
            new.grammar_id = self.ready_id(new.sampling.structured)
            assert new.grammar_id is not None or new.sampling.structured is None, (
                "a new sequence's grammar is not ready"
            )
        for to_compile, compiling, limit in zip(self._to_compile, self._compiling, MAX_COMPILING, strict=True):
            while len(compiling) < limit and (grammar := to_compile.pop_next(self._needs_compiling)):
                self._ids[grammar] = self._next_id
                self._next_id += 1
                compiling.append(grammar)
                plan.new_grammars.append(grammar)

    def record_compiled(self, num_compiled: tuple[int, ...]) -> list[tuple[int, list[Sequence]]]:
        """Record that every rank has compiled the first `num_compiled[queue]` grammars sent in each compile queue.

        Return the requests that can now be scheduled: (grammar id, live choices).
        """
        released: list[tuple[int, list[Sequence]]] = []
        for queue, count in enumerate(num_compiled):
            while self._num_compiled[queue] < count:
                self._num_compiled[queue] += 1
                grammar = self._compiling[queue].popleft()
                self._ready[grammar] = None
                grammar_id = self._ids[grammar]
                released += [(grammar_id, choices) for choices in self._waiting.pop(grammar) if choices]
        return released

    def check(self, scheduled: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the records agree, and every grammar of the `scheduled` sequences is ready."""
        in_scheduler = {sequence.request.sampling.structured for sequence in scheduled} - {None}
        assert in_scheduler <= self._ready.keys(), "a scheduled sequence has a grammar that is not ready"
        assert len(set(self._ids.values())) == len(self._ids), "two grammars have one id"
        compiling = {grammar for queue in self._compiling for grammar in queue}
        assert self._ids.keys() == compiling | self._ready.keys(), "a grammar has no id"
        assert not self._ready.keys() & self._waiting.keys(), "a sequence waits for a ready grammar"
        assert self._failed <= self._ready.keys(), "a failed grammar was dropped already"
        assert self._uses.keys() <= self._ready.keys() | self._waiting.keys(), "a grammar in use is lost"
        for grammar, requests in self._waiting.items():
            assert self._uses[grammar] == sum(map(len, requests)), "uses are miscounted"

    def _needs_compiling(self, grammar: Grammar) -> bool:
        return grammar in self._waiting and grammar not in self._ids

    def _drop_unused(self) -> list[int]:
        """Drop unused grammars: all failed ones, then the least recently used beyond `max_cached`. Return the ids."""
        excess = len(self._ready) - self._max_cached
        if excess <= 0 and not self._failed:
            return []
        unused = [grammar for grammar in self._ready if grammar not in self._uses]
        unused.sort(key=lambda grammar: grammar not in self._failed)  # stable: keeps the order of use
        dropped = unused[: max(excess, sum(grammar in self._failed for grammar in unused))]
        for grammar in dropped:
            del self._ready[grammar]
        self._failed.difference_update(dropped)
        return [self._ids.pop(grammar) for grammar in dropped]
