"""The plan of a step's attention: which program computes which queries over which keys. Pure arithmetic on the host.

    tile    up to `queries` consecutive queries of one sequence
    item    a tile and a range of its keys; `head_tiles` programs compute it, one for each group of heads
    merge   a query whose keys are divided among several items, which write partial results to slots

Divided keys are divided at multiples of UNIT, counted from the sequence's first token. A range has at most as many keys
as each program would have if the work of the whole step were spread evenly. So a long context among short ones, and a
few new tokens after a long prefix, keep the whole GPU busy, and no step has more ranges than it needs. The plan depends
only on the lengths of the step, not on the size of the KV pool.

In batch-invariant mode the keys of a tile are divided into units of INVARIANT_UNIT keys, or not at all. The kernel
combines units in order in both cases, so the division changes no bit.

`pack_plans` writes plans into one int32 array, and the kernels read them on the device (see paged_tiles.py):

    counts   [3]     numbers of short items, of wide items and of merges
    items    [n, 8]  row of block_tables, first query, number of queries, position of the first query, first key, end of
                     the keys, slot of the first query or -1 (the item has all keys and writes the output), 0
    merges   [n, 4]  query, slot of its first part, slots between its parts, number of parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UNIT = 256  # keys; the size of a part is a multiple
INVARIANT_UNIT = 512  # keys
COUNTS, ITEM, MERGE = 4, 8, 4  # int32s of a row; the last of `counts` is not used

Ints = NDArray[np.int64]


class TileShape(NamedTuple):
    """`queries`: of a tile. `head_tiles`: programs of an item. `programs`: programs over which a step's work is
    spread."""

    queries: int
    head_tiles: int
    programs: int

    @property
    def max_splits(self) -> int:
        """The most items of a step that write to slots."""
        return 3 * -(-self.programs // self.head_tiles)

    @property
    def max_slots(self) -> int:
        """The most slots that the items of a step write."""
        return self.max_splits * self.queries


@dataclass(frozen=True, slots=True)
class HostPlan:
    """`short`, `wide`: items [n, 8] of the two kinds of tiles. `merges`: [n, 4]. `num_slots`: slots that items
    write."""

    short: Ints
    wide: Ints
    merges: Ints
    num_slots: int


def plan_attention(
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    short: TileShape,
    wide: TileShape,
    window: int = 0,
    batch_invariant: bool = False,
) -> HostPlan:
    """The plan of a step. `q_lens`: queries of each sequence. `seq_lens`: context length of each sequence, including
    this step's tokens. `window`: the sliding window in tokens; 0 for none.

    Sequences with at most `short.queries` queries have short tiles, others wide ones. `batch_invariant`: all tiles are
    wide. A sequence of length 0 is padding: its queries attend to no key.
    """
    queries, lens = np.asarray(q_lens, np.int64), np.asarray(seq_lens, np.int64)
    is_short = (queries <= (0 if batch_invariant else short.queries)) & (queries > 0)
    is_wide = (queries > 0) & ~is_short
    firsts = np.cumsum(queries) - queries
    short_items, short_merges, used = _plan_kind(queries, lens, firsts, is_short, short, window, batch_invariant, 0)
    wide_items, wide_merges, used = _plan_kind(queries, lens, firsts, is_wide, wide, window, batch_invariant, used)
    return HostPlan(short_items, wide_items, np.concatenate((short_merges, wide_merges)), used)


def _plan_kind(
    queries: Ints, lens: Ints, firsts: Ints, chosen: NDArray[np.bool_], shape: TileShape, window: int,
    batch_invariant: bool, used: int,
) -> tuple[Ints, Ints, int]:  # fmt: skip
    """(items, merges, `used` plus the number of new slots) of the sequences that are `chosen`. `used`: slots of earlier
    items."""
    seqs = np.flatnonzero(chosen)
    if not len(seqs):
        return np.empty((0, ITEM), np.int64), np.empty((0, MERGE), np.int64), used
    num_tiles = -(-queries[seqs] // shape.queries)
    seq = np.repeat(seqs, num_tiles)
    nth = np.arange(len(seq)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    count = np.minimum(shape.queries, queries[seq] - nth * shape.queries)
    token = firsts[seq] + nth * shape.queries
    position = lens[seq] - queries[seq] + nth * shape.queries
    end = np.maximum(position + count, 0)  # positions of padding are negative
    start = np.maximum(position - window + 1, 0) if window else np.zeros_like(end)
    parts, size = _choose_parts(start, end, count, shape, batch_invariant)
    tile = np.repeat(np.arange(len(seq)), parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(parts) - parts, parts)
    is_split = parts > 1
    slots = np.where(is_split, parts * count, 0)
    slot = np.where(is_split, used + np.cumsum(slots) - slots, -1)
    base = start // size * size  # splits are at multiples of `size`
    first_key = np.where(is_split[tile], np.maximum(start[tile], base[tile] + part * size), start[tile])
    last_key = np.where(is_split[tile], np.minimum(end[tile], base[tile] + (part + 1) * size), end[tile])
    item_slot = np.where(is_split[tile], slot[tile] + part * count[tile], -1)
    items = np.stack(
        (seq[tile], token[tile], count[tile], position[tile], first_key, last_key, item_slot, np.zeros_like(tile)), 1
    )
    # The longest items come first, so that programs end at about the same time.
    items = items[np.argsort(first_key - last_key, kind="stable")]
    split = np.flatnonzero(is_split)
    query = np.repeat(split, count[split])
    nth_query = np.arange(len(query)) - np.repeat(np.cumsum(count[split]) - count[split], count[split])
    merges = np.stack((token[query] + nth_query, slot[query] + nth_query, count[query], parts[query]), 1)
    return items, merges, used + int(slots.sum())


def _choose_parts(
    start: Ints, end: Ints, count: Ints, shape: TileShape, batch_invariant: bool
) -> tuple[Ints, int]:  # fmt: skip
    """(the number of parts of each tile's keys, the size of a part in keys)."""
    share = -(-int((end - start).sum()) * shape.head_tiles // shape.programs)  # keys of a program, spread evenly
    if not batch_invariant:
        return _choose_even_parts(start, end, shape, share)
    is_long = end - start > _round_up(share)
    parts = np.where(is_long, -(-end // INVARIANT_UNIT) - start // INVARIANT_UNIT, 1)
    # Tiles are divided in order until the slots are used up. Dividing changes no bit, so any limit would do.
    slots = np.cumsum(np.where(parts > 1, parts * count, 0))
    return np.where(slots <= shape.max_slots, parts, 1), INVARIANT_UNIT


def _choose_even_parts(start: Ints, end: Ints, shape: TileShape, share: int) -> tuple[Ints, int]:
    """Parts of at most `share` keys. They are a half or a third of that if the program with the most keys then has at
    least a tenth less. For example, 512 items of equal length take 396 programs two rounds; three times as many parts
    take four rounds of a third each."""
    programs = max(1, shape.programs // shape.head_tiles)
    chosen: tuple[Ints, int] | None = None
    least = 0.0
    for divisor in (1, 2, 3):
        size = _round_up(share // divisor)
        parts = np.where(end - start > size, -(-end // size) - start // size, 1)
        if chosen is not None and int(parts[parts > 1].sum()) > shape.max_splits:
            break
        lengths = np.sort(np.repeat((end - start) / parts, parts))[::-1]
        rounds = np.zeros(-(-len(lengths) // programs) * programs)
        rounds[: len(lengths)] = lengths
        most = float(rounds.reshape(-1, programs).sum(0).max())
        if chosen is None or most < 0.9 * least:
            chosen, least = (parts, size), most
    assert chosen is not None
    return chosen


def _round_up(keys: int) -> int:
    return -(-max(keys, 1) // UNIT) * UNIT


class PlanSpace(NamedTuple):
    """The room of one plan: items of each kind and merges in the packed array, and slots for partial results."""

    short: int
    wide: int
    merges: int
    slots: int

    @classmethod
    def of(cls, plan: HostPlan) -> PlanSpace:
        """The room that `plan` needs."""
        return cls(len(plan.short), len(plan.wide), len(plan.merges), plan.num_slots)

    @classmethod
    def of_tokens(
        cls, num_tokens: int, *, short: TileShape | None, wide: TileShape | None, batch_invariant: bool = False
    ) -> PlanSpace:
        """Room for any plan of `num_tokens` queries. `short`, `wide`: None if the plan has no such tiles."""

        def needs(shape: TileShape | None) -> tuple[int, int]:
            """(items, slots) of one kind of tiles."""
            if shape is None:
                return 0, 0
            if batch_invariant:
                return num_tokens + shape.max_slots, shape.max_slots
            return num_tokens + shape.max_splits, shape.max_splits * min(shape.queries, num_tokens)

        (short_items, short_slots), (wide_items, wide_slots) = needs(short), needs(wide)
        slots = short_slots + wide_slots
        return cls(short_items, wide_items, min(num_tokens, slots // 2), slots)

    @property
    def ints(self) -> int:
        return COUNTS + ITEM * (self.short + self.wide) + MERGE * self.merges


def pack_plans(plans: Sequence[HostPlan], spaces: Sequence[PlanSpace]) -> NDArray[np.int32]:
    """The plans one after another, each in its space."""
    packed = np.zeros(sum(space.ints for space in spaces), np.int32)
    at = 0
    for plan, space in zip(plans, spaces, strict=True):
        packed[at : at + 3] = len(plan.short), len(plan.wide), len(plan.merges)
        at += COUNTS
        for rows, room in ((plan.short, space.short), (plan.wide, space.wide), (plan.merges, space.merges)):
            assert len(rows) <= room and plan.num_slots <= space.slots
            width = rows.shape[1]
            packed[at : at + len(rows) * width] = rows.reshape(-1)
            at += room * width
    return packed
