"""KvCacheSpec: the bytes of a KV cache, and the blocks of it that fit on a GPU. Pure arithmetic.

Sizes come from the BlockLayout and TpShard that ranks use, so they equal what a running group reports.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_num_blocks, choose_num_snapshots

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The KV cache of `layers`. `whole`: layout of all heads. `rank`: layout of what the rank `shard` stores."""

    layers: tuple[LayerSpec, ...]
    whole: BlockLayout
    rank: BlockLayout
    shard: TpShard

    @classmethod
    def of_or_none(cls, layers: Sequence[LayerSpec], shard: TpShard, block_size: int, kv_dtype: KvDtype) -> Self | None:
        """Like `of`, but None instead of InvalidConfig."""
        try:
            return cls.of(layers, shard, block_size, kv_dtype)
        except InvalidConfig:
            return None

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], shard: TpShard, block_size: int, kv_dtype: KvDtype) -> Self:
        """Raise InvalidConfig if tp does not divide the heads, or the tokens of a block that it has to divide, or if
        the kv-dtype does not support the heads' size."""
        part = [shard.shard_layer(layer) for layer in layers]
        whole = BlockLayout.of(layers, block_size, kv_dtype)
        return cls(tuple(layers), whole, BlockLayout.of(part, block_size, kv_dtype), shard)

    @property
    def tp(self) -> int:
        return self.shard.size

    @property
    def stored_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that store keys and values; the others read those of an earlier layer."""
        return tuple(layer for layer in self.layers if layer.kv_source is None)

    @property
    def block_size(self) -> int:
        return self.whole.block_size

    @property
    def copies(self) -> float:
        """Copies of each KV head over all ranks: above 1 if there are more ranks than KV heads."""
        return self.rank.bytes_per_block * self.tp / self.whole.bytes_per_block if self.layers else 1.0

    def count_blocks(self, tokens: int) -> int:
        """Blocks of a sequence of `tokens` tokens."""
        return -(-tokens // self.block_size)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence, every head once."""
        return self.count_blocks(tokens) * self.whole.bytes_per_block

    def rank_sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence on each rank."""
        return self.count_blocks(tokens) * self.rank.bytes_per_block

    def windowed_sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence, every head once, if blocks outside of windows were freed. The pool keeps them."""
        total = 0
        for layer in self.stored_layers:
            blocks = self.count_blocks(tokens)
            if layer.sliding_window:  # the window may begin at the last slot of a block
                blocks = min(blocks, (layer.sliding_window + self.block_size - 2) // self.block_size + 1)
            total += blocks * BlockLayout.of([layer], self.block_size, self.whole.kv_dtype).bytes_per_block
        return total

    def rank_bytes_read(self, tokens: int) -> float:
        """Bytes of KV that a rank reads to compute one sequence's next token."""
        return sum(
            min(tokens, layer.sliding_window or tokens)
            * BlockLayout.of([self.shard.shard_layer(layer)], self.block_size, self.whole.kv_dtype).bytes_per_token
            for layer in (replace(layer, kv_source=None) for layer in self.layers)
        )


def count_pool_blocks(
    cache: KvCacheSpec, settings: PlanSettings, rank_weight_bytes: float, rank_state_bytes: int = 0
) -> tuple[int, int]:
    """(blocks of the KV pool, snapshots of states) of a group whose ranks also hold the states of `concurrency` running
    sequences.

    `rank_state_bytes`: the states of one sequence on one rank. Raise InvalidConfig if the weights, the states or one
    block do not fit.
    """
    gpu_memory = settings.gpu_memory
    free = int(gpu_memory - rank_weight_bytes)
    states = settings.concurrency * rank_state_bytes
    if 0 < free <= states:
        raise InvalidConfig(
            f"the states of {settings.concurrency:,} sequences take {states / 2**30:,.1f} GiB on each of {cache.tp} "
            f"ranks, and the weights leave {free / 2**30:,.1f} GiB; lower concurrency, or raise tp or gpu-memory"
        )
    free -= states if free > 0 else 0
    if free <= 0:
        least_tp = -(-rank_weight_bytes * cache.tp // gpu_memory)
        raise InvalidConfig(
            f"the weights take {rank_weight_bytes / 2**30:,.1f} GiB on each of {cache.tp} ranks, and gpu-memory is "
            f"{gpu_memory / 2**30:,.1f} GiB; raise tp (to {least_tp:.0f} or more) or gpu-memory"
        )
    num_snapshots = choose_num_snapshots(
        settings.kv_memory,
        settings.state_snapshot_share,
        free_bytes=free,
        sharing_ranks=1,
        state_bytes=rank_state_bytes,
        bytes_per_block=cache.rank.bytes_per_block,
        block_size=cache.block_size,
        max_model_len=None,
    )
    num_blocks = choose_num_blocks(
        settings.kv_memory,
        free_bytes=free,
        sharing_ranks=1,
        bytes_per_block=cache.rank.bytes_per_block,
        block_size=cache.block_size,
        max_model_len=None,
        snapshot_bytes=num_snapshots * rank_state_bytes,
        max_blocks=cache.rank.max_blocks,
    )
    return num_blocks, num_snapshots


def count_sequences(
    cache: KvCacheSpec,
    settings: PlanSettings,
    num_blocks: int,
    blocks: float,
    rank_weight_bytes: float,
    rank_state_bytes: int,
) -> int:
    """How many sequences of `blocks` blocks each fit at once.

    The states of running sequences take memory from the pool. So of a model with states this is the largest
    --max-num-seqs whose pool has blocks for as many sequences. `num_blocks`: of the pool of a model without states.
    """
    if not rank_state_bytes:
        return int(num_blocks / blocks)

    def is_too_many(sequences: int) -> bool:
        changed = settings.model_copy(update={"concurrency": sequences})
        try:
            return count_pool_blocks(cache, changed, rank_weight_bytes, rank_state_bytes)[0] < sequences * blocks
        except InvalidConfig:  # the states alone do not fit
            return True

    return bisect.bisect_left(range(1, int(settings.gpu_memory) // rank_state_bytes + 1), True, key=is_too_many)


def attention_variants(shape: ModelShape) -> list[tuple[str, int, tuple[LayerSpec, ...]]]:
    """(name, number of KV heads, layers) of the model's own attention and, for comparison, of MHA, GQA-8 and MQA.

    For a model with latent attention: keys and values of every head, and the latents. Empty for a model without
    attention.
    """
    if not shape.layers:
        return []
    heads, own = shape.expanded[0].num_heads, shape.expanded[0].num_kv_heads
    if shape.is_latent:
        return [("MLA, every head", heads, shape.expanded), ("MLA, latent", 1, shape.layers)]
    numbers = {heads, own, 1} | ({8} if heads > 8 and heads % 8 == 0 else set())
    return [
        (_attention_name(n, heads) + (", its own" if n == own else ""), n, shape.with_kv_heads(n))
        for n in sorted(numbers, reverse=True)
    ]


def _attention_name(kv_heads: int, heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"
