"""AttentionPlanner: the attention plans of each step, for the Triton kernels, in one copy to the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from coatcheck.kernels.attention.attention_plan import PlanSpace, pack_plans
from coatcheck.kernels.attention.latent_tiles import pick_latent_tiles
from coatcheck.kernels.attention.paged_tiles import AttentionPlan, host_plan
from coatcheck.kernels.attention.tile_launch import Tiles, pick_tiles
from coatcheck.kernels.gpu_properties import gpu_properties, uses_triton
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.kernels.kv.latent_cache import LatentCache
from coatcheck.workers.attention.attention import LayerCaches, kind_of
from coatcheck.workers.attention.attention_metadata import AttentionPlans, LayerKind
from coatcheck.workers.attention.token_shards import count_local_keys
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.runner.host_transfer import upload


class AttentionPlanner:
    """`layers`, `caches`: of each layer. `element_size`: bytes of an element of the queries.

    Plans are made for every kind of layers. On a CPU without Triton there are none.
    """

    def __init__(
        self, layers: Sequence[LayerSpec], caches: LayerCaches, element_size: int, *, batch_invariant: bool
    ) -> None:
        self._device = caches[0].device
        self._kinds: dict[LayerKind, Tiles] = {}
        self._sharded: dict[LayerKind, LayerSpec] = {}  # kinds with token shards: a layer of each
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

    @property
    def warm_up_lengths(self) -> list[int]:
        """Chunk lengths that together use every kind of tiles."""
        return sorted(
            {
                length
                for tiles in self._kinds.values()
                for length in (tiles.short.shape.queries + 1, tiles.medium.shape.queries + 1)
            }
        )

    def make_plans(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionPlans:
        """The plans of a step, each in exactly the space that it needs. The copy is only queued."""
        if not self._kinds:
            return {}
        made = [
            host_plan(*self._local_lens(kind, q_lens, seq_lens), tiles, kind.sliding_window)
            for kind, tiles in self._kinds.items()
        ]
        spaces = [PlanSpace.of(plan) for plan, _ in made]
        packed = upload(pack_plans([plan for plan, _ in made], spaces), torch.int32, self._device)
        return self._split(packed, spaces, [is_medium for _, is_medium in made])

    def allocate_decodes(self, max_rows: int) -> tuple[Tensor, AttentionPlans]:
        """(memory for the plans of a step of `max_rows` decodes, these plans as views of it), for a CUDA graph."""
        spaces = self._decode_spaces(max_rows)
        packed = torch.zeros(sum(space.ints for space in spaces), dtype=torch.int32, device=self._device)
        return packed, self._split(packed, spaces, [True] * len(spaces))

    def write_decodes(self, packed: Tensor, seq_lens: Sequence[int]) -> None:
        """Write the plans of one query for each of `seq_lens` into `packed`. The copy is only queued."""
        plans = [
            host_plan(*self._local_lens(kind, [1] * len(seq_lens), seq_lens), tiles, kind.sliding_window)[0]
            for kind, tiles in self._kinds.items()
        ]
        if plans:
            spaces = self._decode_spaces(len(seq_lens))
            packed.copy_(upload(pack_plans(plans, spaces), torch.int32, self._device), non_blocking=True)

    def _local_lens(
        self, kind: LayerKind, q_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The lengths that the kernel sees: with token shards each query is a sequence over the rank's tokens."""
        if kind not in self._sharded:
            return q_lens, seq_lens
        lens = count_local_keys(q_lens, seq_lens, self._sharded[kind])
        return [1] * len(lens), lens

    def _decode_spaces(self, rows: int) -> list[PlanSpace]:
        return [PlanSpace.of_decodes(rows, tiles.short.shape, tiles.batch_invariant) for tiles in self._kinds.values()]

    def _split(self, packed: Tensor, spaces: Sequence[PlanSpace], is_medium: Sequence[bool]) -> AttentionPlans:
        parts = packed.split([space.ints for space in spaces])
        return {
            kind: AttentionPlan(part, space, tiles, medium)
            for (kind, tiles), part, space, medium in zip(self._kinds.items(), parts, spaces, is_medium, strict=True)
        }
