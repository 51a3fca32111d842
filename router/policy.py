"""Which group answers a request: one cost in seconds, lowest wins, ties at random or by session.

    cost     = queue + prefill + restore + decode + eviction + delay
    queue    = prompt tokens to be computed before this one's / prefill rate
    prefill  = this prompt's tokens that no tier holds / prefill rate
    restore  = its tokens that only the host tier holds / restore rate
    decode   = chunks that the queue and the prompt take × seconds of a step at the group's batch
    eviction = tokens of cold blocks that it takes × the chance that they are wanted again / prefill rate,
               and of blocks in use × 1
    delay    = (prefill + restore + eviction) × requests that will wait behind it

The first four are what the one who asks waits for, the last two what others will. Every second of work that a choice
adds is waited for by all who queue meanwhile: the longer the queues, the more a cached prefix is worth, and the less
an even load is. No term has a threshold. Pure: it reads what it is given and touches nothing. It does not know links,
hashes or events.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from statistics import fmean
from typing import Final, NamedTuple

# Until some group has measured its own: guesses that matter only for the size of the terms against each other.
_GUESSED_PREFILL_RATE: Final = 2000.0
_GUESSED_CHUNK: Final = 2048
_GUESSED_RESTORE_SPEEDUP: Final = 10.0  # of copying over computing
# Behind a prompt wait those who wait already, and while the queues drain others come: at a busy share of b, b / (1 - b)
# for each of them. The first part is counted several times, since a burst is over before its work is.
_BEHIND: Final = 3.0
_BUSIEST: Final = 0.97


class Candidate(NamedTuple):
    """What is known of one group when a request is placed; a rate of 0 has not been measured yet."""

    group: str
    queued_prefill_tokens: float = 0.0
    queued_requests: float = 0.0  # whose prompts those are
    prefill_tokens_per_second: float = 0.0
    restore_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    chunk: int = 0  # most tokens in a step
    busy: float = 0.0  # share of its time that it lately spent on prompts
    free_tokens: float = 0.0  # room for so many in blocks that hold nothing
    cold_tokens: float = 0.0  # and in blocks whose prefix may be wanted again
    # Of this prompt.
    device_tokens: int = 0
    host_tokens: int = 0
    expected_tokens: int = 0  # of prompts on their way there: computed before this one


class Terms(NamedTuple):
    """One candidate's cost, in seconds, term by term, and the prompt tokens that it holds."""

    group: str
    queue: float
    prefill: float
    restore: float
    decode: float
    eviction: float
    delay: float
    device_tokens: int
    host_tokens: int
    expected_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the group is not to compute."""
        return self.device_tokens + self.host_tokens + self.expected_tokens

    @property
    def total(self) -> float:
        """What is compared."""
        return sum(self[1:7])


_NAMES: Final = Terms._fields[1:7]


@dataclass(frozen=True)
class Decision:
    """The choice, and what it was made from."""

    group: str
    terms: tuple[Terms, ...]
    prompt_tokens: int

    @cached_property
    def chosen(self) -> Terms:
        """The chosen group's terms."""
        return next(term for term in self.terms if term.group == self.group)

    @property
    def why(self) -> str:
        """In words."""
        best = self.chosen
        named = (f"{name} {value:.3f}" for name, value in zip(_NAMES, best[1:], strict=False))
        cached = f"{best.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        others = [term.total for term in self.terms if term.group != self.group]
        against = f"; the next best costs {min(others):.3f} s" if others else "; no other group"
        return f"{self.group}: {best.total:.3f} s ({' + '.join(named)}), {cached}{against}"


def choose(
    candidates: Sequence[Candidate], prompt_tokens: int, rng: random.Random, *, regret: float = 0.0, session: str = ""
) -> Decision:
    """The cheapest of at least one candidate. `regret` is the chance that a cold block is wanted again. Among equals
    a session keeps to its own, others go anywhere."""
    measured = [c.prefill_tokens_per_second for c in candidates if c.prefill_tokens_per_second > 0]
    assumed = fmean(measured) if measured else _GUESSED_PREFILL_RATE
    busy = min(fmean([c.busy for c in candidates]), _BUSIEST)
    behind = fmean([c.queued_requests for c in candidates]) * (_BEHIND + busy / (1 - busy))
    terms = tuple([_terms(candidate, prompt_tokens, assumed, behind, regret) for candidate in candidates])
    totals = [sum(term[1:7]) for term in terms]
    least = min(totals)
    best = [term.group for term, total in zip(terms, totals, strict=True) if total == least]
    if len(best) == 1:
        group = best[0]
    elif session:
        group = min(best, key=lambda name: blake2b(f"{session}/{name}".encode(), digest_size=8).digest())
    else:
        group = rng.choice(best)
    return Decision(group, terms, prompt_tokens)


def _terms(candidate: Candidate, prompt_tokens: int, assumed_rate: float, behind: float, regret: float) -> Terms:
    (
        group, queued, _, rate, restore_rate, step, chunk, _, free, cold, device, host, expected,
    ) = candidate  # fmt: skip
    rate = rate or assumed_rate
    uncached = max(prompt_tokens - device - host - expected, 0)
    prefill = uncached / rate
    restore = host / (restore_rate or rate * _GUESSED_RESTORE_SPEEDUP) if host else 0.0
    eviction = 0.0
    short = queued + uncached + host - free  # of free room; what is queued takes its room first
    if short > 0:
        eviction = (short - max(queued - free, 0.0)) * regret / rate
        if short > cold:  # then it must take blocks from what runs, which surely wants them again
            eviction += (short - max(queued - free, cold)) * (1 - regret) / rate
    return Terms(
        group,
        queued / rate,
        prefill,
        restore,
        (queued + uncached) / (chunk or _GUESSED_CHUNK) * step,
        eviction,
        (prefill + restore + eviction) * behind,
        device,
        host,
        expected,
    )
