"""The drafter computes a draft token only if that raises the expected tokens a second."""

from collections.abc import Callable
from itertools import product

import pytest

from coatcheck.proto.sampling import SamplingParams
from coatcheck.workers.core.prompt_lookup import LONGEST_MATCH, Draft
from coatcheck.workers.core.request import EngineRequest
from coatcheck.workers.core.sequence import Sequence
from coatcheck.workers.engine.drafter import Drafter, choose_counts

RATES = [0.0, 0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.9, 0.95]


def sequence(text: list[int], **sampling: object) -> Sequence:
    request = EngineRequest("a", tuple(text[:2]), SamplingParams(**sampling))  # type: ignore[arg-type]
    return Sequence(request, 0, list(text), max_len=100, sort_key=(0, 0), end_token_ids=frozenset())


def rate(drafts: list[Draft], counts: list[int], cost: float) -> float:
    """Expected tokens in the time of a step without drafts."""
    expected = float(len(drafts))
    for draft, count in zip(drafts, counts, strict=True):
        chance = 1.0
        for index in range(count):
            chance *= RATES[min(draft.match + index, LONGEST_MATCH)]
            expected += chance
    return expected / (1 + cost * sum(counts))


@pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("matches", [(2,), (8,), (2, 8), (3, 5, 8), (0, 4, 0)])
def test_no_other_counts_are_expected_to_be_faster(matches: tuple[int, ...], cost: float) -> None:
    """Every combination of counts is tried. Longer matches have higher rates, so the first tokens may be less likely
    than those after them; then the choice may stop before them, and is at least as fast as no drafts."""
    drafts = [Draft(match, [1] * 4 if match else []) for match in matches]
    chosen = choose_counts(drafts, RATES, cost, max_rows=100)
    best = max(rate(drafts, list(counts), cost) for counts in product(*(range(len(d.token_ids) + 1) for d in drafts)))
    assert rate(drafts, chosen, cost) >= rate(drafts, [0] * len(drafts), cost)
    if min(match for match in matches if match) >= 5:  # the rates are nearly equal
        assert rate(drafts, chosen, cost) >= 0.99 * best


def test_rows_are_limited() -> None:
    """The likeliest tokens take the rows that there are."""
    drafts = [Draft(2, [1, 2]), Draft(8, [1, 2, 3])]
    assert choose_counts(drafts, RATES, 0.0, max_rows=4) == [1, 3]
    assert choose_counts(drafts, RATES, 0.0, max_rows=0) == [0, 0]


def test_the_time_of_a_step_is_known_before_the_first_draft() -> None:
    """A number of sequences has a step without drafts first, and again after 32 steps with drafts."""
    drafter, text = Drafter(4), [1, 2, 3, 1, 2]
    assert drafter.draft([sequence(text)], 10) == [[]]
    drafter.record_step(1, 0, 0.01)
    for _ in range(32):
        assert drafter.draft([sequence(text)], 10) == [[3, 1, 2, 3]]
        drafter.record_step(1, 4, 0.01)
    assert drafter.draft([sequence(text)], 10) == [[]]
    drafter.record_step(1, 0, 0.01)
    assert drafter.draft([sequence(text)], 10) == [[3, 1, 2, 3]]
    assert drafter.draft([sequence(text), sequence(text)], 10) == [[], []]


def test_drafts_end_when_rows_are_dear_or_guesses_wrong() -> None:
    """If a row takes as long as a step, no guess pays. Guesses that are never right get fewer, then none."""
    dear = Drafter(4)
    dear.record_step(1, 0, 0.01)
    for _ in range(30):
        dear.record_step(1, 1, 0.02)
    assert dear.draft([sequence([1, 2, 3, 1, 2])], 10) == [[]]

    wrong = Drafter(4)
    wrong.record_step(1, 0, 0.01)
    drafts = []
    for _ in range(200):
        one = sequence([1, 2, 3, 1, 2])
        (draft,) = wrong.draft([one], 10)
        drafts.append(len(draft))
        if not draft:
            break
        wrong.record_token(one, is_accepted=False)
        wrong.record_step(1, len(draft), 0.01 + 0.002 * len(draft))
        wrong.record_step(1, 0, 0.01)
    assert drafts[0] > 1
    assert drafts[-1] == 0, "wrong guesses go on"
    assert drafts == sorted(drafts, reverse=True)
    assert wrong.num_accepted == 0


def test_guesses_are_tried_again_later() -> None:
    """A length of match that failed for a while recovers, so that a later text is guessed."""
    drafter = Drafter(1)
    drafter.record_step(1, 0, 0.01)
    drafter.record_step(1, 1, 0.014)
    for _ in range(200):
        drafter.record_token(sequence([1, 2, 3, 1, 2]), is_accepted=False)
    text = [1, 2, 3, 1, 2]
    one = sequence(text)
    drafter.draft([one], 10)
    for _ in range(100):
        drafter.record_token(one, is_accepted=False)
        one.draft_match = 2
    drafts = [drafter.draft([sequence(text)], 10)[0] for _ in range(300)]
    assert drafts[0] == []
    assert drafts[-1] == [3]


def test_forced_tokens_come_before_guesses() -> None:
    """What a grammar forces is drafted first, and its acceptance is counted apart from that of guesses."""
    drafter, text = Drafter(4), [1, 2, 3, 1, 2]
    drafter.record_step(1, 0, 0.01)
    one = sequence(text)
    one.forced_token_ids = [7, 8, 9, 10, 11]
    assert drafter.draft([one], 10) == [[7, 8, 9, 10]]
    for _ in range(60):
        drafter.record_token(one, is_accepted=False)
    drafter.record_step(1, 4, 0.02)
    assert drafter.draft([one], 10) == [[]]
    assert drafter.draft([sequence(text)], 10) != [[]]


