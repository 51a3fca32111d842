"""Which group answers a request: one cost in seconds, lowest wins, ties at random or by session.

    cost     = queue + prefill + restore + decode + eviction + stall + delay
    queue    = prompt tokens queued at the group / prefill rate
    prefill  = tokens of this prompt that no tier of the group holds / prefill rate
    restore  = tokens of this prompt that only the host tier holds / restore rate
    decode   = chunks that the queue and the prompt take × seconds of a step at the group's batch size
    eviction = tokens of cold blocks that the prompt evicts × probability that they are wanted again / prefill rate,
               plus tokens of blocks in use that the prompt evicts / prefill rate
    stall    = prefill × streams that decode there × a price per stream that grows with the mean busy share
    delay    = (prefill + restore + eviction) × requests that will wait behind this one at the group

The first four terms are what this request waits for; the last three are what other requests will wait. The number that
will wait behind this one follows from the mean queue of all groups: while all groups are busy, a second of extra work
on any of them delays everybody, so a cached prefix is worth more the longer the queues are. Two rules correct the mean:
work on a mostly idle group delays nobody; and while other groups are idle, requests wait behind a group's own queue.

Two rules limit the choice before costs are compared:
- While some group has room, a group without room is a candidate only if it holds more of the prompt.
- A group is no candidate if its queue alone takes longer than the whole prompt takes elsewhere (`_longest_queue`).

The module is pure. It does not know connections, hashes or events.
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
# Behind a prompt wait the requests that queue now, and b / (1 - b) later ones for each of them at a busy share of b.
# The requests that queue now are counted _BEHIND times, because a burst of arrivals ends before its work is done.
_BEHIND: Final = 3.0
_BUSIEST: Final = 0.97
# Requests that will wait behind one at a group are the larger of two figures: the mean queue of all groups × min(busy
# share / (mean busy share / _BUSY_MARGIN), 1), and the group's own queue × the mean idle share. The mean queue alone
# made idle groups look expensive while one group had a long queue: with a system prompt that all users share, every
# request went to the group that held the prompt (TTFT p90 at a load of 0.3: 101 s; now 0.09 s). The own queue alone
# costs goodput where all groups are busy (conversation/3000/0.95: 0.13 in place of 0.26).
_BUSY_MARGIN: Final = 2.0
_UNUSED: Final = 1e-4  # added to busy shares, so that groups that have all been idle are alike
# Weights of _longest_queue: a queue of s seconds elsewhere allows a queue of _QUEUE_RATIO × s seconds here, and a
# stream that would stand still elsewhere counts as _STREAM_WEIGHT of a waiting request. Tuned by bench/routing.py:
# with smaller values too many requests leave their prefix while all groups are busy.
_QUEUE_RATIO: Final = 8.0
_STREAM_WEIGHT: Final = 0.5
# Price of a stall: a second that one stream stands still costs _STALL × (_STALL_IDLE + b / (1 - b)) seconds at a mean
# busy share of b; tuned by bench/routing.py. While all groups are idle, _STALL_IDLE prefers those with fewer streams.
_STALL: Final = 0.005
_STALL_IDLE: Final = 0.4
# The prefill rate of a group is a mean of its own measured rate and that of all groups. The own rate weighs half at a
# busy share of _BUSY_ENOUGH, and more above it. With its own rate alone, a group that measured slow once would never be
# chosen again, and so its rate would never be updated.
_BUSY_ENOUGH: Final = 0.05
_IDLE: Final = 0.001  # least weight of a group in the mean rate of all groups
_NAMED: Final = 3  # most groups that a message names


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
    streams: float = 0.0  # that are answered there, or soon will be
    has_room: bool = True  # one more would start soon


class CostTerms(NamedTuple):
    """One candidate's cost, in seconds, term by term, and the prompt tokens that it holds."""

    group: str
    queue: float
    prefill: float
    restore: float
    decode: float
    eviction: float
    stall: float
    delay: float
    device_tokens: int
    host_tokens: int
    expected_tokens: int
    has_room: bool
    cached_tokens: int  # those three: what the group is not to compute
    total: float  # the seconds: what is compared


_NAMES: Final = CostTerms._fields[1:8]


@dataclass(frozen=True)
class Decision:
    """The choice, and what it was made from."""

    group: str
    terms: tuple[CostTerms, ...]
    prompt_tokens: int

    @cached_property
    def chosen(self) -> CostTerms:
        """The chosen group's terms."""
        return next(term for term in self.terms if term.group == self.group)

    @property
    def why(self) -> str:
        """In words."""
        best = self.chosen
        named = (f"{name} {value:.3f}" for name, value in zip(_NAMES, best[1:8], strict=False))
        cached = f"{best.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        others = [term for term in self.terms if term.group != self.group]
        cheaper = [term for term in others if term.total < best.total]
        if cheaper:
            names = ", ".join(sorted(term.group for term in cheaper)[:_NAMED])
            against = f"; cheaper, but without room or with too long a queue: {names}"
        elif others:
            against = f"; the next best costs {min(term.total for term in others):.3f} s"
        else:
            against = "; no other group"
        return f"{self.group}: {best.total:.3f} s ({' + '.join(named)}), {cached}{against}"


