"""Sizing: every figure that `coatcheck plan` shows for one model on one kind of GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from coatcheck.cluster.planner.capacity import (
    WEIGHT_BYTES,
    KvCacheSpec,
    attention_variants,
    count_pool_blocks,
    count_sequences,
)
from coatcheck.cluster.planner.lengths import LengthDistribution
from coatcheck.cluster.planner.model_config import ModelConfig, fill_defaults, plan_conversion
from coatcheck.cluster.planner.model_shape import ModelShape
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.weight_count import WeightCount, ties_head
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.proto.model_folder import no_type_error
from coatcheck.workers.checkpoint.held_weights import held_bytes
from coatcheck.workers.checkpoint.quantisation_scheme import check_quantization, read_scheme
from coatcheck.workers.checkpoint.safetensors_headers import read_entries
from coatcheck.workers.core.attention_selector import MODEL_TYPES_WITH_SINKS, backend_name, check_backend_model
from coatcheck.workers.core.kv_dtype import KV_DTYPES, choose_kv_dtype
from coatcheck.workers.core.model_spec import state_bytes
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.gguf.model_path import find_gguf
from coatcheck.workers.kv.block_layout import BlockLayout
from coatcheck.workers.lora.adapter import Adapter
from coatcheck.workers.model.known_architectures import check_causal, check_known
from coatcheck.workers.model.model_rules import check_state_device

BLOCK_SIZES: Final = (8, 16, 32, 64, 128)
_DEFAULT_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class Sizing:
    """`weight_bytes`: bytes of the whole model's weights. `rank_weights`: the weights of one rank. `num_blocks`: blocks
    of the pool. `num_snapshots`: snapshots of states, at which cached prompts start. `rank_state_bytes`: bytes of the
    states of one sequence on one rank; 0 for a model with attention in every layer. `rank_adapter_bytes`: bytes of the
    LoRA adapters on one rank.

    Each `*_rows` method returns one list of the JSON object of `coatcheck plan --json`. plan_table.py shows it as a
    table.
    """

    settings: PlanSettings
    shape: ModelShape
    dtype: str
    context: int
    cache: KvCacheSpec
    weight_bytes: float
    bytes_per_weight: float
    rank_weights: WeightCount
    rank_state_bytes: int
    rank_adapter_bytes: int
    num_blocks: int
    num_snapshots: int
    lengths: LengthDistribution
    notes: tuple[str, ...]

    @classmethod
    def of(cls, settings: PlanSettings) -> Self:
        """Raise InvalidModel if config.json lacks a size, InvalidConfig if a setting does not fit the model."""
        config = ModelConfig.open(settings.model)
        config = fill_defaults(config, with_sizes=config.is_multimodal)  # their text_config is published without sizes
        if not config.is_multimodal:
            check_causal(config.name, config.model_type)
        shape = ModelShape.of(config)
        dtype = shape.dtype if settings.dtype == "auto" else settings.dtype
        kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
        check_backend_model(
            settings.attention_backend,
            shape.layers,
            dtype=dtype,
            kv_dtype=kv_dtype,
            deterministic=False,
            has_sinks=config.model_type in MODEL_TYPES_WITH_SINKS,
        )
        context = settings.context or min(_DEFAULT_CONTEXT, shape.max_model_len or _DEFAULT_CONTEXT)
        layers = shape.layers if settings.latent else shape.expanded
        shard = TpShard(0, settings.tp, divides_latents=settings.mla_shard == "tokens")
        cache = KvCacheSpec.of(layers, shard, settings.block_size, kv_dtype)
        whole = WeightCount.of(config, shape.expanded, TpShard(0, 1), states=shape.states)
        part = WeightCount.of(
            config,
            shape.expanded,
            TpShard(0, settings.tp),
            states=shape.states,
            expert_parallel=settings.expert_parallel,
        )
        rank_states = state_bytes(tuple(shard.shard_state(state) for state in shape.states), dtype)
        adapter_bytes = _adapter_bytes(settings, shape, dtype)
        weight_bytes, plain_note = settings.weights or _stored_bytes(settings, config, dtype), ""
        if weight_bytes is None:
            weight_bytes = float(whole.total * WEIGHT_BYTES[dtype])
            plain_note = _counted_as_plain(settings, config, dtype)
        bytes_per_weight = weight_bytes / whole.total
        rank_bytes = part.total * bytes_per_weight + adapter_bytes
        try:
            num_blocks, num_snapshots = count_pool_blocks(cache, settings, rank_bytes, rank_states)
        except InvalidConfig as refusal:
            raise InvalidConfig("; ".join(filter(None, (str(refusal), plain_note)))) from None
        return cls(
            settings=settings,
            shape=shape,
            dtype=dtype,
            context=context,
            cache=cache,
            weight_bytes=weight_bytes,
            bytes_per_weight=bytes_per_weight,
            rank_weights=part,
            rank_state_bytes=rank_states,
            rank_adapter_bytes=adapter_bytes,
            num_blocks=num_blocks,
            num_snapshots=num_snapshots,
            lengths=_lengths(settings.lengths, context),
            notes=(
                *_refusals(config),
                *shape.notes,
                *([plain_note] if plain_note and settings.quantization != "auto" else []),
                *(_state_notes(settings, config, shape, rank_states, num_snapshots) if shape.states else ()),
                *([f"LoRA adapters take {adapter_bytes:,} bytes on each rank"] if adapter_bytes else []),
                *_notes(cache, context, shape.max_model_len),
            ),
        )

    @property
    def sequences(self) -> int:
        """Sequences of `context` tokens that the memory holds at once, with their states."""
        return self.count_sequences(self.cache, self.num_blocks, self.cache.count_blocks(self.context))

    @property
    def longest_context(self) -> int:
        """The largest context at which `concurrency` sequences fit."""
        return self.num_blocks // self.settings.concurrency * self.cache.block_size

    @property
    def paged_sequences(self) -> int:
        """Sequences of `lengths` at their full length, on average, that the memory holds at once with their states."""
        return self.count_sequences(self.cache, self.num_blocks, self.lengths.mean_blocks(self.cache.block_size))

    @property
    def reserved_sequences(self) -> int:
        """Sequences that the same memory holds if each reserves `context` tokens."""
        return self.count_sequences(self.cache, self.num_blocks, self.context / self.cache.block_size)

    def count_sequences(self, cache: KvCacheSpec, num_blocks: int, blocks: float) -> int:
        """capacity.count_sequences() for this model."""
        weights, states = self.rank_weight_bytes, self.rank_state_bytes
        return count_sequences(cache, self.settings, num_blocks, blocks, weights, states)

    @property
    def rank_weight_bytes(self) -> float:
        """Bytes of the weights and of the LoRA adapters on one rank."""
        return self.rank_weights.total * self.bytes_per_weight + self.rank_adapter_bytes

    def layer_rows(self) -> list[dict[str, Any]]:
        """What each kind of layer stores for a token, in order. `count`: number of equal layers."""
        kv_dtype, block_size, shard = self.cache.whole.kv_dtype, self.cache.block_size, self.cache.shard
        return [
            {
                "count": self.cache.stored_layers.count(layer),
                "kv_heads": layer.num_kv_heads,
                "head_dim": layer.head_dim,
                "value_dim": layer.value_dim,
                "sliding_window": layer.sliding_window,
                "bytes_per_token": BlockLayout.of([layer], block_size, kv_dtype).bytes_per_token,
                "rank_bytes_per_token": BlockLayout.of(
                    [shard.shard_layer(layer)], block_size, kv_dtype
                ).bytes_per_token,
            }
            for layer in dict.fromkeys(self.cache.stored_layers)
        ]

    def kv_dtype_rows(self) -> list[dict[str, Any]]:
        """The pool with every kv-dtype that the model supports."""
        rows = []
        for name, kv_dtype in KV_DTYPES.items():
            cache = KvCacheSpec.of_or_none(self.cache.layers, self.cache.shard, self.cache.block_size, kv_dtype)
            if cache is not None:
                num_blocks, _ = count_pool_blocks(cache, self.settings, self.rank_weight_bytes, self.rank_state_bytes)
                rows.append(
                    {
                        "kv_dtype": name,
                        "bytes_per_token": cache.whole.bytes_per_token,
                        "scale_bytes_per_token": cache.whole.scale_bytes_per_token,
                        "num_blocks": num_blocks,
                        "sequences": self.count_sequences(cache, num_blocks, cache.count_blocks(self.context)),
                    }
                )
        return rows

    def variant_rows(self) -> list[dict[str, Any]]:
        """The KV cache of `concurrency` sequences with other KV heads. Bytes are None if tp does not divide them."""
        rows = []
        for name, kv_heads, layers in attention_variants(self.shape):
            cache = KvCacheSpec.of_or_none(layers, self.cache.shard, self.cache.block_size, self.cache.whole.kv_dtype)
            concurrency = self.settings.concurrency
            rows.append(
                {
                    "name": name,
                    "kv_heads": kv_heads,
                    "bytes_per_token": cache and cache.whole.bytes_per_token,
                    "concurrent_bytes": cache and concurrency * cache.sequence_bytes(self.context),
                    "rank_concurrent_bytes": cache and concurrency * cache.rank_sequence_bytes(self.context),
                }
            )
        return rows

    def block_size_rows(self) -> list[dict[str, Any]]:
        """For every block size the share of slots that is wasted, and how many sequences of `lengths` fit."""
        rows = []
        for size in BLOCK_SIZES:
            try:
                cache = KvCacheSpec.of(self.cache.layers, self.cache.shard, size, self.cache.whole.kv_dtype)
                num_blocks, _ = count_pool_blocks(cache, self.settings, self.rank_weight_bytes, self.rank_state_bytes)
                fit = self.count_sequences(cache, num_blocks, self.lengths.mean_blocks(size))
            except InvalidConfig:  # no block of this size fits, or its tokens cannot be divided over the ranks
                fit = 0
            rows.append({"block_size": size, "waste": self.lengths.waste(size), "sequences": fit})
        return rows

    def step_time_rows(self) -> list[dict[str, Any]]:
        """Step times of batches of 1, of `concurrency`, and of `sequences`."""
        batches = {1, self.settings.concurrency, self.sequences} - {0}
        return [self.step_time_row(batch) for batch in sorted(batches)]

    def step_time_row(self, batch: int) -> dict[str, Any]:
        """Lower bound of a decode step's time: the weights and KV that each rank reads, divided by the bandwidth."""
        weights = self.rank_weights.read_per_step(batch) * self.bytes_per_weight / self.settings.bandwidth
        # A step reads and writes the state of each sequence, whose size does not depend on the context.
        kv = batch * (self.cache.rank_bytes_read(self.context) + 2 * self.rank_state_bytes) / self.settings.bandwidth
        return {
            "batch": batch,
            "weights_seconds": weights,
            "kv_seconds": kv,
            "seconds": weights + kv,
            "tokens_per_second": batch / (weights + kv),
        }

    def to_json(self) -> dict[str, Any]:
        """Bytes, tokens and seconds as plain numbers."""
        cache, context, concurrency = self.cache, self.context, self.settings.concurrency
        block_size = cache.block_size
        return {
            "model": self.shape.name,
            "dtype": self.dtype,
            "kv_dtype": str(cache.whole.kv_dtype),
            "tp": cache.tp,
            "expert_parallel": self.settings.expert_parallel,
            "mla_shard": self.settings.mla_shard,
            "attention_backend": backend_name(self.settings.attention_backend),
            "block_size": block_size,
            "context": context,
            "concurrency": concurrency,
            "bytes_per_token": cache.whole.bytes_per_token,
            "scale_bytes_per_token": cache.whole.scale_bytes_per_token,
            "rank_bytes_per_token": cache.rank.bytes_per_token,
            "rank_bytes_per_block": cache.rank.bytes_per_block,
            "copies": cache.copies,
            "layers": self.layer_rows(),
            "sequence_bytes": cache.sequence_bytes(context),
            "rank_sequence_bytes": cache.rank_sequence_bytes(context),
            "rank_state_bytes": self.rank_state_bytes,
            "num_snapshots": self.num_snapshots,
            "windowed_sequence_bytes": cache.windowed_sequence_bytes(context),
            "concurrent_bytes": concurrency * cache.sequence_bytes(context),
            "weight_bytes": self.weight_bytes,
            "rank_weight_bytes": self.rank_weight_bytes,
            "rank_adapter_bytes": self.rank_adapter_bytes,
            "gpu_memory": self.settings.gpu_memory,
            "num_blocks": self.num_blocks,
            "rank_pool_bytes": self.num_blocks * cache.rank.bytes_per_block,
            "pool_tokens": self.num_blocks * block_size,
            "sequences": self.sequences,
            "fits": self.sequences >= concurrency,
            "longest_context": self.longest_context,
            "kv_dtypes": self.kv_dtype_rows(),
            "variants": self.variant_rows(),
            "block_sizes": self.block_size_rows(),
            "lengths": {
                "source": self.lengths.source,
                "number": self.lengths.number,
                "left_out": self.lengths.left_out,
                "mean": self.lengths.mean,
                "paged": self.paged_sequences,
                "reserved": self.reserved_sequences,
            },
            "step_times": self.step_time_rows(),
            "notes": list(self.notes),
        }


