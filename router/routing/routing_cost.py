"""choose_group(): the group that a request is sent to: the one with the least cost in seconds.

The cost is the time that this request waits for its first token, and the time that all other requests lose because of
this one. docs/routing.md derives it:

    cost     = queue + prefill + restore + decode        this request waits
             + eviction + delay                          others wait longer for their first token
             + stall                                     others wait longer for their next token

    queue    = the step that runs now, if any, and prompt tokens queued at the group / prefill rate
    prefill  = tokens of this prompt that no tier of the group holds / prefill rate
    restore  = tokens of this prompt that only the host tier holds / restore rate
    decode   = steps that the queue and the prompt take × seconds of a step at the group's batch size
    eviction = tokens of blocks in use that the prompt evicts / prefill rate
    delay    = (prefill + restore + eviction) × requests per group that wait in the router / idle share
    stall    = prefill × streams that decode there × TTFT limit / (tokens of an answer × TPOT limit)

Requests wait in the router only while no group has room for them. As long as none waits, the delay is 0, and the length
of one group's queue does not change what another group costs.

One gate excludes groups: while some group has room, a group without room is excluded unless it holds more of the prompt
than every group with room. A request that is sent to a full group could not be sent elsewhere when another group
becomes free.

Ties are broken by session, or at random. If other routers send requests too, which this one learns of with the next
reports, the choice is spread over the groups that these requests will make equal (`_spread`). The module is pure.
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
GUESSED_ANSWER_TOKENS: Final = 64.0
# Seconds to the first token, and per token, that a user still finds good. A stall that uses up all the time that an
# answer's tokens may take costs as much as a first token that comes at the limit.
_TTFT_LIMIT: Final = 2.0
_TPOT_LIMIT: Final = 0.1
_MIN_IDLE_SHARE: Final = 0.03  # at full load the measured idle share is noise
# The prefill rate of a group is a mean of its own measured rate and that of all groups. The own rate weighs half at a
# busy share of _HALF_WEIGHT_BUSY_SHARE, and more above it. With its own rate alone, a group that measured slow once
# would never be chosen again, and so its rate would never be updated.
_HALF_WEIGHT_BUSY_SHARE: Final = 0.05
_MIN_RATE_WEIGHT: Final = 0.001  # least weight of a group in the mean rate of all groups
_MAX_NAMED: Final = 3  # groups that a message names
PREFIX_AWARE: Final = "prefix-aware"  # the policy of choose_group, by its name in `serve --routing`


class Candidate(NamedTuple):
    """What is known of one group when a request is sent. A rate of 0 has not been measured yet."""

    group: str
    queued_prefill_tokens: float = 0.0
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
    unseen_requests: float = 0.0  # requests that other routers send to the group between two of its reports


class GroupCost(NamedTuple):
    """One candidate's cost, term by term, and the prompt tokens that it holds by tier. Fields as in the message, except
    the last two."""

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
    queued_tokens: float  # of other prompts

    @property
    def first_token_seconds(self) -> float:
        """The time until this request's first token: the terms that do not concern others."""
        return self.queue_seconds + self.prefill_seconds + self.restore_seconds + self.decode_seconds


_NAMES: Final = [field.removesuffix("_seconds") for field in GroupCost._fields[1:8]]


