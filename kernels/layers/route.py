"""route(): each token's experts and their weights, from the router's logits. sort_pairs(): sorts tokens by expert.

    scores    softmax(logits), sigmoid(logits), or the logits themselves ("softmax_of_chosen")
    choice    scores + correction; experts outside the best `top_groups` groups are left out
    ids       the `top_k` experts with the largest choice, in descending order; of equal ones the lower id first
    weights   the scores of the chosen experts ("softmax_of_chosen": softmax over their logits), divided by their
              sum + epsilon if `renormalise`, times `scale`

The best groups are those with the largest sum of their `group_best` largest choices. DeepSeek-V3 (arXiv:2412.19437,
section 2.1.2) uses sigmoid with correction and groups, DeepSeek-V2 softmax with groups, Qwen and Mixtral softmax,
gpt-oss softmax_of_chosen.

Shapes: logits [tokens, experts], contiguous; ids int32 and weights float32 [tokens, top_k]. Computed in float32. One
program computes one token.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import FLOATS, check_dense, check_device, check_dtype, once_per_geometry, refuse

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen")
MAX_EXPERTS = 1024
_PAIRS: int = 1024  # pairs that a program reads at a time
_ROUTING = struct.Struct("@P7qff")
_ROUTE = struct.Struct("@4P2q")


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """How a token's experts follow from its logits (see the module's docstring). Raises LaunchRefused.

    `experts`, `groups`: how many there are. `correction`: float32 [experts]; it changes the choice, not the weights.
    """

    experts: int
    top_k: int
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    correction: Tensor | None = None

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS:
            refuse("scoring", " or ".join(SCORINGS), self.scoring)
        if not 0 < self.experts <= MAX_EXPERTS or self.groups < 1 or self.experts % self.groups:
            refuse("experts", f"at most {MAX_EXPERTS}, in {self.groups} equal groups", self.experts)
        if not 0 < self.top_groups <= self.groups:
            refuse("top_groups", f"1 to {self.groups}", self.top_groups)
        size = self.experts // self.groups
        if not 0 < self.group_best <= size:
            refuse("group_best", f"1 to {size}", self.group_best)
        if not 0 < self.top_k <= size * self.top_groups:
            refuse("top_k", f"1 to {size * self.top_groups}, the experts of {self.top_groups} groups", self.top_k)
        if self.correction is not None:
            check_dense("correction", self.correction, (self.experts,), torch.float32, self.correction.device)

    def pack(self) -> bytes:
        """The C struct Routing. It points into this object, so it is valid only while this object lives."""
        correction = 0 if self.correction is None else self.correction.data_ptr()
        return _ROUTING.pack(
            correction, self.experts, self.top_k, SCORINGS.index(self.scoring), self.groups, self.top_groups,
            self.group_best, self.renormalise, self.scale, self.epsilon,
        )  # fmt: skip


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """(ids, weights). Raises LaunchRefused."""
    _check(logits, routing.experts)
    if routing.correction is not None:
        check_device("correction", routing.correction, logits.device)
    library = native.library_for(logits)
    if library is None and not uses_triton(logits):
        return route_reference(logits, routing)
    tokens = logits.shape[0]
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if library is not None:
        packed = routing.pack()
        library.route(
            _ROUTE.pack(
                native.address_of(packed), logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens,
                native.TYPES[logits.dtype],
            )
        )  # fmt: skip
    elif tokens:
        size = routing.experts // routing.groups
        _route[(tokens,)](
            logits, routing.correction, ids, weights, routing.epsilon, routing.scale, routing.groups, size,
            TOP_K=routing.top_k, TOP_GROUPS=routing.top_groups, GROUP_BEST=routing.group_best,
            SCORING=SCORINGS.index(routing.scoring), RENORMALISE=routing.renormalise,
            LIMITED=routing.top_groups < routing.groups, CORRECTED=routing.correction is not None,
            GROUPS=triton.next_power_of_2(routing.groups), SIZE=triton.next_power_of_2(size),
            CHOSEN=triton.next_power_of_2(routing.top_k), num_warps=1,
        )  # fmt: skip
    return ids, weights


@triton.jit
def _route(
    logits, correction, ids, weights, epsilon, scale, groups, size, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, SCORING: tl.constexpr, RENORMALISE: tl.constexpr, LIMITED: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lowest = float("-inf")
    group = tl.arange(0, GROUPS)
    within = tl.arange(0, SIZE)
    mask = (group[:, None] < groups) & (within[None, :] < size)
    expert = group[:, None] * size + within[None, :]
    scores = tl.load(logits + token * groups * size + expert, mask, other=lowest).to(tl.float32)
    if SCORING == 0:
        exps = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = exps / tl.sum(tl.sum(exps, 1), 0)
    elif SCORING == 1:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if CORRECTED:
        choice += tl.load(correction + expert, mask, other=0.0)
    choice = tl.where(mask, choice, lowest)
    if LIMITED:
        rest = choice
        totals = tl.zeros([GROUPS], tl.float32)
        for _ in tl.static_range(GROUP_BEST):
            best, at = tl.max(rest, 1, return_indices=True)
            totals += best
            rest = tl.where(within[None, :] == at[:, None], lowest, rest)
        totals = tl.where(group < groups, totals, lowest)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            at = tl.argmax(totals, 0)
            kept = kept | (group == at)
            totals = tl.where(group == at, lowest, totals)
        choice = tl.where(kept[:, None], choice, lowest)
    flat_choice = tl.reshape(choice, [GROUPS * SIZE])
    flat_scores = tl.reshape(scores, [GROUPS * SIZE])
    flat_expert = tl.reshape(expert, [GROUPS * SIZE])
    lane = tl.arange(0, GROUPS * SIZE)
    rank = tl.arange(0, CHOSEN)
    chosen = tl.zeros([CHOSEN], tl.int32)
    taken = tl.full([CHOSEN], lowest if SCORING == 2 else 0.0, tl.float32)
    for j in range(TOP_K):
        at = tl.argmax(flat_choice, 0)
        is_best = lane == at
        chosen = tl.where(rank == j, tl.sum(tl.where(is_best, flat_expert, 0), 0), chosen)
        taken = tl.where(rank == j, tl.sum(tl.where(is_best, flat_scores, 0.0), 0), taken)
        flat_choice = tl.where(is_best, lowest, flat_choice)
    if SCORING == 2:
        taken = tl.exp(taken - tl.max(taken, 0))
        taken = taken / tl.sum(taken, 0)
    if RENORMALISE:
        taken = taken / (tl.sum(taken, 0) + epsilon)
    tl.store(ids + token * TOP_K + rank, chosen, rank < TOP_K)
    tl.store(weights + token * TOP_K + rank, taken * scale, rank < TOP_K)


@once_per_geometry
def _check(logits: Tensor, experts: int) -> None:
    check_dtype("logits", logits, *FLOATS)
    check_dense("logits", logits, (None, experts), logits.dtype, logits.device)


def route_reference(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    if routing.scoring == "softmax":
        scores = scores.softmax(-1)
    elif routing.scoring == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if routing.correction is None else scores + routing.correction
    if routing.top_groups < routing.groups:
        grouped = choice.unflatten(-1, (routing.groups, -1))
        totals = grouped.sort(-1, descending=True).values[..., : routing.group_best].sum(-1)
        kept = totals.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
        is_kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, kept, True)
        choice = grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.scoring == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    return ids.int(), weights * routing.scale


class SortedPairs(NamedTuple):
    """Pairs (token, choice) sorted by expert, cut into tiles. The pairs of a tile have one expert. All int32.

    `order`: [pairs], token * top_k + choice. `tiles`: [max_tiles, 2], (expert, the tile's first index into `order`);
    unused tiles have expert -1. `ends`: [experts], one past each expert's last index into `order`. Experts are numbered
    from the rank's first one. `order` leaves out pairs of other ranks' experts; its last elements are then unset.
    """

    order: Tensor
    tiles: Tensor
    ends: Tensor


def sort_pairs(ids: Tensor, experts: int, first: int, rows: int) -> SortedPairs:
    """Sort on a GPU. ids: int32 [tokens, top_k], at least one token. `rows`: pairs of a tile.

    Shapes depend on the number of tokens alone, so that CUDA graphs can capture the call. Pairs of one expert stay in
    the order of their tokens.
    """
    pairs, device = ids.numel(), ids.device
    max_tiles = min(pairs, pairs // rows + experts)
    counts, ends = torch.empty((2, experts), dtype=torch.int32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles = torch.empty((max_tiles, 2), dtype=torch.int32, device=device)
    _count_pairs[(experts,)](ids, counts, pairs, first, BLOCK=_PAIRS, num_warps=4)
    _sort_pairs[(experts,)](
        ids, counts, ends, order, tiles, pairs, max_tiles, first, experts, EXPERTS=triton.next_power_of_2(experts),
        TILE=rows, BLOCK=_PAIRS, num_warps=4,
    )  # fmt: skip
    return SortedPairs(order, tiles, ends)


@triton.jit(do_not_specialize=["pairs", "first"])
def _count_pairs(ids, counts, pairs, first, BLOCK: tl.constexpr):
    """One program counts the pairs of one expert."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        total += (tl.load(ids + start + at, start + at < pairs, other=-1) == expert + first).to(tl.int32)
    tl.store(counts + expert, tl.sum(total, 0))


@triton.jit(do_not_specialize=["pairs", "max_tiles", "first"])
def _sort_pairs(
    ids, counts, ends, order, tiles, pairs, max_tiles, first, experts, EXPERTS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes one expert's pairs to `order` [pairs] and its tiles, (expert, first row), to `tiles`. The last
    program writes -1 as the expert of the unused tiles."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    every = tl.arange(0, EXPERTS)
    count = tl.load(counts + every, every < experts, other=0)
    needed = (count + TILE - 1) // TILE
    begin = tl.sum(tl.where(every < expert, count, 0), 0)
    first_tile = tl.sum(tl.where(every < expert, needed, 0), 0)
    mine = tl.sum(tl.where(every == expert, count, 0), 0)
    end_tile = first_tile + (mine + TILE - 1) // TILE
    tl.store(ends + expert, begin + mine)
    for start in range(first_tile, end_tile, BLOCK):
        tile = start + at
        tl.store(tiles + 2 * tile, tl.zeros([BLOCK], tl.int32) + expert, tile < end_tile)
        tl.store(tiles + 2 * tile + 1, begin + (tile - first_tile) * TILE, tile < end_tile)
    if expert == experts - 1:
        for start in range(end_tile, max_tiles, BLOCK):
            tl.store(tiles + 2 * (start + at), tl.full([BLOCK], -1, tl.int32), start + at < max_tiles)
    for start in range(0, pairs, BLOCK):
        is_mine = (tl.load(ids + start + at, start + at < pairs, other=-1) == expert + first).to(tl.int32)
        tl.store(order + begin + tl.cumsum(is_mine, 0) - 1, start + at, is_mine > 0)
        begin += tl.sum(is_mine, 0)
