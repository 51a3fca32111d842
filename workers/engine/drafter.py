"""Drafter: which sequences of a decode step get draft tokens, and how many (speculative decoding).

A draft token is a guess of a token that is not sampled yet. The step computes it as one more row of the batch: the
row's input is the guess, and the row samples the token that follows. If the token sampled by the row before equals the
guess, the guess was right and the row's own token counts too; else the row is thrown away. Every draw depends on
(seed, choice, position) only, so a sequence gets the tokens that it would get without drafts.

A row costs time. With R tokens expected from a step of T seconds, one more row, which takes c seconds and counts with
probability p, raises the tokens a second if

    (R + p) / (T + c) > R / T,   that is   p > R * c / T

T and c are measured. p is the product of the acceptance rates of the draft tokens up to this one: after a match of m
tokens the first has rate[m], the second rate[m + 1], and so on. Tokens that a grammar forces, such as the keys of a
JSON schema, have a rate of their own.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from coatcheck.workers.core.prompt_lookup import FORCED, LONGEST_MATCH, NO_DRAFT, Draft, PromptLookup
from coatcheck.workers.core.sequence import Sequence

_FIRST_RATE: Final = 0.6  # acceptance rate of a match whose length has not been tried
_FORCED_RATE: Final = 0.95  # of forced tokens at first; a model may split the same text into other tokens
_RATE_WEIGHT: Final = 0.1  # of one draft token in an acceptance rate
_RECOVERY: Final = 0.005  # the step by which a rate that is too low for drafts goes back to _FIRST_RATE
_TIME_WEIGHT: Final = 0.25  # of one step in a mean duration
_PLAIN_EVERY: Final = 32  # after this many steps with drafts comes one without, which measures T again


@dataclass(slots=True)
class _PlainSteps:
    """Steps without drafts of one number of sequences. `seconds`: their mean duration. `drafted_since`: steps with
    drafts since the last of them."""

    seconds: float
    drafted_since: int = 0


class Drafter:
    """`max_draft_tokens`: of one sequence in one step."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.num_drafted = 0  # draft tokens since the start
        self.num_accepted = 0
        self._max_draft_tokens = max_draft_tokens
        self._rates = [_FIRST_RATE] * FORCED + [_FORCED_RATE]  # by Draft.match
        self._plain_steps: dict[int, _PlainSteps] = {}  # by the number of sequences
        self._row_seconds = 0.0  # c

    def draft(self, sequences: list[Sequence], max_rows: int) -> list[list[int]]:
        """Draft tokens for the sequences of a step, at most `max_rows` in all. A sequence that ends with its next token
        gets none."""
        plain = self._plain_steps.get(len(sequences))
        if plain is None or plain.drafted_since >= _PLAIN_EVERY:
            return [[] for _ in sequences]
        drafts = [self._look_up(sequence) for sequence in sequences]
        row_cost = self._row_seconds / plain.seconds if plain.seconds else 0.0
        counts = choose_counts(drafts, self._rates, row_cost, max_rows)
        for sequence, draft, count in zip(sequences, drafts, counts, strict=True):
            sequence.draft_match = draft.match
            if draft.match and not count:
                self._rates[draft.match] += _RECOVERY * (_FIRST_RATE - self._rates[draft.match])
        return [draft.token_ids[:count] for draft, count in zip(drafts, counts, strict=True)]

    def record_token(self, sequence: Sequence, *, is_accepted: bool) -> None:
        """Record whether the sequence's next draft token was right, if those before it were."""
        self.num_accepted += is_accepted
        match = sequence.draft_match
        self._rates[match] += _RATE_WEIGHT * (is_accepted - self._rates[match])
        sequence.draft_match = _match_after(match, 1)

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record the duration of a step that only decoded."""
        plain = self._plain_steps.get(num_sequences)
        if not num_drafted:
            before = seconds if plain is None else plain.seconds
            self._plain_steps[num_sequences] = _PlainSteps(before + _TIME_WEIGHT * (seconds - before))
        elif plain is not None:
            self.num_drafted += num_drafted
            plain.drafted_since += 1
            row = min(max(seconds - plain.seconds, 0.0) / num_drafted, plain.seconds)
            self._row_seconds += _TIME_WEIGHT * (row - self._row_seconds)

    def _look_up(self, sequence: Sequence) -> Draft:
        room = sequence.max_len - len(sequence.token_ids) - 1
        if room < 1:
            return NO_DRAFT
        if sequence.forced_token_ids:
            return Draft(FORCED, sequence.forced_token_ids[: min(room, self._max_draft_tokens)])
        if sequence.prompt_lookup is None:
            sequence.prompt_lookup = PromptLookup(sequence.max_len)
        return sequence.prompt_lookup.draft(sequence.token_ids, min(room, self._max_draft_tokens))


def choose_counts(drafts: list[Draft], rates: list[float], row_cost: float, max_rows: int) -> list[int]:
    """How many tokens of each draft a step computes, the likeliest first: see the top of this file.

    `rates`: acceptance rates by Draft.match. `row_cost`: c / T. `max_rows`: tokens of all drafts together.
    """
    counts = [0] * len(drafts)
    expected, duration = float(len(drafts)), 1.0
    likeliest = [(-rates[draft.match], at) for at, draft in enumerate(drafts) if draft.token_ids]
    heapify(likeliest)
    while likeliest and sum(counts) < max_rows:
        negative, at = heappop(likeliest)
        if -negative * duration <= expected * row_cost:
            break
        expected, duration = expected - negative, duration + row_cost
        counts[at] += 1
        if counts[at] < len(drafts[at].token_ids):
            rate = rates[_match_after(drafts[at].match, counts[at])]
            heappush(likeliest, (negative * rate, at))
    return counts


def _match_after(match: int, count: int) -> int:
    """Draft.match of the token that follows `count` right tokens of a draft."""
    return match if match == FORCED else min(match + count, LONGEST_MATCH)
