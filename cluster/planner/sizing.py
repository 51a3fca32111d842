"""Sizing: every figure that `coatcheck plan` shows for one model on one kind of GPU."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from coatcheck.cluster.planner.capacity import (
    WEIGHT_BYTES,
    Budget,
    Cache,
    StepTimeFloor,
    Variant,
    attention_variants,
    caches_by_kv_dtype,
    step_time_floor,
)
from coatcheck.cluster.planner.lengths import LengthDistribution
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.weight_count import WeightCount
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.model_spec import LayerSpec
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.kv.block_layout import BlockLayout

BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
_DEFAULT_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class Sizing:
    """`weight_bytes`: of the whole model. `rank_weights`: weights of one rank. `num_blocks`: blocks of the pool."""

    settings: PlanSettings
    shape: ModelShape
    dtype: str
    context: int
    cache: Cache
    weight_bytes: float
    bytes_per_weight: float
    rank_weights: WeightCount
    budget: Budget
    num_blocks: int
    lengths: LengthDistribution
    notes: tuple[str, ...]

    @classmethod
    def of(cls, settings: PlanSettings) -> Self:
        """Raise InvalidModel if config.json lacks a size, InvalidConfig if a setting does not fit the model."""
        config = ModelConfig.open(settings.model)
        shape = ModelShape.of(config)
        dtype = shape.dtype if settings.dtype == "auto" else settings.dtype
        kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
        context = settings.context or min(_DEFAULT_CONTEXT, shape.max_model_len or _DEFAULT_CONTEXT)
        layers = shape.layers if settings.latent else shape.expanded
        cache = Cache.of(layers, settings.tp, settings.block_size, kv_dtype)
        whole = WeightCount.of(config, shape.expanded, TpShard(0, 1))
        part = WeightCount.of(config, shape.expanded, TpShard(0, settings.tp))
        weight_bytes = settings.weights or float(whole.total * WEIGHT_BYTES[dtype])
        bytes_per_weight = weight_bytes / whole.total
        budget = Budget(settings.gpu_memory, part.total * bytes_per_weight, settings.kv_memory)
        return cls(
            settings=settings,
            shape=shape,
            dtype=dtype,
            context=context,
            cache=cache,
            weight_bytes=weight_bytes,
            bytes_per_weight=bytes_per_weight,
            rank_weights=part,
            budget=budget,
            num_blocks=budget.num_blocks(cache),
            lengths=_lengths(settings.lengths, context),
            notes=(*shape.notes, *_notes(cache, context, shape.max_model_len)),
        )

    @property
    def sequences(self) -> int:
        """Sequences of `context` tokens that the pool holds at once."""
        return self.sequences_of(self.num_blocks, self.context)

    @property
    def longest_context(self) -> int:
        """The largest context at which `concurrency` sequences fit."""
        return self.num_blocks // self.settings.concurrency * self.cache.block_size

    def sequences_of(self, num_blocks: int, context: int) -> int:
        return num_blocks // self.cache.count_blocks(context)

    def layer_kinds(self) -> list[tuple[LayerSpec, int]]:
        """(layer, number of equal layers) for each distinct layer, in order."""
        kinds = dict.fromkeys(self.cache.layers)
        return [(kind, self.cache.layers.count(kind)) for kind in kinds]

    def layer_bytes(self, layer: LayerSpec, tp: int) -> float:
        """Bytes of one token in `layer` on each of `tp` ranks."""
        part = TpShard(0, tp).shard_layer(layer)
        return BlockLayout.of([part], self.cache.block_size, self.cache.whole.kv_dtype).bytes_per_token

    def by_kv_dtype(self) -> list[tuple[str, Cache, int]]:
        """(name, cache, blocks in the pool) for every kv-dtype that the model supports."""
        caches = caches_by_kv_dtype(self.cache.layers, self.settings.tp, self.settings.block_size)
        return [(name, cache, self.budget.num_blocks(cache)) for name, cache in caches.items() if cache is not None]

    def variants(self) -> list[Variant]:
        return attention_variants(self.shape, self.settings.tp, self.settings.block_size, self.cache.whole.kv_dtype)

    def by_block_size(self) -> list[tuple[int, float, int]]:
        """(block size, wasted share, sequences of `lengths` that fit) for every block size."""
        found = []
        for size in BLOCK_SIZES:
            cache = Cache.of(self.cache.layers, self.settings.tp, size, self.cache.whole.kv_dtype)
            try:
                fit = self.lengths.fit_paged(self.budget.num_blocks(cache), size)
            except InvalidConfig:  # no block of this size fits
                fit = 0
            found.append((size, self.lengths.waste(size), fit))
        return found

    def floors(self) -> list[StepTimeFloor]:
        """Step times of batches of 1, of `concurrency`, and of `sequences`."""
        batches = sorted({1, self.settings.concurrency} | ({self.sequences} if self.sequences else set()))
        return [self.floor(batch) for batch in batches]

    def floor(self, batch: int) -> StepTimeFloor:
        return step_time_floor(
            self.cache, self.rank_weights, self.bytes_per_weight, self.settings.bandwidth, batch, self.context
        )

    def to_json(self) -> dict[str, Any]:
        """Bytes, tokens and seconds as plain numbers."""
        cache, context, concurrency = self.cache, self.context, self.settings.concurrency
        block_size = cache.block_size
        return {
            "model": self.shape.name,
            "dtype": self.dtype,
            "kv_dtype": str(cache.whole.kv_dtype),
            "tp": cache.tp,
            "block_size": block_size,
            "context": context,
            "concurrency": concurrency,
            "bytes_per_token": cache.whole.bytes_per_token,
            "scale_bytes_per_token": cache.whole.scale_bytes_per_token,
            "rank_bytes_per_token": cache.rank.bytes_per_token,
            "rank_bytes_per_block": cache.rank.bytes_per_block,
            "copies": cache.copies,
            "layers": [
                {
                    "count": count,
                    "kv_heads": layer.num_kv_heads,
                    "head_dim": layer.head_dim,
                    "value_dim": layer.value_dim,
                    "sliding_window": layer.sliding_window,
                    "bytes_per_token": self.layer_bytes(layer, 1),
                    "rank_bytes_per_token": self.layer_bytes(layer, cache.tp),
                }
                for layer, count in self.layer_kinds()
            ],
            "sequence_bytes": cache.sequence_bytes(context),
            "rank_sequence_bytes": cache.rank_sequence_bytes(context),
            "windowed_sequence_bytes": cache.windowed_sequence_bytes(context),
            "concurrent_bytes": concurrency * cache.sequence_bytes(context),
            "weight_bytes": self.weight_bytes,
            "rank_weight_bytes": self.budget.rank_weight_bytes,
            "gpu_memory": self.budget.gpu_memory,
            "num_blocks": self.num_blocks,
            "rank_pool_bytes": self.num_blocks * cache.rank.bytes_per_block,
            "pool_tokens": self.num_blocks * block_size,
            "sequences": self.sequences,
            "fits": self.sequences >= concurrency,
            "longest_context": self.longest_context,
            "kv_dtypes": [
                {
                    "kv_dtype": name,
                    "bytes_per_token": other.whole.bytes_per_token,
                    "scale_bytes_per_token": other.whole.scale_bytes_per_token,
                    "num_blocks": num_blocks,
                    "sequences": self.sequences_of(num_blocks, context),
                }
                for name, other, num_blocks in self.by_kv_dtype()
            ],
            "variants": [
                {
                    "name": variant.name,
                    "kv_heads": variant.kv_heads,
                    "bytes_per_token": variant.cache and variant.cache.whole.bytes_per_token,
                    "concurrent_bytes": variant.cache and concurrency * variant.cache.sequence_bytes(context),
                    "rank_concurrent_bytes": variant.cache and concurrency * variant.cache.rank_sequence_bytes(context),
                }
                for variant in self.variants()
            ],
            "block_sizes": [
                {"block_size": size, "waste": waste, "sequences": fit} for size, waste, fit in self.by_block_size()
            ],
            "lengths": {
                "source": self.lengths.source,
                "number": self.lengths.number,
                "left_out": self.lengths.left_out,
                "mean": self.lengths.mean,
                "paged": self.lengths.fit_paged(self.num_blocks, block_size),
                "reserved": self.lengths.fit_reserved(self.num_blocks, block_size, context),
            },
            "floors": [
                {**asdict(floor), "seconds": floor.seconds, "tokens_per_second": floor.tokens_per_second}
                for floor in self.floors()
            ],
            "notes": list(self.notes),
        }


def _lengths(trace: Path | None, context: int) -> LengthDistribution:
    return LengthDistribution.evenly_spread(context) if trace is None else LengthDistribution.read(trace, context)


def _notes(cache: Cache, context: int, max_model_len: int | None) -> list[str]:
    notes = []
    if cache.copies > 1:
        notes.append(f"tp {cache.tp} is larger than the number of KV heads: {cache.copies:.0f} ranks hold each head")
    if any(layer.sliding_window for layer in cache.layers):
        notes.append("the pool keeps blocks outside of sliding windows until the sequence ends")
    if max_model_len is not None and context > max_model_len:
        notes.append(f"the model's maximum in config.json is {max_model_len:,} tokens; the context is {context:,}")
    return notes
