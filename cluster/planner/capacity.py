"""KV cache sizes, memory budgets and the lower bound of a decode step's time. Pure arithmetic.

Sizes come from the BlockLayout and TpShard that ranks use, so they equal what a running group reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.weight_count import WeightCount
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import KV_DTYPES, KvDtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.kv.pool_size import choose_num_blocks

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache of `layers`. `whole`: layout of all heads. `rank`: layout of the heads on each of `tp` ranks."""

    layers: tuple[LayerSpec, ...]
    whole: BlockLayout
    rank: BlockLayout
    tp: int

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], tp: int, block_size: int, kv_dtype: KvDtype) -> Self:
        """Raise InvalidConfig if tp does not divide the heads, or if the kv-dtype does not support their size."""
        part = [TpShard(0, tp).shard_layer(layer) for layer in layers]
        whole = BlockLayout.of(layers, block_size, kv_dtype)
        return cls(tuple(layers), whole, BlockLayout.of(part, block_size, kv_dtype), tp)

    @property
    def block_size(self) -> int:
        return self.whole.block_size

    @property
    def copies(self) -> float:
        """Copies of each KV head over all ranks: above 1 if there are more ranks than KV heads."""
        return self.rank.bytes_per_block * self.tp / self.whole.bytes_per_block

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
        for layer in self.layers:
            blocks = self.count_blocks(tokens)
            if layer.sliding_window:  # the window may begin at the last slot of a block
                blocks = min(blocks, (layer.sliding_window + self.block_size - 2) // self.block_size + 1)
            total += blocks * BlockLayout.of([layer], self.block_size, self.whole.kv_dtype).bytes_per_block
        return total

    def rank_bytes_read(self, tokens: int) -> float:
        """Bytes of KV that a rank reads to compute one sequence's next token."""
        shard = TpShard(0, self.tp)
        return sum(
            min(tokens, layer.sliding_window or tokens)
            * BlockLayout.of([shard.shard_layer(layer)], self.block_size, self.whole.kv_dtype).bytes_per_token
            for layer in self.layers
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """A rank's memory in bytes. `kv_memory`: bytes, or a share of what the weights leave free."""

    gpu_memory: float
    rank_weight_bytes: float
    kv_memory: float

    def num_blocks(self, cache: Cache) -> int:
        """Blocks in a group's pool. Raise InvalidConfig if the weights or one block do not fit."""
        free = int(self.gpu_memory - self.rank_weight_bytes)
        if free <= 0:
            least_tp = -(-self.rank_weight_bytes * cache.tp // self.gpu_memory)
            raise InvalidConfig(
                f"the weights take {self.rank_weight_bytes / 2**30:,.1f} GiB on each of {cache.tp} ranks, and "
                f"gpu-memory is {self.gpu_memory / 2**30:,.1f} GiB; raise tp (to {least_tp:.0f} or more) or "
                "gpu-memory"
            )
        return choose_num_blocks(
            self.kv_memory,
            free_bytes=free,
            sharing_ranks=1,
            bytes_per_block=cache.rank.bytes_per_block,
            block_size=cache.block_size,
            max_model_len=None,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """The model with another number of KV heads, or with latents instead of keys and values."""

    name: str
    kv_heads: int
    cache: Cache | None  # None: tp does not divide kv_heads


@dataclass(frozen=True, slots=True)
class StepTimeFloor:
    """Lower bound of a decode step's time: the bytes of weights and KV that it reads, divided by the bandwidth."""

    batch: int
    weights_seconds: float
    kv_seconds: float

    @property
    def seconds(self) -> float:
        return self.weights_seconds + self.kv_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.batch / self.seconds


def attention_variants(shape: ModelShape, tp: int, block_size: int, kv_dtype: KvDtype) -> list[Variant]:
    """The cache of the model's own attention and, for comparison, of MHA, GQA-8 and MQA.

    For a model with latent attention: the cache of latents, and that of keys and values of every head.
    """
    heads, own = shape.expanded[0].num_heads, shape.expanded[0].num_kv_heads
    if shape.is_latent:
        names = [("MLA, every head", heads, shape.expanded), ("MLA, latent", 1, shape.layers)]
    else:
        numbers = {heads, own, 1} | ({8} if heads > 8 and heads % 8 == 0 else set())
        names = [
            (_attention_name(n, heads) + (", its own" if n == own else ""), n, shape.with_kv_heads(n))
            for n in sorted(numbers, reverse=True)
        ]
    return [Variant(name, n, _cache_or_none(layers, tp, block_size, kv_dtype)) for name, n, layers in names]


def caches_by_kv_dtype(layers: Sequence[LayerSpec], tp: int, block_size: int) -> dict[str, Cache | None]:
    """A cache for each kv-dtype; None if the dtype does not support the layers."""
    return {name: _cache_or_none(layers, tp, block_size, kv_dtype) for name, kv_dtype in KV_DTYPES.items()}


def step_time_floor(
    cache: Cache, weights: WeightCount, weight_bytes: float, bandwidth: float, batch: int, context: int
) -> StepTimeFloor:
    """`weight_bytes`: bytes of one weight. `bandwidth`: bytes per second. `context`: tokens of each sequence."""
    kv = batch * cache.rank_bytes_read(context)
    return StepTimeFloor(batch, weights.read_per_step(batch) * weight_bytes / bandwidth, kv / bandwidth)


def _attention_name(kv_heads: int, heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else f"GQA-{kv_heads}"


def _cache_or_none(layers: Sequence[LayerSpec], tp: int, block_size: int, kv_dtype: KvDtype) -> Cache | None:
    try:
        return Cache.of(layers, tp, block_size, kv_dtype)
    except InvalidConfig:
        return None