def _lengths(trace: Path | None, context: int) -> LengthDistribution:
    return LengthDistribution.evenly_spread(context) if trace is None else LengthDistribution.read(trace, context)


def _stored_bytes(settings: PlanSettings, config: ModelConfig, dtype: str) -> float | None:
    """Bytes of the weights as a group of one rank holds them, from the headers of the model's files. None without
    files, for plain weights on GPUs, and for float16 on CPUs."""
    directory, scheme = Path(settings.model).expanduser(), read_scheme(config.name, config.values)
    check_quantization(config.name, settings.quantization, scheme)
    gguf = find_gguf(settings.model)
    if (settings.device == "cpu" and dtype == "float16") or not (directory.is_dir() or gguf):
        return None
    is_plain = scheme is None and settings.quantization == "auto"
    if settings.device == "cuda" and (is_plain or not (gguf or any(directory.glob("*.safetensors")))):
        return None
    entries = read_entries(directory) if gguf is None else plan_conversion(gguf, settings.dtype).entries
    held = held_bytes(
        config.name,
        config.values,
        entries,
        WEIGHT_BYTES[dtype],
        settings.device,
        settings.quantization,
        is_multimodal=config.is_multimodal and config.is_served,
        ties_head=ties_head(config),
    )
    return float(held)


