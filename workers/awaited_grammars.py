"""AwaitedGrammars: requests whose grammar is still being compiled, and what plans are to announce.

It does not know how a grammar is compiled, nor what becomes of a request then.
"""

from collections import deque
from collections.abc import Iterator

from ..proto.grammar import Grammar
from .sequence import Sequence


class AwaitedGrammars:
    """`hold` a request that has to wait, `announce` in the next plan, `settle` what the ranks have said."""

    def __init__(self) -> None:
        self._waiting: dict[Grammar, list[list[Sequence]]] = {}  # each request's choices that are not gone
        self._new: list[Grammar] = []
        self._announced: deque[Grammar] = deque()  # those that are not ready on every rank
        self._ready = 0  # of all that were ever announced

    def __contains__(self, grammar: Grammar | None) -> bool:
        return grammar in self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        for requests in self._waiting.values():
            for choices in requests:
                yield from choices

    def hold(self, grammar: Grammar, choices: list[Sequence]) -> None:
        """A request waits for this one, perhaps beside others."""
        if grammar not in self._waiting:
            self._waiting[grammar] = []
            self._new.append(grammar)
        self._waiting[grammar].append(choices)

    def announce(self) -> list[Grammar]:
        """What the next plan is to have compiled."""
        new, self._new = self._new, []
        self._announced += new
        return new

    def settle(self, ready: int) -> list[list[Sequence]]:
        """So many of all that were announced are ready; those that need wait no longer."""
        free: list[list[Sequence]] = []
        while self._ready < ready:
            self._ready += 1
            free += self._waiting.pop(self._announced.popleft())
        return free
