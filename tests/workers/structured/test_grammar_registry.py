"""Which grammars ranks compile, keep and drop: the registry alone, with ranks that follow its plans."""

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.core.step_plan import NewSequence, StepPlan
from coatcheck.workers.structured.grammar_registry import (
    MAX_COMPILING,
    GrammarQueue,
    GrammarRegistry,
    compile_queue_of,
)
from tests.examples import examples

KEPT = 3
SMALL = [Grammar("regex", letter) for letter in "abcdefgh"]
LARGE = [Grammar("regex", letter * 9000) for letter in "abc"]


def choices_of(grammar: Grammar | None, tenant: str = "", n: int = 1) -> list[Sequence]:
    """The sequences of one request."""
    request = EngineRequest("r", (1,), SamplingParams(structured=grammar), tenant=tenant)
    return [Sequence(request, choice, [1], 9, (0, 0), frozenset()) for choice in range(n)]


def new_grammars(registry: GrammarRegistry) -> list[Grammar]:
    """The grammars that the next plan sends."""
    plan = StepPlan()
    registry.fill_plan(plan)
    return plan.new_grammars


class RegistryMachine(RuleBasedStateMachine):
    """Requests come and go while ranks compile. `ranks`: the grammars that each rank has, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = GrammarRegistry(KEPT)
        self.waiting: list[list[Sequence]] = []
        self.begun: list[list[Sequence]] = []
        self.ranks: dict[int, Grammar] = {}
        self.queues = [deque[Grammar]() for _ in MAX_COMPILING]
        self.made = [0 for _ in MAX_COMPILING]
        self.asked = 0

    @rule(grammar=st.none() | st.sampled_from(SMALL + LARGE), tenant=st.sampled_from("xyz"), n=st.integers(1, 3))
    def come(self, grammar: Grammar | None, tenant: str, n: int) -> None:
        choices = choices_of(grammar, tenant, n)
        there = grammar is None or self.registry.ready_id(grammar) is not None
        assert self.registry.add_request(choices) is there
        (self.begun if there else self.waiting).append(choices)

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        requests = self.waiting + self.begun
        if not requests:
            return
        choices = data.draw(st.sampled_from(requests))
        sequence = data.draw(st.sampled_from(choices))
        self.registry.remove_sequence(sequence)
        choices.remove(sequence)
        self.waiting = [choices for choices in self.waiting if choices]
        self.begun = [choices for choices in self.begun if choices]

    @rule()
    def plan(self) -> None:
        begun = [sequence for choices in self.begun for sequence in choices]
        plan = StepPlan(new_sequences=[NewSequence(0, 0, 1, [1], one.request.sampling, ()) for one in begun])
        self.registry.fill_plan(plan)
        for number in plan.dropped_grammars:
            del self.ranks[number]
        for new in plan.new_sequences:  # any may take a slot, for the first time or again
            assert new.sampling.structured == (None if new.grammar_id is None else self.ranks[new.grammar_id])
        for grammar in plan.new_grammars:
            assert grammar not in self.ranks.values(), "compiled though it is there"
            self.ranks[self.asked] = grammar
            self.asked += 1
            self.queues[compile_queue_of(grammar)].append(grammar)
        used = {one.request.sampling.structured for one in begun} - {None}
        settled = set(self.ranks.values()) - {grammar for queue in self.queues for grammar in queue}
        assert len(settled) <= max(KEPT, len(used)), "too many are kept"

    @rule(data=st.data())
    def compile(self, data: st.DataObject) -> None:
        self.finish([data.draw(st.integers(0, len(work))) for work in self.queues])

    def finish(self, counts: list[int]) -> None:
        """Ranks compile the next `counts[queue]` grammars of each queue."""
        for queue, count in enumerate(counts):
            self.made[queue] += count
            for _ in range(count):
                self.queues[queue].popleft()
        for number, choices in self.registry.record_compiled(tuple(self.made)):
            assert self.ranks[number] == choices[0].request.sampling.structured
            self.waiting = [one for one in self.waiting if one is not choices]
            self.begun.append(choices)

    @invariant()
    def holds(self) -> None:
        self.registry.check(sequence for choices in self.begun for sequence in choices)
        assert {id(s) for s in self.registry.waiting_sequences()} == {
            id(s) for choices in self.waiting for s in choices
        }
        assert all(len(queue) <= limit for queue, limit in zip(self.queues, MAX_COMPILING, strict=True))

    def teardown(self) -> None:
        for _ in range(len(SMALL + LARGE)):  # however it went, everybody's is compiled in the end
            self.plan()
            self.finish([len(work) for work in self.queues])
        assert not self.waiting


TestGrammarRegistry = RegistryMachine.TestCase
TestGrammarRegistry.settings = settings(max_examples=examples(40), stateful_step_count=30)


def test_owners_take_turns() -> None:
    """An owner's first grammar waits for at most one grammar of each other owner."""
    queue = GrammarQueue()
    grammars = {name: Grammar("regex", name) for name in ("a1", "a2", "a3", "b1", "a4", "c1")}
    for name, grammar in grammars.items():
        queue.add(name[0], grammar)
    taken = [queue.pop_next(lambda grammar: grammar.text != "a2") for _ in range(6)]
    assert taken == [*(grammars[name] for name in ("a1", "b1", "c1", "a3", "a4")), None]


def test_what_nobody_waits_for_is_not_compiled() -> None:
    """A grammar is not compiled if all its requests leave before its turn; one that others wait for is."""
    registry = GrammarRegistry()
    first, second, third = choices_of(SMALL[0]), choices_of(SMALL[1], n=2), choices_of(SMALL[0], "other")
    for choices in (first, second, third):
        assert not registry.add_request(choices)
    for sequence in (*first, *second):
        registry.remove_sequence(sequence)
    for choices in (first, second):
        choices.clear()
    assert new_grammars(registry) == [SMALL[0]]
    assert registry.record_compiled((1, 0)) == [(0, third)]


def test_a_grammar_has_the_turn_of_whoever_is_next_among_those_who_want_it() -> None:
    """A grammar that a busy owner asked for last is compiled in the turn of another owner who waits for it too."""
    registry = GrammarRegistry()
    for grammar in SMALL:
        registry.add_request(choices_of(grammar, "busy"))
    registry.add_request(choices_of(SMALL[7], "other"))
    assert new_grammars(registry) == [SMALL[0], SMALL[7], SMALL[1], SMALL[2]]