def _counted_as_plain(settings: PlanSettings, config: ModelConfig, dtype: str) -> str:
    """The note for weights that will be quantised, but are counted in `dtype`; "" for other weights."""
    if settings.quantization == "auto" and config.values.get("quantization_config") is None:
        return ""
    return f"quantised weights are counted as {dtype} without MODEL's files: give their bytes with --weights"


def _adapter_bytes(settings: PlanSettings, shape: ModelShape, dtype: str) -> int:
    """Bytes of the LoRA adapters on one rank: CPUs hold them as float32, GPUs in the model's dtype."""
    kv_ranks = min((settings.tp, *(layer.num_kv_heads for layer in shape.layers[:1])))
    size = int(WEIGHT_BYTES["float32" if settings.device == "cpu" else dtype])
    return sum(Adapter.open(module).rank_bytes(settings.tp, kv_ranks, size) for module in settings.adapters)


def _refusals(config: ModelConfig) -> list[str]:
    """A note if `coatcheck serve` refuses the model type here. A newer transformers may know the type."""
    try:
        if not config.model_type:
            raise no_type_error(config.name, config.values)
        if config.is_served:
            check_known(config.name, config.model_type, has_auto_map="auto_map" in config.values)
    except InvalidModel as error:
        return [f"`coatcheck serve` refuses this model: {error}"]
    return []