@dataclass(frozen=True)
class Decision:
    """The chosen group, and the cost of every candidate. `makes_copy`: the group was chosen although it costs more, to
    compute another copy of the prefix (see PrefixReplication). `policy`: what chose the group (see apply_policy)."""

    group: str
    costs: tuple[GroupCost, ...]
    prompt_tokens: int
    makes_copy: bool = False
    policy: str = PREFIX_AWARE

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
        names = ", ".join(sorted(cost.group for cost in cheaper)[:_MAX_NAMED])
        if self.policy != PREFIX_AWARE:
            against = f"; chosen by --routing {self.policy}, whatever the cost"
        elif self.makes_copy:
            against = "; it computes another copy of a prefix that is used often"
        elif any(cost.has_room for cost in cheaper):
            against = f"; cheaper, but other routers will send there too: {names}"
        elif cheaper:
            against = f"; cheaper, but without room: {names}"
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
    answer_tokens: float = GUESSED_ANSWER_TOKENS,
    session: str = "",
) -> Decision:
    """Chooses among at least one candidate.

    `queued_in_router`: requests that wait in the router for one of these groups. `answer_tokens`: mean tokens of an
    answer. `session`: of groups with equal cost, requests of one session go to the same one.
    """
    measured = [
        (c.prefill_tokens_per_second, c.busy_share + _MIN_RATE_WEIGHT)
        for c in candidates
        if c.prefill_tokens_per_second > 0
    ]
    weights = sum([weight for _, weight in measured])
    mean_rate = sum([rate * weight for rate, weight in measured]) / weights if measured else _GUESSED_PREFILL_RATE
    idle_share = max(1 - fmean([c.busy_share for c in candidates]), _MIN_IDLE_SHARE)
    delayed = queued_in_router / len(candidates) / idle_share
    stall = _TTFT_LIMIT / (answer_tokens * _TPOT_LIMIT)
    costs = tuple([_group_cost(c, prompt_tokens, mean_rate, delayed, stall) for c in candidates])
    allowed = _apply_room_gate(costs)
    least = min([cost.total_seconds for cost in allowed])
    best = [cost.group for cost in allowed if cost.total_seconds == least]
    seconds = next(cost.prefill_seconds + cost.restore_seconds for cost in allowed if cost.group == best[0])
    others_work = sum([c.unseen_requests for c in candidates]) * seconds
    if others_work:
        group = _spread(allowed, others_work, rng)
    elif len(best) == 1:
        group = best[0]
    elif session:
        group = min(best, key=lambda name: blake2b(f"{session}/{name}".encode(), digest_size=8).digest())
    else:
        group = rng.choice(best)
    return Decision(group, costs, prompt_tokens)


def _spread(costs: Sequence[GroupCost], work: float, rng: random.Random) -> str:
    """A group drawn so that routers that decide at the same time do not all choose the cheapest.

    `work`: seconds of work that other routers send meanwhile. Like water, the work fills the groups from the cheapest
    up to one level, and each group is drawn in proportion to its depth below the level. So if all routers draw in this
    way, their work makes the costs of the drawn groups equal.
    """
    ordered = sorted(costs, key=lambda cost: cost.total_seconds)
    level, filled = ordered[0].total_seconds, 0.0
    for count, cost in enumerate(ordered, 1):
        filled += cost.total_seconds
        level = (work + filled) / count
        if count == len(ordered) or level <= ordered[count].total_seconds:
            break
    depths = [max(level - cost.total_seconds, 0.0) for cost in ordered]
    if not any(depths):  # the work is too small to show in the sums
        depths = [float(cost.total_seconds == ordered[0].total_seconds) for cost in ordered]
    return rng.choices(ordered, depths)[0].group


def _apply_room_gate(costs: Sequence[GroupCost]) -> list[GroupCost]:
    """The costs of the groups that the gate does not exclude; at least one."""
    cached_with_room = max([cost.cached_tokens for cost in costs if cost.has_room], default=-1)
    return [cost for cost in costs if cost.has_room or cost.cached_tokens > cached_with_room]


def _group_cost(
    candidate: Candidate, prompt_tokens: int, mean_rate: float, delayed: float, stall_price: float
) -> GroupCost:
    """`delayed`: requests that wait longer by each second of work. `stall_price`: seconds that a stalled second of one
    stream costs."""
    (
        group, queued, rate, restore_rate, step, max_batch, busy, free, evictable, device, host, expected, streams,
        has_room, _,
    ) = candidate  # fmt: skip
    rate = mean_rate + (rate - mean_rate) * busy / (busy + _HALF_WEIGHT_BUSY_SHARE) if rate else mean_rate
    cached = device + host + expected
    uncached = max(prompt_tokens - cached, 0)
    queue = (step if streams else 0.0) + queued / rate
    prefill = uncached / rate
    restore = host / (restore_rate or rate * _GUESSED_RESTORE_SPEEDUP) if host else 0.0
    decode = (queued + uncached) / (max_batch or _GUESSED_BATCH_TOKENS) * step
    # Tokens without a free or a cached block: running sequences lose blocks. The queue takes free blocks first.
    short = queued + uncached + host - free
    eviction = (short - max(queued - free, evictable)) / rate if short > evictable else 0.0
    stall = prefill * streams * stall_price
    delay = (prefill + restore + eviction) * delayed
    total = queue + prefill + restore + decode + eviction + stall + delay
    return GroupCost(
        group,
        queue,
        prefill,
        restore,
        decode,
        eviction,
        stall,
        delay,
        total,
        device,
        host,
        expected,
        has_room,
        cached,
        queued,
    )