def choose(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    rng: random.Random,
    *,
    regret: float = 0.0,
    in_line: int = 0,
    session: str = "",
) -> Decision:
    """The cheapest of at least one candidate. `regret` is the chance that a cold block is wanted again; so many
    requests wait `in_line` for a group. Among equals a session keeps to its own, others go anywhere."""
    measured = [(c.prefill_tokens_per_second, c.busy + _IDLE) for c in candidates if c.prefill_tokens_per_second > 0]
    weights = sum([weight for _, weight in measured])
    assumed = sum([rate * weight for rate, weight in measured]) / weights if measured else _GUESSED_PREFILL_RATE
    busy = min(fmean([c.busy for c in candidates]), _BUSIEST)
    more = busy / (1 - busy)
    later = _BEHIND + more
    stall = _STALL * (_STALL_IDLE + more)
    mean_behind = fmean([c.queued_requests for c in candidates]) + in_line / len(candidates)
    fully_busy = busy / _BUSY_MARGIN + _UNUSED
    behind = [
        later * max(mean_behind * min((c.busy + _UNUSED) / fully_busy, 1.0), (1 - busy) * c.queued_requests)
        for c in candidates
    ]
    terms = tuple(
        [_terms(c, prompt_tokens, assumed, waits, stall, regret) for c, waits in zip(candidates, behind, strict=True)]
    )
    open_terms = _open_terms(terms, [c.streams for c in candidates])
    least = min([term.total for term in open_terms])
    best = [term.group for term in open_terms if term.total == least]
    if len(best) == 1:
        group = best[0]
    elif session:
        group = min(best, key=lambda name: blake2b(f"{session}/{name}".encode(), digest_size=8).digest())
    else:
        group = rng.choice(best)
    return Decision(group, terms, prompt_tokens)


def _open_terms(terms: Sequence[CostTerms], streams: Sequence[float]) -> list[CostTerms]:
    """The terms of the groups whose costs are compared; at least one. `streams`: open streams of each group, in the
    order of `terms`."""
    ready = max([term.cached_tokens for term in terms if term.has_room], default=-1)
    with_room = [
        (term, count) for term, count in zip(terms, streams, strict=True) if term.has_room or term.cached_tokens > ready
    ]
    longest_queue = min([_longest_queue(term, count) for term, count in with_room])
    return [term for term, _ in with_room if term.queue <= longest_queue]


def _longest_queue(elsewhere: CostTerms, streams: float) -> float:
    """The longest queue, in seconds, that another group may have and still be a candidate beside the group `elsewhere`,
    which has `streams` open streams.

    If `elsewhere` is idle, this is the time in which it computes the whole prompt.
    """
    computes = elsewhere.prefill + elsewhere.restore + elsewhere.decode + elsewhere.eviction
    return computes * (1 + _STREAM_WEIGHT * streams) + elsewhere.queue * _QUEUE_RATIO


def _terms(
    candidate: Candidate, prompt_tokens: int, assumed_rate: float, behind: float, stall: float, regret: float
) -> CostTerms:
    (
        group, queued, _, rate, restore_rate, step, chunk, busy, free, cold, device, host, expected,
        streams, has_room,
    ) = candidate  # fmt: skip
    rate = assumed_rate + (rate - assumed_rate) * busy / (busy + _BUSY_ENOUGH) if rate else assumed_rate
    cached = device + host + expected
    uncached = max(prompt_tokens - cached, 0)
    queue = queued / rate
    prefill = uncached / rate
    restore = host / (restore_rate or rate * _GUESSED_RESTORE_SPEEDUP) if host else 0.0
    decode = (queued + uncached) / (chunk or _GUESSED_CHUNK) * step
    eviction = 0.0
    short = queued + uncached + host - free  # of free room; what is queued takes its room first
    if short > 0:
        eviction = (short - max(queued - free, 0.0)) * regret / rate
        if short > cold:  # then it must take blocks from what runs, which surely wants them again
            eviction += (short - max(queued - free, cold)) * (1 - regret) / rate
    stands = prefill * streams * stall
    delay = (prefill + restore + eviction) * behind
    total = queue + prefill + restore + decode + eviction + stands + delay
    return CostTerms(
        group, queue, prefill, restore, decode, eviction, stands, delay, device, host, expected, has_room, cached, total
    )
