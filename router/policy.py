"""Which group answers a request: one cost in seconds, lowest wins, ties broken at random.

    cost = (queued prefill tokens + uncached prompt tokens) / prefill rate + step seconds × running sequences

Pure: it reads what it is given and touches nothing. It does not know links, hashes or events.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

# Until some group has measured its own: a guess that matters only for the size of the terms against each other.
_GUESSED_PREFILL_RATE: Final = 2000.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one group when a request is placed; a rate of 0 has not been measured yet."""

    group: str
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    running: int = 0
    # Of this prompt.
    device_tokens: int = 0
    host_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """One candidate's cost, in seconds, term by term."""

    group: str
    queue: float
    prefill: float
    decode: float
    cached_tokens: int

    @property
    def total(self) -> float:
        """What is compared."""
        return self.queue + self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, and what it was made from."""

    group: str
    terms: tuple[Terms, ...]
    why: str


def choose(candidates: Sequence[Candidate], prompt_tokens: int, rng: random.Random) -> Decision:
    """The cheapest of at least one candidate."""
    measured = [c.prefill_tokens_per_second for c in candidates if c.prefill_tokens_per_second > 0]
    assumed = fmean(measured) if measured else _GUESSED_PREFILL_RATE
    terms = tuple(_terms(candidate, prompt_tokens, assumed) for candidate in candidates)
    least = min(term.total for term in terms)
    best = rng.choice([term for term in terms if term.total == least])
    return Decision(best.group, terms, _why(best, terms, prompt_tokens))


def _terms(candidate: Candidate, prompt_tokens: int, assumed_rate: float) -> Terms:
    rate = candidate.prefill_tokens_per_second or assumed_rate
    cached = min(candidate.device_tokens + candidate.host_tokens, prompt_tokens)
    return Terms(
        group=candidate.group,
        queue=candidate.queued_prefill_tokens / rate,
        prefill=(prompt_tokens - cached) / rate,
        decode=candidate.step_seconds * candidate.running,
        cached_tokens=cached,
    )


def _why(best: Terms, terms: Sequence[Terms], prompt_tokens: int) -> str:
    parts = f"queue {best.queue:.3f} + prefill {best.prefill:.3f} + decode {best.decode:.3f}"
    cached = f"{best.cached_tokens} of {prompt_tokens} prompt tokens cached"
    others = sorted(term.total for term in terms if term.group != best.group)
    against = f"; the next best costs {others[0]:.3f} s" if others else "; no other group"
    return f"{best.group}: {best.total:.3f} s ({parts}), {cached}{against}"
