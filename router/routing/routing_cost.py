"""choose_group(): the group that a request is sent to: the one with the least cost in seconds.

    cost     = queue + prefill + restore + decode + eviction + stall + delay
    queue    = prompt tokens queued at the group / prefill rate
    prefill  = tokens of this prompt that no tier of the group holds / prefill rate
    restore  = tokens of this prompt that only the host tier holds / restore rate
    decode   = steps that the queue and the prompt take × seconds of a step at the group's batch size
    eviction = tokens of blocks in use that the prompt evicts / prefill rate; to evict a cached block costs nothing:
               a price by the measured chance of its reuse changed TTFT p90 by -3% to +3% in 12 cells of
               bench/routing.py, by 0% in the mean
    stall    = prefill × streams that decode there × a price per stream that grows with the mean busy share
    delay    = (prefill + restore + eviction) × requests that will wait behind this one at the group

The first four terms are the time that this request waits; the last three are the time that other requests will wait.
Every term is continuous in what is measured of the groups. The number of requests that will wait behind this one
follows from the mean queue of all groups: while all groups are busy, a second of extra work on any of them delays
all requests, so a cached prefix is worth more the longer the queues are. Two rules correct the mean: work on a mostly
idle group delays no request; and while other groups are idle, requests wait behind a group's own queue.

Two gates exclude groups before costs are compared. The gates are thresholds, so a small change of a queue may change
the choice. `why` names the cheaper groups that were excluded:

- Room: while some group has room, a group without room is excluded unless it holds more of the prompt than every group
  with room. A request that is sent to a full group could not be sent elsewhere when another group becomes free.
- Queue: a group is excluded if its queue alone takes longer than the whole prompt takes on another group
  (`_longest_queue`). Costs alone would let requests wait seconds for a prefix that another group computes sooner.

Ties are broken by session, or at random. The module is pure.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from statistics import fmean
from typing import Final, NamedTuple

# Used until a group has measured its own rates. They only weigh the terms of the cost against each other.
_GUESSED_PREFILL_RATE: Final = 2000.0
_GUESSED_BATCH_TOKENS: Final = 2048
_GUESSED_RESTORE_SPEEDUP: Final = 10.0  # restore rate / prefill rate
# The requests that wait behind a prompt are those that queue now, and at a busy share of b, b / (1 - b) later ones for
# each of them. Those that queue now count _BEHIND times, because a burst of arrivals ends before its work is done.
_BEHIND: Final = 3.0
_BUSIEST: Final = 0.97
# Requests that will wait behind one at a group are the larger of two figures: the mean queue of all groups × min(busy
# share / (mean busy share / _BUSY_MARGIN), 1), and the group's own queue × the mean idle share. The mean queue alone
# made idle groups look expensive while one group had a long queue: with a system prompt that all users share, every
# request went to the group that held the prompt (TTFT p90 at a load of 0.3: 101 s; now 0.09 s). The own queue alone
# costs goodput where all groups are busy (conversation/3000/0.95: 0.13 in place of 0.26).
_BUSY_MARGIN: Final = 2.0
_BUSY_EPSILON: Final = 1e-4  # added to busy shares, so that groups that have all been idle are alike
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
# busy share of _HALF_WEIGHT_BUSY_SHARE, and more above it. With its own rate alone, a group that measured slow once
# would never be chosen again, and so its rate would never be updated.
_HALF_WEIGHT_BUSY_SHARE: Final = 0.05
_MIN_RATE_WEIGHT: Final = 0.001  # least weight of a group in the mean rate of all groups
_MAX_NAMED: Final = 3  # groups that a message names


class Candidate(NamedTuple):
    """What is known of one group when a request is sent. A rate of 0 has not been measured yet."""

    group: str
    queued_prefill_tokens: float = 0.0
    queued_requests: float = 0.0  # requests to which these tokens belong
    prefill_tokens_per_second: float = 0.0
    restore_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    max_batch_tokens: int = 0  # max tokens in a step; 0 if unknown
    busy_share: float = 0.0  # share of the last minute spent on prompts, from 0 to 1
    free_tokens: float = 0.0  # capacity of blocks that hold nothing
    evictable_tokens: float = 0.0  # capacity of cached blocks that no sequence uses
    # Tokens of this prompt that the group holds, by tier, or computes for other prompts before this one.
    device_tokens: int = 0
    host_tokens: int = 0
    expected_tokens: int = 0
    streams: float = 0.0  # running and waiting choices
    has_room: bool = True  # see GroupLoad.has_room


class GroupCost(NamedTuple):
    """One candidate's cost, term by term, and the prompt tokens that it holds by tier. Fields as in the message."""

    group: str
    queue_seconds: float
    prefill_seconds: float
    restore_seconds: float
    decode_seconds: float
    eviction_seconds: float
    stall_seconds: float
    delay_seconds: float
    total_seconds: float  # sum of the seconds above: what is compared
    device_tokens: int
    host_tokens: int
    expected_tokens: int
    has_room: bool
    cached_tokens: int  # sum of device, host and expected: tokens that the group need not compute


_NAMES: Final = [field.removesuffix("_seconds") for field in GroupCost._fields[1:8]]


