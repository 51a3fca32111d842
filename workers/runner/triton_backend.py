"""TritonBackend: the attention plans of each step, for the Triton kernels, in one copy to the device.

This file is beside the runner's uploads (host_transfer.py), which workers/attention may not import.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.kernels.attention.attention_plan import HostPlan, PlanSpace, pack_plans
from coatcheck.kernels.attention.latent_tiles import pick_latent_tiles
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, host_plan
from coatcheck.kernels.attention.tile_launch import Tiles, pick_tiles
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.workers.attention.attention import kind_of
from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.attention.attention_metadata import GatheredContext, LayerKind
from coatcheck.workers.attention.token_shards import count_local_keys, gathers_context, list_blocks
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.runner.host_transfer import upload

_UNLIMITED = 1 << 30
Plans = dict[LayerKind, AttentionPlan]


class TritonBackend:
    """`layers`, `caches`: of each layer. `element_size`: bytes of an element of the queries.

    Plans are made for every kind of layers. On a CPU without Triton, and without layers, there are none.
    """

    captures_chunks = True
    unmeasured_bytes = 0

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        caches: list[KVCache] | list[LatentCache],
        element_size: int,
        *,
        batch_invariant: bool,
    ) -> None:
        self._device = caches[0].device if caches else torch.device("cpu")
        self._kinds: dict[LayerKind, Tiles] = {}
        self._sharded: dict[LayerKind, LayerSpec] = {}  # kinds with token shards: a layer of each
        self._gathering: dict[LayerKind, Tiles] = {}  # of those, the tiles of a rank's own heads
        self._block_size = 0  # of gathered blocks
        for layer, cache in zip(layers, caches, strict=True):
            kind = kind_of(layer)
            if kind in self._kinds:
                continue
            if layer.token_shards > 1:
                self._sharded[kind] = layer
            gpu = gpu_properties(self._device)
            if isinstance(cache, KVCache) and uses_triton(cache.k):
                self._kinds[kind] = pick_tiles(
                    layer.num_heads, cache.kv_heads, cache.head_dim, element_size=element_size, pool_bits=cache.bits,
                    gpu=gpu, batch_invariant=batch_invariant,
                )  # fmt: skip
            elif isinstance(cache, LatentCache) and uses_triton(cache.latent):
                self._kinds[kind] = pick_latent_tiles(
                    kind.num_heads,
                    cache.rank,
                    element_size=element_size,
                    pool_bits=cache.bits,
                    gpu=gpu,
                    batch_invariant=batch_invariant,
                )
                if layer.token_shards > 1 and not batch_invariant:  # a token's bits must not depend on the choice
                    self._block_size = cache.block_size * layer.token_shards
                    self._gathering[kind] = pick_latent_tiles(
                        layer.num_heads, cache.rank, element_size=element_size, pool_bits=8 * element_size, gpu=gpu
                    )

    @property
    def warm_up_lengths(self) -> list[int]:
        """Chunk lengths that together use every kind of tiles."""
        return sorted(
            {
                length
                for tiles in (*self._kinds.values(), *self._gathering.values())
                for length in (tiles.short.shape.queries + 1, tiles.medium.shape.queries + 1)
            }
        )

    def make_plans(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> Plans:
        """The plans of a step, each in exactly the space that it needs. The copy is only queued."""
        if not self._kinds:
            return {}
        made = [
            host_plan(*self._local_lens(kind, q_lens, seq_lens), tiles, kind.sliding_window)
            for kind, tiles in self._kinds.items()
        ]
        return self._upload(made, self._kinds)

    def gather_context(
        self, block_tables: Tensor, q_lens: Sequence[int], seq_lens: Sequence[int], max_tokens: int
    ) -> GatheredContext | None:
        """What a step needs whose ranks gather its contexts; None if they exchange. `max_tokens`: as gathers_context.

        `block_tables`: int32 [S, max_blocks], of the step's sequences.
        """
        if not self._gathering or len(self._gathering) < len(self._kinds):
            return None
        if not all(gathers_context(q_lens, seq_lens, layer, max_tokens) for layer in self._sharded.values()):
            return None
        places = upload(list_blocks(seq_lens, self._block_size), torch.int64, self._device)
        counts = [-(-length // self._block_size) for length in seq_lens]
        firsts = upload(list(accumulate(counts[:-1], initial=0)), torch.int32, self._device)
        tables = firsts[:, None] + torch.arange(block_tables.shape[1], dtype=torch.int32, device=self._device)
        made = [host_plan(q_lens, seq_lens, tiles, kind.sliding_window) for kind, tiles in self._gathering.items()]
        return GatheredContext(
            block_tables[places[:, 0], places[:, 1]].long(), tables, self._upload(made, self._gathering)
        )

    def _upload(self, made: Sequence[tuple[HostPlan, bool]], kinds: dict[LayerKind, Tiles]) -> Plans:
        """Each plan in exactly the space that it needs."""
        spaces = [PlanSpace.of(plan) for plan, _ in made]
        packed = upload(pack_plans([plan for plan, _ in made], spaces), torch.int32, self._device)
        return _split(packed, spaces, kinds, [is_medium for _, is_medium in made])

    @property
    def short_queries(self) -> tuple[int, int]:
        """(fewest, most) queries of a sequence up to which it takes short tiles, over the kinds of layers. 0 without
        short tiles. With token shards each query is a sequence of its own, so all tiles are short."""
        short = [
            0 if tiles.batch_invariant else _UNLIMITED if kind in self._sharded else tiles.short.shape.queries
            for kind, tiles in self._kinds.items()
        ] or [0]
        return min(short), max(short)

    def num_ints(self, shape: StepShape) -> int:
        """The size of the array that `pack` returns."""
        return sum(space.ints for space in self._spaces(shape))

    def pack(self, shape: StepShape, q_lens: Sequence[int], seq_lens: Sequence[int]) -> NDArray[np.int32]:
        """The plans of a step for a CUDA graph of `shape`: int32 [num_ints]. Padding is among the sequences."""
        plans = [
            host_plan(
                *self._local_lens(kind, q_lens, seq_lens), tiles, kind.sliding_window,
                all_wide=not shape.has_short, is_medium=_is_medium(shape, tiles),
            )[0]
            for kind, tiles in self._kinds.items()
        ]  # fmt: skip
        return pack_plans(plans, self._spaces(shape))

    def _local_lens(
        self, kind: LayerKind, q_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths that the kernel sees: with token shards each query is a sequence over the rank's tokens."""
        if kind not in self._sharded:
            return q_lens, seq_lens
        lens = count_local_keys(q_lens, seq_lens, self._sharded[kind])
        return [1] * len(lens), lens

    def view(self, shape: StepShape, packed: Tensor) -> Plans:
        """The plans that `pack` wrote, as views of `packed`, int32 [num_ints]."""
        is_medium = [_is_medium(shape, tiles) for tiles in self._kinds.values()]
        return _split(packed, self._spaces(shape), self._kinds, is_medium)

    def _spaces(self, shape: StepShape) -> list[PlanSpace]:
        spaces = []
        for tiles in self._kinds.values():
            wide = tiles.medium if _is_medium(shape, tiles) else tiles.wide
            spaces.append(
                PlanSpace.of_tokens(
                    shape.num_tokens,
                    short=tiles.short.shape if shape.has_short else None,
                    wide=wide.shape if shape.has_wide else None,
                    batch_invariant=tiles.batch_invariant,
                )
            )
        return spaces


def _split(
    packed: Tensor, spaces: Sequence[PlanSpace], kinds: dict[LayerKind, Tiles], is_medium: Sequence[bool]
) -> Plans:
    parts = packed.split([space.ints for space in spaces])
    return {
        kind: AttentionPlan(part, space, tiles, medium)
        for (kind, tiles), part, space, medium in zip(kinds.items(), parts, spaces, is_medium, strict=True)
    }


def _is_medium(shape: StepShape, tiles: Tiles) -> bool:
    """Whether the wide tiles of a captured step are medium ones: only if all of its tokens could be one sequence."""
    return shape.num_tokens <= tiles.medium.shape.queries