def test_the_end_gets_no_draft() -> None:
    """A draft token never lies behind the last token that a sequence may have."""
    drafter, text = Drafter(4), [1, 2, 3, 1, 2]
    drafter.record_step(1, 0, 0.01)
    one = sequence(text)
    for room, expected in ((1, []), (2, [3]), (4, [3, 1, 2]), (9, [3, 1, 2, 3])):
        one.max_len = len(text) + room
        assert drafter.draft([one], 10) == [expected]


def drive(
    drafter: Drafter, steps: int, num_sequences: int, seconds: Callable[[int], float], *, is_right: bool
) -> list[int]:
    """Draft and record `steps` steps of sequences that repeat themselves. `seconds`: of a step with this many draft
    tokens. Returns the draft tokens of each step."""
    counts = []
    for _ in range(steps):
        sequences = [sequence([1, 2, 3, 1, 2]) for _ in range(num_sequences)]
        drafts = drafter.draft(sequences, 1000)
        for one, draft in zip(sequences, drafts, strict=True):
            for _ in draft[: len(draft) if is_right else 1]:
                drafter.record_token(one, is_accepted=is_right)
        counts.append(sum(map(len, drafts)))
        drafter.record_step(num_sequences, counts[-1], seconds(counts[-1]))
    return counts


def test_a_slow_first_step_does_not_make_rows_free() -> None:
    """The first step took a hundred times as long as those after it. A row takes 0.9 steps, which is soon found to be
    too dear for guesses of which half are right."""
    drafter, counts = Drafter(1), []
    drafter.record_step(1, 0, 1.0)
    for number in range(200):
        counts += drive(drafter, 1, 1, lambda rows: 0.01 + 0.009 * rows, is_right=number % 2 == 0)
    assert counts[0]
    assert sum(counts[50:]) < 30


def test_one_slow_step_does_not_end_drafts() -> None:
    """A pause in a step with drafts says little about a row."""
    drafter = Drafter(4)
    drafter.record_step(8, 0, 0.01)
    drafter.record_step(8, 1, 2.0)
    counts = drive(drafter, 20, 8, lambda rows: 0.01 + 0.0001 * rows, is_right=True)
    assert sum(map(bool, counts)) >= 18


@pytest.mark.parametrize("factor", [0.1, 0.5, 2, 5, 20])
def test_drafts_go_on_after_the_context_has_grown_or_shrunk(factor: float) -> None:
    """T was measured with other contexts. All steps are then slower, or faster, by one factor."""
    drafter = Drafter(4)
    drive(drafter, 60, 8, lambda rows: 0.01 + 0.0003 * rows, is_right=True)
    drive(drafter, 300, 8, lambda rows: factor * (0.01 + 0.0003 * rows), is_right=True)
    counts = drive(drafter, 100, 8, lambda rows: factor * (0.01 + 0.0003 * rows), is_right=True)
    assert sum(map(bool, counts)) > 90


def test_a_clock_that_jumps_does_no_lasting_harm() -> None:
    """Steps that seem to take an hour, or less than nothing."""
    for jump in (3600.0, -3600.0):
        for rows in (0, 4):
            drafter = Drafter(4)
            drive(drafter, 60, 4, lambda rows: 0.01 + 0.0001 * rows, is_right=True)
            drafter.record_step(4, rows, jump)
            drive(drafter, 100, 4, lambda rows: 0.01 + 0.0001 * rows, is_right=True)
            counts = drive(drafter, 100, 4, lambda rows: 0.01 + 0.0001 * rows, is_right=True)
            assert sum(map(bool, counts)) > 90


def test_every_number_of_sequences_has_drafts() -> None:
    """The number of sequences changes with every step."""
    drafter, counts = Drafter(4), []
    for number in range(2000):
        counts += drive(drafter, 1, 1 + number * 7 % 16, lambda rows: 0.01 + 0.0001 * rows, is_right=True)
    assert sum(map(bool, counts)) > 1800


def test_wrong_guesses_are_rare_in_large_batches() -> None:
    """The rates of wrong guesses recover with steps, not with sequences. A row takes a fifth of a sequence's share."""
    drafter = Drafter(4)
    drive(drafter, 100, 32, lambda rows: 0.01 + 0.01 / 160 * rows, is_right=False)
    counts = drive(drafter, 300, 32, lambda rows: 0.01 + 0.01 / 160 * rows, is_right=False)
    assert sum(counts) / (300 * 32) < 0.05


def test_what_a_grammar_forces_is_not_forgotten_while_rows_are_dear() -> None:
    """The rate of forced tokens does not fall to that of guesses because they were not tried."""
    drafter = Drafter(4)
    drive(drafter, 40, 8, lambda rows: 0.01 + 0.01 / 8 * rows, is_right=True)
    for _ in range(12):
        drafter.record_step(8, 1, 0.02)
    drafts = []
    for _ in range(60):
        sequences = [sequence([1, 2, 3]) for _ in range(8)]
        for one in sequences:
            one.forced_token_ids = [7]
        drafts.append(drafter.draft(sequences, 100))
        drafter.record_step(8, sum(map(len, drafts[-1])), 0.01)
    assert any(map(any, drafts))


def test_a_full_batch_looks_nothing_up() -> None:
    """A lookup takes time, which is lost where no row is left for a draft."""
    drafter, one = Drafter(4), sequence([1, 2, 3, 1, 2])
    drafter.record_step(1, 0, 0.01)
    assert drafter.draft([one], 0) == [[]]
    assert one.prompt_lookup is None