@dataclass(frozen=True)
class Decision:
    """The chosen group, and the cost of every candidate."""

    group: str
    costs: tuple[GroupCost, ...]
    prompt_tokens: int

    @cached_property
    def chosen(self) -> GroupCost:
        """The cost of the chosen group."""
        return next(cost for cost in self.costs if cost.group == self.group)

    @property
    def why(self) -> str:
        """The decision as one line of text, for status pages and logs."""
        best = self.chosen
        named = (f"{name} {value:.3f}" for name, value in zip(_NAMES, best[1:8], strict=False))
        cached = f"{best.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        others = [cost for cost in self.costs if cost.group != self.group]
        cheaper = [cost for cost in others if cost.total_seconds < best.total_seconds]
        if cheaper:
            names = ", ".join(sorted(cost.group for cost in cheaper)[:_MAX_NAMED])
            against = f"; cheaper, but without room or with too long a queue: {names}"
        elif others:
            against = f"; the next best costs {min(cost.total_seconds for cost in others):.3f} s"
        else:
            against = "; no other group"
        return f"{self.group}: {best.total_seconds:.3f} s ({' + '.join(named)}), {cached}{against}"


def choose_group(
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    rng: random.Random,
    *,
    queued_in_router: int = 0,
    session: str = "",
) -> Decision:
    """Chooses among at least one candidate.

    `queued_in_router`: requests that wait in the router. `session`: of groups with equal cost, requests of one session
    go to the same one.
    """
    measured = [
        (c.prefill_tokens_per_second, c.busy_share + _MIN_RATE_WEIGHT)
        for c in candidates
        if c.prefill_tokens_per_second > 0
    ]
    weights = sum([weight for _, weight in measured])
    mean_rate = sum([rate * weight for rate, weight in measured]) / weights if measured else _GUESSED_PREFILL_RATE
    busy = min(fmean([c.busy_share for c in candidates]), _BUSIEST)
    later_per_queued = busy / (1 - busy)
    behind_per_queued = _BEHIND + later_per_queued
    stall = _STALL * (_STALL_IDLE + later_per_queued)
    mean_queue = fmean([c.queued_requests for c in candidates]) + queued_in_router / len(candidates)
    fully_busy = busy / _BUSY_MARGIN + _BUSY_EPSILON
    behind = [
        behind_per_queued
        * max(mean_queue * min((c.busy_share + _BUSY_EPSILON) / fully_busy, 1.0), (1 - busy) * c.queued_requests)
        for c in candidates
    ]
    costs = tuple(
        [
            _group_cost(c, prompt_tokens, mean_rate, requests_behind, stall)
            for c, requests_behind in zip(candidates, behind, strict=True)
        ]
    )
    allowed = _apply_gates(costs, [c.streams for c in candidates])
    least = min([cost.total_seconds for cost in allowed])
    best = [cost.group for cost in allowed if cost.total_seconds == least]
    if len(best) == 1:
        group = best[0]
    elif session:
        group = min(best, key=lambda name: blake2b(f"{session}/{name}".encode(), digest_size=8).digest())
    else:
        group = rng.choice(best)
    return Decision(group, costs, prompt_tokens)


def _apply_gates(costs: Sequence[GroupCost], streams: Sequence[float]) -> list[GroupCost]:
    """The costs of the groups that neither gate excludes; at least one. `streams`: open streams of each group, in the
    order of `costs`."""
    cached_with_room = max([cost.cached_tokens for cost in costs if cost.has_room], default=-1)
    passed = [
        (cost, count)
        for cost, count in zip(costs, streams, strict=True)
        if cost.has_room or cost.cached_tokens > cached_with_room
    ]
    longest_queue = min([_longest_queue(cost, count) for cost, count in passed])
    return [cost for cost, _ in passed if cost.queue_seconds <= longest_queue]


def _longest_queue(elsewhere: GroupCost, streams: float) -> float:
    """The longest queue, in seconds, with which another group is still a candidate beside the group `elsewhere`, which
    has `streams` open streams. If `elsewhere` is idle, this is the time in which it computes the whole prompt."""
    computes = (
        elsewhere.prefill_seconds + elsewhere.restore_seconds + elsewhere.decode_seconds + elsewhere.eviction_seconds
    )
    return computes * (1 + _STREAM_WEIGHT * streams) + elsewhere.queue_seconds * _QUEUE_RATIO


def _group_cost(candidate: Candidate, prompt_tokens: int, mean_rate: float, behind: float, stall: float) -> GroupCost:
    (
        group, queued, _, rate, restore_rate, step, max_batch, busy, free, evictable, device, host, expected,
        streams, has_room,
    ) = candidate  # fmt: skip
    rate = mean_rate + (rate - mean_rate) * busy / (busy + _HALF_WEIGHT_BUSY_SHARE) if rate else mean_rate
    cached = device + host + expected
    uncached = max(prompt_tokens - cached, 0)
    queue = queued / rate
    prefill = uncached / rate
    restore = host / (restore_rate or rate * _GUESSED_RESTORE_SPEEDUP) if host else 0.0
    decode = (queued + uncached) / (max_batch or _GUESSED_BATCH_TOKENS) * step
    # Tokens without a free or a cached block: running sequences lose blocks. The queue takes free blocks first.
    short = queued + uncached + host - free
    eviction = (short - max(queued - free, evictable)) / rate if short > evictable else 0.0
    stall_cost = prefill * streams * stall
    delay = (prefill + restore + eviction) * behind
    total = queue + prefill + restore + decode + eviction + stall_cost + delay
    return GroupCost(
        group,
        queue,
        prefill,
        restore,
        decode,
        eviction,
        stall_cost,
        delay,
        total,
        device,
        host,
        expected,
        has_room,
        cached,
    )
