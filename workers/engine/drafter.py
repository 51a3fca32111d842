"""Drafter: which sequences of a decode step get draft tokens, and how many (speculative decoding).

A draft token is a guess of a token that is not sampled yet. The step computes it as one more row of the batch: the
row's input is the draft token, and the row samples the token after it. The row before it samples the token at the draft
token's position. If the two are equal, the draft token is accepted, and the sequence gets the row's token too. Else the
row is thrown away. A draw depends on (seed, choice, position) alone, so a sequence gets the tokens that it would get
without drafts.

A row costs time. With R tokens expected from a step of T seconds, one more row, which takes c seconds and counts with
probability p, raises the tokens a second if

    (R + p) / (T + c) > R / T,   that is   p > R * c / T

T and c are measured. p is the product of the acceptance rates of the draft tokens up to this one: after a match of m
tokens the first has rate[m], the second rate[m + 1], and so on. Tokens that a grammar forces, such as the keys of a
JSON schema, have a rate of their own.

Measurements may be wrong: one step is slow by chance, or the sequences are longer than when T was measured. No error
lasts:

- A step is slow by chance, but not fast. A step without drafts that is much faster than T gives T its own duration.
- A row counts as at most a sequence's share of a step, T / R. If it seems to take twice that, or if a step with drafts
  is much faster than T, the next step has no drafts and measures T again.
- While no draft pays, c falls and low rates rise, so that drafts are tried again.
"""

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from coatcheck.workers.core.prompt_lookup import FORCED, LONGEST_MATCH, NO_DRAFT, Draft, PromptLookup
from coatcheck.workers.core.sequence import Sequence

# Acceptance rates at first, by Draft.match. A model may split forced text into other tokens.
_FIRST_RATES: Final = (0.6,) * FORCED + (0.95,)
_RATE_WEIGHT: Final = 0.1  # of one draft token in an acceptance rate
_RATE_RECOVERY: Final = 0.005  # the part of its way back to the first rate that a rate goes in a step, if too low
_COST_RECOVERY: Final = 0.002  # the part by which c falls in a step, if too high
_TIME_WEIGHT: Final = 0.25  # of one step in a mean duration
_MUCH_FASTER: Final = 0.8  # a step that takes less than this part of T is much faster than T
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
        self._rates = list(_FIRST_RATES)  # by Draft.match
        self._plain_steps: dict[int, _PlainSteps] = {}  # by the number of sequences
        self._row_seconds = 0.0  # c

    def draft(self, sequences: list[Sequence], max_rows: int) -> list[list[int]]:
        """Draft tokens for the sequences of a step, at most `max_rows` in all. A sequence that ends with its next token
        gets none."""
        plain = self._plain_steps.get(len(sequences))
        none: list[list[int]] = [[] for _ in sequences]
        if plain is None or plain.drafted_since >= _PLAIN_EVERY or max_rows < 1:
            return none
        row_cost = self._row_seconds / plain.seconds if plain.seconds else 0.0
        if max(self._rates) <= len(sequences) * row_cost:  # no draft can pay, so none is looked up
            self._row_seconds *= 1 - _COST_RECOVERY
            return none
        drafts = [self._look_up(sequence) for sequence in sequences]
        counts = choose_counts(drafts, self._rates, row_cost, max_rows)
        for sequence, draft in zip(sequences, drafts, strict=True):
            sequence.draft_match = draft.match
        refused = {draft.match for draft, count in zip(drafts, counts, strict=True) if draft.match and not count}
        for match in refused:
            self._rates[match] += _RATE_RECOVERY * max(_FIRST_RATES[match] - self._rates[match], 0.0)
        if refused and not any(counts):
            self._row_seconds *= 1 - _COST_RECOVERY
        return [draft.token_ids[:count] for draft, count in zip(drafts, counts, strict=True)]

    def record_token(self, sequence: Sequence, *, is_accepted: bool) -> None:
        """Record whether the sequence's next draft token was right, if those before it were."""
        self.num_accepted += is_accepted
        match = sequence.draft_match
        self._rates[match] += _RATE_WEIGHT * (is_accepted - self._rates[match])
        sequence.draft_match = _match_after(match, 1)

    def record_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Record the duration of a step that only decoded."""
        seconds = max(seconds, 0.0)
        plain = self._plain_steps.get(num_sequences)
        if not num_drafted:
            mean = seconds
            if plain is not None and seconds >= _MUCH_FASTER * plain.seconds:
                mean = plain.seconds + _TIME_WEIGHT * (seconds - plain.seconds)
            self._plain_steps[num_sequences] = _PlainSteps(mean)
        elif plain is not None:
            self.num_drafted += num_drafted
            plain.drafted_since += 1
            row, share = max(seconds - plain.seconds, 0.0) / num_drafted, plain.seconds / num_sequences
            if row > 2 * share or seconds < _MUCH_FASTER * plain.seconds:
                plain.drafted_since = _PLAIN_EVERY
            self._row_seconds += _TIME_WEIGHT * (min(row, share) - self._row_seconds)

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
