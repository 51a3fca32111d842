"""choose_group(): the group that a request is sent to: the one with the least cost in seconds.

The cost is the time that this request waits for its first token, and the time that all other requests lose because of
this one. docs/routing.md derives it:

    cost     = queue + prefill + restore + decode        this request waits
             + eviction + delay                          others wait longer for their first token
             + stall                                     others wait longer for their next token

    queue    = the step that runs now, if any, and prompt tokens queued at the group / prefill rate
    prefill  = tokens of this prompt that the group neither holds nor is about to compute for others / prefill rate
    restore  = tokens of this prompt that only the host tier holds / restore rate
    decode   = steps that the queue and the prompt take × seconds of a step at the group's batch size
    eviction = tokens of blocks in use that the prompt evicts / prefill rate
    delay    = (prefill + restore + eviction) × requests per group that wait in the router / idle share
    stall    = prefill × running and waiting choices there × TTFT limit / (tokens of an answer × TPOT limit)

Requests wait in the router only while no group has room for them. As long as none waits, the delay is 0, and the length
of one group's queue does not change what another group costs.

One gate excludes groups: while some group has room, a group without room is excluded unless it holds more of the prompt
than every group with room. A request that is sent to a group without room could not be sent elsewhere when another
group becomes free.

Ties are broken by session, or at random. If other routers send requests too, the choice is drawn from the groups whose
costs these requests will make equal before the next reports (`_draw_group`), and the session does not count. The
module is pure.

The costs of all candidates are computed together: each figure is an array with one number per group, and the rows that
explain a decision are made when they are asked for.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from heapq import nsmallest
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]
IndexArray: TypeAlias = NDArray[np.intp]
NameArray: TypeAlias = NDArray[np.object_]  # of str

# Used until the true figures are known. They only weigh the terms of the cost against each other.
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
_MAX_KEPT: Final = 33  # the chosen group, and as many others as an explanation in a call's metadata has
_MIX: Final = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)  # constants of SplitMix64
PREFIX_AWARE: Final = "prefix-aware"  # the policy of choose_group, by its name in `serve --routing`


class Candidate(NamedTuple):
    """What is known of one group when a request is sent. A rate of 0 has not been measured yet."""

    group: str
    queued_prefill_tokens: float = 0.0
    prefill_tokens_per_second: float = 0.0
    restore_tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    max_batch_tokens: float = 0  # max tokens in a step; 0 if unknown
    busy_share: float = 0.0  # share of the last minute spent on prompts, from 0 to 1
    free_tokens: float = 0.0  # capacity of blocks that hold nothing
    evictable_tokens: float = 0.0  # capacity of cached blocks that no sequence uses
    streams: float = 0.0  # running and waiting choices
    unseen_requests: float = 0.0  # requests that other routers have sent since the group's last report, in the mean
    has_room: bool = True  # see GroupLoad.has_room
    # Tokens of this prompt that the group holds, by tier, or computes for other prompts before this one.
    device_tokens: float = 0
    host_tokens: float = 0
    expected_tokens: float = 0


class Candidates(NamedTuple):
    """At least one Candidate, as one array per field: field i of the arrays is that of group i."""

    groups: NameArray
    queued_prefill_tokens: FloatArray
    prefill_tokens_per_second: FloatArray
    restore_tokens_per_second: FloatArray
    step_seconds: FloatArray
    max_batch_tokens: FloatArray
    busy_share: FloatArray
    free_tokens: FloatArray
    evictable_tokens: FloatArray
    streams: FloatArray
    unseen_requests: FloatArray
    has_room: BoolArray
    device_tokens: FloatArray
    host_tokens: FloatArray
    expected_tokens: FloatArray

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Self:
        """The candidates in this order."""
        columns = {name: [getattr(row, name) for row in candidates] for name in Candidate._fields}
        names = np.array(columns.pop("group"), object)
        has_room = np.array(columns.pop("has_room"), bool)
        return cls(names, has_room=has_room, **{name: np.array(column, float) for name, column in columns.items()})


class GroupCost(NamedTuple):
    """One candidate's cost, term by term, and the prompt tokens that it holds by tier. Fields as in the
    protobuf message GroupCost, except the last two."""

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


class GroupCosts(NamedTuple):
    """The GroupCost of every candidate, as one array per field."""

    groups: NameArray
    queue_seconds: FloatArray
    prefill_seconds: FloatArray
    restore_seconds: FloatArray
    decode_seconds: FloatArray
    eviction_seconds: FloatArray
    stall_seconds: FloatArray
    delay_seconds: FloatArray
    total_seconds: FloatArray
    device_tokens: FloatArray
    host_tokens: FloatArray
    expected_tokens: FloatArray
    has_room: BoolArray
    cached_tokens: FloatArray
    queued_tokens: FloatArray

    @property
    def first_token_seconds(self) -> FloatArray:
        """See GroupCost.first_token_seconds."""
        return self.queue_seconds + self.prefill_seconds + self.restore_seconds + self.decode_seconds

    def select_rows(self, indices: IndexArray) -> Self:
        """The costs of these candidates, in this order."""
        return type(self)._make(column[indices] for column in self)

    def row(self, index: int) -> GroupCost:
        """The cost of one candidate."""
        cost = GroupCost._make(column.item(index) for column in self)
        return cost._replace(
            device_tokens=int(cost.device_tokens),
            host_tokens=int(cost.host_tokens),
            expected_tokens=int(cost.expected_tokens),
            cached_tokens=int(cost.cached_tokens),
        )


@dataclass(frozen=True)
class Decision:
    """The chosen group, and the cost of every candidate. `index`: that of the chosen group in `table`. `makes_copy`:
    the group was chosen although it costs more, to compute another copy of the prefix (see PrefixReplication).
    `policy`: what chose the group (see apply_policy)."""

    table: GroupCosts
    index: int
    prompt_tokens: int
    makes_copy: bool = False
    policy: str = PREFIX_AWARE

    @property
    def group(self) -> str:
        """The name of the chosen group."""
        return str(self.table.groups[self.index])

    @cached_property
    def chosen(self) -> GroupCost:
        """The cost of the chosen group."""
        return self.table.row(self.index)

    @property
    def costs(self) -> list[GroupCost]:
        """The cost of every candidate. The rows are made when they are asked for."""
        return [self.table.row(index) for index in range(len(self.table.groups))]

    @property
    def excluded(self) -> BoolArray:
        """For each candidate: whether the policy excludes the group, because it has no room."""
        has_room = self.table.has_room
        if self.policy == PREFIX_AWARE:
            return np.isinf(_apply_room_gate(self.table))
        return ~has_room & has_room.any()

    def keep_cheapest(self) -> Self:
        """The same decision with the costs of only the cheapest candidates and the chosen one. It takes less memory,
        for as long as the request runs."""
        totals = self.table.total_seconds
        if len(totals) <= _MAX_KEPT:
            return self
        cheapest = np.argpartition(totals, _MAX_KEPT - 1)[: _MAX_KEPT - 1]
        indices = np.append(self.index, cheapest[cheapest != self.index])
        return replace(self, table=self.table.select_rows(indices), index=0)

    @property
    def why(self) -> str:
        """The decision as one line of text, for status pages and logs."""
        best, totals = self.chosen, self.table.total_seconds
        named = (f"{name} {value:.3f}" for name, value in zip(_NAMES, best[1:8], strict=False))
        cached = f"{best.cached_tokens} of {self.prompt_tokens} prompt tokens cached"
        cheaper = totals < best.total_seconds
        names = ", ".join(nsmallest(_MAX_NAMED, self.table.groups[cheaper]))
        if self.policy != PREFIX_AWARE:
            against = f"; chosen by --routing {self.policy}, whatever the cost"
        elif self.makes_copy:
            against = "; it computes another copy of a prefix that is used often"
        elif (cheaper & self.table.has_room).any():
            against = f"; cheaper, but other routers will send there too: {names}"
        elif names:
            against = f"; cheaper, but without room: {names}"
        elif len(totals) > 1:
            against = f"; the next best costs {np.delete(totals, self.index).min():.3f} s"
        else:
            against = "; no other group"
        return f"{self.group}: {best.total_seconds:.3f} s ({' + '.join(named)}), {cached}{against}"


def choose_group(
    candidates: Candidates,
    prompt_tokens: int,
    rng: random.Random,
    *,
    queued_in_router: int = 0,
    answer_tokens: float = GUESSED_ANSWER_TOKENS,
    session: str = "",
) -> Decision:
    """Chooses among at least one candidate.

    `queued_in_router`: requests that wait in the router for one of these groups. `answer_tokens`: mean tokens of an
    answer. `session`: while no other router sends requests, those of one session go to the same one of the groups with
    the least cost.
    """
    costs = _group_costs(candidates, prompt_tokens, queued_in_router, answer_tokens)
    totals = _apply_room_gate(costs)
    cheapest = np.flatnonzero(totals == totals.min())
    first = cheapest[0]
    seconds = costs.prefill_seconds[first] + costs.restore_seconds[first]
    others_work = float(candidates.unseen_requests.sum() * seconds)
    if others_work:
        index = _draw_group(totals, others_work, rng)
    elif len(cheapest) == 1:
        index = first
    elif session:
        index = _choose_for_session(session, costs.groups, cheapest)
    else:
        index = rng.choice(cheapest)
    return Decision(costs, int(index), prompt_tokens)


def _group_costs(candidates: Candidates, prompt_tokens: int, queued_in_router: int, answer_tokens: float) -> GroupCosts:
    """The cost of each candidate."""
    (
        groups, queued, own_rate, restore_rate, step, max_batch, busy, free, evictable, streams, _, has_room,
        device, host, expected,
    ) = candidates  # fmt: skip
    is_measured = own_rate > 0
    weights = (busy + _MIN_RATE_WEIGHT) * is_measured
    total_weight = weights.sum()
    mean_rate = float(own_rate @ weights) / total_weight if total_weight else _GUESSED_PREFILL_RATE
    rate = mean_rate + (own_rate - mean_rate) * (busy * is_measured) / (busy + _HALF_WEIGHT_BUSY_SHARE)
    idle_share = max(1 - busy.sum() / len(busy), _MIN_IDLE_SHARE)
    delayed = queued_in_router / len(busy) / idle_share  # requests that wait longer by each second of work
    stall_price = _TTFT_LIMIT / (answer_tokens * _TPOT_LIMIT)  # seconds that a stalled second of a stream costs

    cached = device + host + expected
    uncached = np.maximum(prompt_tokens - cached, 0)
    work = queued + uncached
    queue = step * (streams > 0) + queued / rate
    prefill = uncached / rate
    restore = host / np.where(restore_rate > 0, restore_rate, rate * _GUESSED_RESTORE_SPEEDUP)
    decode = work / np.where(max_batch > 0, max_batch, _GUESSED_BATCH_TOKENS) * step
    # Tokens without a free or a cached block: running sequences lose blocks. The queue takes free blocks first.
    short = work + host - free
    eviction = np.where(short > evictable, short - np.maximum(queued - free, evictable), 0.0) / rate
    stall = prefill * streams * stall_price
    delay = (prefill + restore + eviction) * delayed
    total = queue + prefill + restore + decode + eviction + stall + delay
    return GroupCosts(
        groups,
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


def _apply_room_gate(costs: GroupCosts) -> FloatArray:
    """The totals, infinite for groups that the gate excludes. At least one is finite."""
    if costs.has_room.all():
        return costs.total_seconds
    cached_with_room = costs.cached_tokens[costs.has_room].max(initial=-1)
    return np.where(costs.has_room | (costs.cached_tokens > cached_with_room), costs.total_seconds, np.inf)


def _draw_group(totals: FloatArray, work: float, rng: random.Random) -> int:
    """The index of a group drawn so that routers that decide at the same time do not all choose the cheapest.

    `work`: seconds of work that other routers send meanwhile. Water-filling: the work raises the costs of the cheapest
    groups to one level, and each group is drawn in proportion to its depth below the level. So if all routers draw in
    this way, their work makes the costs of the drawn groups equal.
    """
    order = np.argsort(totals, kind="stable")
    costs = totals[order]
    levels = (work + np.cumsum(costs)) / np.arange(1, len(costs) + 1)  # if the first 1, 2, ... groups are filled
    level = levels[np.argmax(levels <= np.append(costs[1:], np.inf))]
    depths = np.maximum(level - costs, 0.0)
    if not depths.any():  # the work is too small to show in the sums
        depths = (costs == costs[0]).astype(float)
    drawn = np.flatnonzero(depths)
    return int(rng.choices(order[drawn], depths[drawn].tolist())[0])


def _choose_for_session(session: str, groups: NameArray, indices: IndexArray) -> int:
    """The one of `indices` with the highest hash of session and group (rendezvous hashing)."""
    hashes = np.array([_hash_name(name) for name in groups[indices]], np.uint64) ^ np.uint64(_hash_name(session))
    for constant, shift in zip(_MIX, (30, 27), strict=True):  # the finalizer of SplitMix64
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * constant
    return int(indices[np.argmax(hashes ^ (hashes >> np.uint64(31)))])


@lru_cache(maxsize=1 << 14)
def _hash_name(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