def _state_notes(
    settings: PlanSettings, config: ModelConfig, shape: ModelShape, rank_state_bytes: int, num_snapshots: int
) -> list[str]:
    notes = [
        f"some layers keep {rank_state_bytes:,} bytes of state for each sequence on each rank; the pool is what the "
        f"states of {settings.concurrency:,} sequences (--concurrency) leave: serve with --max-num-seqs "
        f"{settings.concurrency}; the sequences that fit are counted with the states of as many",
        f"{num_snapshots:,} snapshots of states, at which cached prompts start, take "
        f"{num_snapshots * rank_state_bytes:,} bytes of each rank's KV memory (--state-snapshot-share "
        f"{settings.state_snapshot_share:g})"
        if num_snapshots
        else "no prefix cache: every prompt is computed from its first token",
    ]
    try:
        check_state_device("cuda", config.model_type, config.values, shape.states)
    except InvalidConfig as error:
        notes.append(str(error))
    return notes


def _notes(cache: KvCacheSpec, context: int, max_model_len: int | None) -> list[str]:
    empty = f"no layer has attention: the blocks of the pool hold nothing; at most {cache.rank.max_blocks:,}"
    notes = [] if cache.layers else [empty]
    is_latent = any(layer.is_latent for layer in cache.layers)
    if is_latent and cache.shard.divides_latents:
        notes.append("latent attention (MLA): the ranks of tp divide the tokens of each block (--mla-shard tokens)")
    elif is_latent:
        notes.append("latent attention (MLA): every rank of tp holds the latents of all tokens")
    elif cache.copies > 1 and len({layer.num_kv_heads for layer in cache.layers}) > 1:
        notes.append(f"tp {cache.tp} is larger than the number of KV heads of some layers: ranks share these heads")
    elif cache.copies > 1:
        notes.append(f"tp {cache.tp} is larger than the number of KV heads: {cache.copies:.0f} ranks hold each head")
    padded = next((layer for layer in cache.layers if layer.unpadded_v_dim), None)
    if padded is not None:
        notes.append(
            f"the pool pads values of {padded.unpadded_v_dim} elements with zeros to the length of keys "
            f"({padded.head_dim})"
        )
    if readers := len(cache.layers) - len(cache.stored_layers):
        notes.append(
            f"{readers} of {len(cache.layers)} layers read the keys and values of earlier layers and store none"
        )
    if any(layer.sliding_window for layer in cache.layers):
        notes.append("the pool keeps blocks outside of sliding windows until the sequence ends")
    if max_model_len is not None and context > max_model_len:
        notes.append(f"the model's maximum in config.json is {max_model_len:,} tokens; the context is {context:,}")
    return notes
