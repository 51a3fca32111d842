"""GrammarRegistry: which grammars all ranks have, are compiling, or may forget, and which requests wait for one.

Ranks do as it says in the plans, so that all of them have the same grammars, and none is ever compiled by a step. What
a live sequence uses stays, for it may take a slot again; of the others the latest used are kept. Owners take turns, and
few grammars are under way at once. It does not know how one is compiled, nor what becomes of a request then.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator

from coatcheck.proto.grammar import Grammar
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import StepPlan
from coatcheck.workers.structured.grammar_lanes import AT_ONCE, lane_of
from coatcheck.workers.structured.turns import RoundRobin

MOST_KEPT = 256


class GrammarRegistry:
    """`use` and `leave` for each sequence, `announce` in each plan, `settle` what the ranks have said."""

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._uses: Counter[Grammar] = Counter()  # live sequences
        self._waiting: dict[Grammar, list[list[Sequence]]] = {}  # each request's choices that are not gone
        self._turns = [RoundRobin[Grammar]() for _ in AT_ONCE]
        self._numbers: dict[Grammar, int] = {}  # of those announced and not forgotten: their places among all ever
        self._under_way = [deque[Grammar]() for _ in AT_ONCE]
        self._settled = [0 for _ in AT_ONCE]
        self._ready: dict[Grammar, None] = {}  # on every rank, the latest used last
        self._given_up: set[Grammar] = set()  # of the ready ones
        self._announced = 0

    def __iter__(self) -> Iterator[Sequence]:
        """Those that wait."""
        for requests in self._waiting.values():
            for choices in requests:
                yield from choices

    def number(self, grammar: Grammar | None) -> int | None:
        """By which all ranks know it; None while not all have it, and for none at all."""
        return self._numbers[grammar] if grammar in self._ready else None

    def use(self, choices: list[Sequence]) -> bool:
        """A request's sequences, each until it leaves; whether they may begin, or wait till `settle` returns them."""
        request = choices[0].request
        grammar = request.sampling.structured
        if grammar is None:
            return True
        self._uses[grammar] += len(choices)
        if grammar in self._ready:
            self._ready[grammar] = self._ready.pop(grammar)
            return True
        self._waiting.setdefault(grammar, []).append(choices)
        if grammar not in self._numbers:
            self._turns[lane_of(grammar)].add(request.owner, grammar)
        return False

    def leave(self, sequence: Sequence) -> None:
        """It is gone; what nobody waits for any more is not compiled."""
        grammar = sequence.request.sampling.structured
        if grammar is None:
            return
        self._uses[grammar] -= 1
        if not self._uses[grammar]:
            del self._uses[grammar]
            if grammar not in self._numbers:
                del self._waiting[grammar]

    def give_up(self, sequence: Sequence) -> None:
        """Records that the sequence failed because of its grammar. Ranks drop such a grammar once no sequence uses it:
        the parser's state of one that is too hard takes up to 90 MB on each rank, so 256 would take 23 GB."""
        if sequence.request.sampling.structured in self._ready:
            self._given_up.add(sequence.request.sampling.structured)

    def announce(self, plan: StepPlan) -> None:
        """What ranks are to forget, and to compile, from this plan on; its rows get their grammars' numbers."""
        plan.forgotten = self._forget()
        for new in plan.new_rows:
            new.grammar = self.number(new.sampling.structured)
            assert new.grammar is not None or new.sampling.structured is None, "a row has a grammar that ranks lack"
        for turns, under_way, most in zip(self._turns, self._under_way, AT_ONCE, strict=True):
            while len(under_way) < most and (grammar := turns.take(self._is_new)):
                self._numbers[grammar] = self._announced
                self._announced += 1
                under_way.append(grammar)
                plan.grammars.append(grammar)

    def settle(self, ready: tuple[int, ...]) -> list[tuple[int, list[Sequence]]]:
        """So many of all that were announced are ready in each lane; returns the requests that need wait no longer, and
        the number of each one's grammar."""
        free: list[tuple[int, list[Sequence]]] = []
        for lane, count in enumerate(ready):
            while self._settled[lane] < count:
                self._settled[lane] += 1
                grammar = self._under_way[lane].popleft()
                self._ready[grammar] = None
                number = self._numbers[grammar]
                free += [(number, choices) for choices in self._waiting.pop(grammar) if choices]
        return free

    def check(self, begun: Iterable[Sequence]) -> None:
        """Raises AssertionError on a broken invariant. `begun`: those that may take a slot, for the first time or
        again."""
        begun_with = {sequence.request.sampling.structured for sequence in begun} - {None}
        assert begun_with <= self._ready.keys(), "ranks lack a grammar that a row may have"
        assert len(set(self._numbers.values())) == len(self._numbers), "two grammars have one number"
        under_way = {grammar for lane in self._under_way for grammar in lane}
        assert self._numbers.keys() == under_way | self._ready.keys(), "a grammar without a number"
        assert not self._ready.keys() & self._waiting.keys(), "somebody waits for what is there"
        assert self._given_up <= self._ready.keys(), "a grammar that is forgotten is to be forgotten"
        assert self._uses.keys() <= self._ready.keys() | self._waiting.keys(), "a grammar in use is lost"
        for grammar, requests in self._waiting.items():
            assert self._uses[grammar] == sum(map(len, requests)), "uses are miscounted"

    def _is_new(self, grammar: Grammar) -> bool:
        return grammar in self._waiting and grammar not in self._numbers

    def _forget(self) -> list[int]:
        spare = len(self._ready) - self._most_kept
        if spare <= 0 and not self._given_up:
            return []
        unused = [grammar for grammar in self._ready if grammar not in self._uses]
        unused.sort(key=lambda grammar: grammar not in self._given_up)  # which keeps the order of use
        forgotten = unused[: max(spare, sum(grammar in self._given_up for grammar in unused))]
        for grammar in forgotten:
            del self._ready[grammar]
        self._given_up.difference_update(forgotten)
        return [self._numbers.pop(grammar) for grammar in forgotten]
