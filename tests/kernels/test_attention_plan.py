"""The plan of a step's attention: every query sees every key once, in parts that keep a GPU busy. Pure arithmetic."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.kernels.attention.attention_plan import (
    COUNTS,
    INVARIANT_UNIT,
    ITEM,
    UNIT,
    HostPlan,
    PlanSpace,
    TileShape,
    pack_plans,
    plan_attention,
)

SHORT, WIDE = TileShape(4, 8, 396), TileShape(32, 8, 264)
sequences = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 30_000)).map(lambda pair: (pair[0], sum(pair))), max_size=12
)
shapes = st.builds(TileShape, st.integers(1, 40), st.sampled_from((1, 2, 8, 32)), st.sampled_from((1, 3, 100, 396)))


def check(
    plan: HostPlan, lengths: list[tuple[int, int]], window: int, short: TileShape, wide: TileShape
) -> None:  # fmt: skip
    """Every query sees its keys once: directly, or by parts that one merge names."""
    firsts = np.cumsum([0, *(q for q, _ in lengths)])
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for rows, shape in ((plan.short, short), (plan.wide, wide)):
        for seq, token, count, position, start, end, slot, _ in rows.tolist():
            q_len, seq_len = lengths[seq]
            assert 1 <= count <= shape.queries and firsts[seq] <= token and token + count <= firsts[seq + 1]
            assert position == seq_len - q_len + token - firsts[seq] and 0 <= start <= end <= position + count
            assert slot == -1 or end - start > 0
            for nth in range(count):
                seen.setdefault(token + nth, []).append((start, end, -1 if slot == -1 else slot + nth))
    merges = {token: (slot, stride, parts) for token, slot, stride, parts in plan.merges.tolist()}
    slots: list[int] = []
    for seq, (q_len, seq_len) in enumerate(lengths):
        for nth in range(q_len):
            token, position = int(firsts[seq]) + nth, seq_len - q_len + nth
            parts = sorted(seen.pop(token))
            assert parts[0][0] <= (max(position - window + 1, 0) if window else 0) and parts[-1][1] > position
            assert all(one[1] == other[0] for one, other in pairwise(parts))
            if token in merges:
                slot, stride, number = merges.pop(token)
                assert [part[2] for part in parts] == [slot + index * stride for index in range(number)]
                slots += [part[2] for part in parts]
            else:
                assert [part[2] for part in parts] == [-1]
    assert not seen and not merges and sorted(slots) == list(range(plan.num_slots))


@given(lengths=sequences, window=st.sampled_from((0, 1, 700)), short=shapes, wide=shapes, invariant=st.booleans())
def test_every_query_sees_every_key_once(
    lengths: list[tuple[int, int]], window: int, short: TileShape, wide: TileShape, invariant: bool
) -> None:
    """The items of a query cover its keys without overlap, and its merge names their slots, for any step."""
    q_lens, seq_lens = [q for q, _ in lengths], [s for _, s in lengths]
    plan = plan_attention(q_lens, seq_lens, short=short, wide=wide, window=window, batch_invariant=invariant)
    check(plan, lengths, window, short, wide)
    assert plan.num_slots <= short.max_slots + wide.max_slots
    assert not (invariant and len(plan.short))
    for rows in (plan.short, plan.wide):
        split = rows[rows[:, 6] >= 0]
        if invariant:
            assert ((split[:, 4] // INVARIANT_UNIT) == (split[:, 5] - 1) // INVARIANT_UNIT).all()


@given(
    lengths=sequences, window=st.sampled_from((0, 700)), short=shapes, wide=shapes, invariant=st.booleans(),
    all_wide=st.booleans(), padding=st.integers(0, 50),
)  # fmt: skip
def test_a_graph_has_room_for_every_step(
    lengths: list[tuple[int, int]], window: int, short: TileShape, wide: TileShape, invariant: bool, all_wide: bool,
    padding: int,
) -> None:  # fmt: skip
    """The space of a captured step holds the plan of any sequences, depends on the number of tokens alone, and has no
    room for tiles that the step cannot have. Padding of any number of queries is computed and sees no key."""
    q_lens, seq_lens = [*(q for q, _ in lengths), padding], [*(s for _, s in lengths), 0]
    no_short = short._replace(queries=0)
    plan = plan_attention(
        q_lens, seq_lens, short=no_short if all_wide else short, wide=wide, window=window, batch_invariant=invariant
    )
    has_short = not (all_wide or invariant)
    has_wide = not has_short or any(q > short.queries for q in q_lens)
    space = PlanSpace.of_tokens(
        sum(q_lens), short=short if has_short else None, wide=wide if has_wide else None, batch_invariant=invariant
    )
    packed = pack_plans([plan], [space])
    assert packed[:3].tolist() == [len(plan.short), len(plan.wide), len(plan.merges)]
    at = COUNTS + ITEM * space.short
    assert packed[COUNTS : COUNTS + plan.short.size].reshape(-1, ITEM).tolist() == plan.short.tolist()
    assert packed[at : at + plan.wide.size].reshape(-1, ITEM).tolist() == plan.wide.tolist()
    pads = [item for item in (*plan.short.tolist(), *plan.wide.tolist()) if item[0] == len(lengths)]
    assert sum(item[2] for item in pads) == padding
    assert all(item[4:7] == [0, 0, -1] for item in pads)


def test_few_queries_behind_a_long_prefix_use_the_whole_gpu() -> None:
    """16 tokens behind 100,000 are 8 programs without splits, and hundreds with. A whole prompt is not split."""
    medium = TileShape(16, 8, 264)
    behind = plan_attention([16], [100_016], short=SHORT, wide=medium)
    assert 200 <= len(behind.wide) * medium.head_tiles <= 264
    prompt = plan_attention([8192], [8192], short=SHORT, wide=WIDE)
    assert len(prompt.wide) == 256 and prompt.num_slots == 0
    assert not len(behind.short) and not len(prompt.short)


def test_equal_lengths_fill_the_programs_evenly() -> None:
    """64 decodes of 4,096 keys in 8 heads are 512 items for 396 programs: split, no program has 1.4 times its share."""
    plan = plan_attention([1] * 64, [4096] * 64, short=SHORT, wide=WIDE)
    keys = (plan.short[:, 5] - plan.short[:, 4]).repeat(SHORT.head_tiles)
    most = max(keys[first :: SHORT.programs].sum() for first in range(SHORT.programs))
    assert most < 1.4 * keys.sum() / SHORT.programs


def test_one_long_context_among_short_ones_is_split() -> None:
    """No item is longer than one program's share, or a unit if that is longer; the others stay whole."""
    lens = [100_000, *[1_000] * 63]
    plan = plan_attention([1] * 64, lens, short=SHORT, wide=WIDE)
    share = sum(lens) * SHORT.head_tiles / SHORT.programs
    longest = (plan.short[:, 5] - plan.short[:, 4]).max()
    assert longest <= share + UNIT
    assert set(plan.merges[:, 0].tolist()) == {0} and len(plan.short) < 64 + SHORT.max_splits
