"""WeightCount: the approximate number of weights that a rank holds and that a decode step reads, from config.json.

Only matrices are counted. Norms, biases and additions of single families are less than 1% of a real model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from coatcheck.cluster.planner.hybrid_layers import HybridLayers
from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.cluster.planner.model_shape import ATTENTIONS_PER_LAYER, NO_ATTENTION
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.core.model_spec import (
    DeltaNetSpec,
    LayerSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)
from coatcheck.workers.distributed.tp_shard import TpShard

# Families whose MLP has two matrices instead of three.
_UNGATED: Final = frozenset(
    {
        "apertus", "arcee", "biogpt", "bloom", "codegen", "ctrl", "falcon", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo",
        "gpt_neox", "gptj", "jais2", "mpt", "nanochat", "nemotron", "nemotron_h", "opt", "persimmon", "phi",
        "starcoder2",
    }
)  # fmt: skip
# Families that read the number of dense first layers from config.json. Others ignore the field.
_READ_FIRST_DENSE: Final = frozenset(
    {
        "afmoe", "axk1", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "kimi_linear",
        "lfm2_moe", "mistral4",
    }
)  # fmt: skip
# Families whose config class computes that the first layers are dense, if config.json does not say.
_FIRST_DENSE: Final = {
    "axk1": 1, "exaone_moe": 1, "glm4_moe_lite": 1, "hy_v3": 1, "kimi_linear": 1, "laguna": 1, "mimo_v2_flash": 1,
}  # fmt: skip
# Families whose query projection has a gate for each head's output.
_GATED_ATTENTION: Final = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Numbers of weights on one rank. `lookup`: in tables of which a step reads only few rows, such as an untied
    embedding. `experts`: in all experts together. `dense`: all other weights, which every step reads."""

    dense: int
    lookup: int
    experts: int
    num_experts: int
    experts_per_token: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layers: Sequence[LayerSpec],
        shard: TpShard,
        *,
        states: Sequence[StateSpec] = (),
        expert_parallel: bool = False,
    ) -> Self:
        """`layers`, `states`: ModelShape.expanded and .states. `expert_parallel`: a rank holds whole experts instead of
        a part of each. Raise InvalidConfig if the shard's size does not divide a matrix, or the experts."""
        if expert_parallel and not _num_experts(config):
            raise InvalidConfig(f"expert-parallel: {config.name} has no experts; leave --expert-parallel out")
        hidden, vocab = config.count("hidden_size", "n_embd", "d_model"), config.count("vocab_size")
        first, last = shard.vocab_rows(vocab) if shard.size > 1 else (0, vocab)
        table = (last - first) * hidden
        tied = ties_head(config)
        dense, experts = _layer_weights(config, layers, states, shard, hidden, expert_parallel=expert_parallel)
        inputs, input_rows = _layer_inputs(config, hidden, len(layers))
        num_experts = _num_experts(config) + _num_identities(config)
        return cls(
            dense=table + dense + inputs,  # every step reads the head
            lookup=input_rows + (0 if tied else table),
            experts=experts,
            num_experts=num_experts,
            experts_per_token=(
                config.count(
                    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", default=1
                )
                if num_experts
                else 0
            ),
        )

    @property
    def total(self) -> int:
        return self.dense + self.lookup + self.experts

    def read_per_step(self, batch: int) -> float:
        """Expected number of weights that a decode step of `batch` sequences reads, with experts chosen at random."""
        if not self.num_experts:
            return float(self.dense)
        unread = (1 - min(1.0, self.experts_per_token / self.num_experts)) ** batch
        return self.dense + self.experts * (1 - unread)


def ties_head(config: ModelConfig) -> bool:
    """Whether the head is tied to the embedding."""
    return bool(config.values.get("tie_word_embeddings"))


def _layer_weights(
    config: ModelConfig,
    layers: Sequence[LayerSpec],
    states: Sequence[StateSpec],
    shard: TpShard,
    hidden: int,
    *,
    expert_parallel: bool,
) -> tuple[int, int]:
    """(dense weights, weights of experts) of all layers. The arguments are those of WeightCount.of."""
    dense = experts = 0
    layer = layers[0] if layers else NO_ATTENTION
    hybrid = HybridLayers.of(config)
    attending = range(len(layers)) if hybrid is None else hybrid.attention_layers
    by_layer, attentions = {state.layer: state for state in states}, iter(layers)
    if config.model_type == "zamba2":
        dense, attending = _shared_blocks(config, layers, hidden), ()
    for index in range(len(layers) if hybrid is None else len(hybrid.kinds)):
        dense += _beside_attention(config, hidden)
        if index in by_layer:
            dense += _state_layer(by_layer[index], shard, hidden)
        if index in attending:
            layer = next(attentions)
            dense += _attention(config, layer, shard, hidden)
            dense += _output_gate(layer, shard, hidden) if config.model_type in _GATED_ATTENTION else 0
        if hybrid is not None and not hybrid.has_mlp(index):
            continue
        by_kind = None if hybrid is None else hybrid.has_experts(index)
        is_sparse = has_experts(config, index) if by_kind is None else by_kind
        if is_sparse:
            shared, routed = _experts(config, shard, hidden, expert_parallel=expert_parallel)
            dense, experts = dense + shared, experts + routed
        has_both = config.model_type in ATTENTIONS_PER_LAYER or config.values.get("enable_moe_block")  # Gemma 4
        if not is_sparse or has_both:
            mlp_shard = TpShard(0, 1) if _is_sparse_mlp(config, index) else shard
            dense += _mlp(config, _inner_size(config, hidden, index, layer), mlp_shard, hidden)
    return dense, experts


def _attention(config: ModelConfig, layer: LayerSpec, shard: TpShard, hidden: int) -> int:
    heads, kv_heads = shard.local_heads(layer)
    if config.values.get("kv_lora_rank") is None:
        own = kv_heads if layer.kv_source is None else 0
        values = 0 if config.values.get("attention_k_eq_v") and not layer.sliding_window else own  # Gemma 4
        return hidden * (layer.head_dim * (heads + own) + layer.output_dim * (heads + values))
    # Every rank has the projections to latents. The projections from latents and the output projection are sharded.
    rank, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    nope, q_rank = layer.head_dim - rope, config.number("q_lora_rank", default=0)
    queries = hidden * q_rank + q_rank * heads * layer.head_dim if q_rank else hidden * heads * layer.head_dim
    return queries + hidden * (rank + rope) + rank * heads * (nope + layer.value_dim) + heads * layer.value_dim * hidden


def _shared_blocks(config: ModelConfig, layers: Sequence[LayerSpec], hidden: int) -> int:
    """The weights of zamba2's blocks of attention and MLP, which several layers share, and what each layer that uses
    one has for itself: low-rank adapters and a linear."""
    if not layers:
        return 0
    inner, rank = config.count("intermediate_size", default=4 * hidden), config.count("adapter_rank", default=128)
    heads, kv_heads, dim = layers[0].num_heads, layers[0].num_kv_heads, layers[0].head_dim
    block = 2 * hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    use = hidden * hidden + rank * (hidden + 2 * inner)
    if config.values.get("use_shared_attention_adapter"):
        use += 3 * rank * 4 * hidden
    return min(config.count("num_mem_blocks", default=1), len(layers)) * block + len(layers) * use


def _state_layer(state: StateSpec, shard: TpShard, hidden: int) -> int:
    part = shard.shard_state(state)
    inner, (inputs, channels) = part.inner_size, part.window
    convolution = (inputs + 1) * channels
    if isinstance(part, ShortConvSpec):
        return hidden * (3 * channels + inner) + convolution
    if isinstance(part, MambaSpec):
        projected = part.dt_rank * (2 * inner) + 2 * part.state_size * inner  # of x_proj and dt_proj
        return 3 * hidden * inner + projected + part.state_size * inner + convolution
    if isinstance(part, LightningSpec):
        return 5 * hidden * inner  # q, k, v, gate and output
    if isinstance(part, Mamba2Spec):
        return hidden * (2 * inner + channels + part.heads) + convolution
    assert isinstance(part, DeltaNetSpec)
    values = part.value_heads * part.value_dim
    if part.has_channel_decays:  # gates and decays have two projections each, over a bottleneck of one head's size
        keys, bottleneck = part.key_heads * part.key_dim, part.value_dim
        projected = hidden * (part.conv_channels + values + 2 * bottleneck + part.value_heads)
        return projected + bottleneck * (keys + values) + part.conv_channels * part.conv_size
    return hidden * (part.conv_channels + 2 * values + 2 * part.value_heads) + part.conv_channels * part.conv_size


def _output_gate(layer: LayerSpec, shard: TpShard, hidden: int) -> int:
    """The rows of the query projection that hold the gates of a hybrid family's attention."""
    return hidden * layer.head_dim * shard.local_heads(layer)[0]


def _mlp(config: ModelConfig, inner: int, shard: TpShard, hidden: int) -> int:
    start, stop = shard.split_evenly(inner, "the MLP's inner size")
    return (2 if config.model_type in _UNGATED else 3) * hidden * (stop - start)


def _inner_size(config: ModelConfig, hidden: int, index: int, layer: LayerSpec) -> int:
    sizes = config.values.get("intermediate_size")
    if isinstance(sizes, list):  # Gemma 3n
        if index >= len(sizes):
            raise InvalidModel(f"{config.name}: config.json has {len(sizes)} intermediate_size; add the others")
        return ModelConfig(config.name, {"intermediate_size": sizes[index]}).count("intermediate_size")
    if config.values.get("use_double_wide_mlp") and layer.kv_source is not None:  # Gemma 4
        return 2 * config.count("intermediate_size")
    if config.model_type == "granitemoehybrid":  # without experts, the shared MLP is the only one
        return config.count("shared_intermediate_size", default=1024)
    if config.model_type == "lfm2" and config.values.get("block_auto_adjust_ff_dim") is not False:
        return _adjusted_size(config)
    if config.model_type == "llama4_text":
        return config.count("intermediate_size_mlp", default=16384)
    default = 4 * hidden if config.model_type in _UNGATED else None  # that of these families' config classes
    return config.count("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim", "dff", default=default)


def _adjusted_size(config: ModelConfig) -> int:
    """LFM2's inner size: two thirds of the field, times a factor, rounded up to a multiple."""
    size = int(2 * config.count("block_ff_dim", "intermediate_size", default=12288) / 3)
    factor = config.values.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = config.count("block_multiple_of", default=256)
    return multiple * -(-int(factor * size) // multiple)


def _is_sparse_mlp(config: ModelConfig, index: int) -> bool:
    """Whether every rank holds the layer's MLP whole (Gemma 3n)."""
    pattern = config.values.get("activation_sparsity_pattern")
    return isinstance(pattern, list) and index < len(pattern) and bool(pattern[index])


def _beside_attention(config: ModelConfig, hidden: int) -> int:
    """Weights of a layer outside of attention and MLP, which every rank holds: norms, and what Gemma 3n and 4 add."""
    total = 2 * hidden + 2 * hidden * _input_size(config)
    if config.model_type == "gemma3n_text":
        streams = config.count("altup_num_inputs", default=4)
        total += 2 * hidden * config.count("laurel_rank", default=64) + streams * (hidden + streams + streams**2)
    return total


def _layer_inputs(config: ModelConfig, hidden: int, num_layers: int) -> tuple[int, int]:
    """The per-layer input embeddings of Gemma 3n and 4: (weights that a step reads, weights of the embedding table)."""
    columns = num_layers * _input_size(config)
    if not columns:
        return 0, 0
    streams = config.count("altup_num_inputs", default=4) if config.model_type == "gemma3n_text" else 1
    rows = config.count("vocab_size_per_layer_input", default=262_144)
    return hidden * columns + 2 * (streams - 1) * hidden**2, rows * columns


def _input_size(config: ModelConfig) -> int:
    default = 256 if config.model_type in ("gemma3n_text", "gemma4_text") else 0
    return config.number("hidden_size_per_layer_input", default=default)


def _num_experts(config: ModelConfig) -> int:
    return config.number("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", default=0)


def _num_identities(config: ModelConfig) -> int:
    """The experts without weights, which return their input."""
    return config.number("zero_expert_num", default=0)


def has_experts(config: ModelConfig, index: int) -> bool:
    """Whether the layer has experts, in families whose layers all have an MLP."""
    without = config.values.get("mlp_only_layers")
    if without is None and config.model_type == "flint":
        without = [0, 1]
    if not _num_experts(config) or (isinstance(without, list) and index in without):
        return False
    if config.model_type == "gemma4_text" and not config.values.get("enable_moe_block"):
        return False
    if config.model_type == "ernie4_5_moe":
        return _is_ernie_sparse(config, index)
    if isinstance(listed := config.values.get("moe_layers"), list):  # llama4_text
        return index in listed
    if attentions := ATTENTIONS_PER_LAYER.get(config.model_type):  # one mixture beside several attentions and MLPs
        return index % attentions == 0
    kinds = config.values.get("mlp_layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] == "sparse")
    if isinstance(flags := config.values.get("moe_layer_freq"), list) and index < len(flags):  # mimo_v2_flash
        return bool(flags[index])
    if config.model_type == "jamba":
        offset = config.number("expert_layer_offset", default=1)
        return index % config.count("expert_layer_period", default=2) == offset
    every = ("decoder_sparse_step", "interleave_moe_layer_step")  # the last of every `step` layers
    if any(config.values.get(name) is not None for name in every):
        return (index + 1) % config.count(*every) == 0
    first = _FIRST_DENSE.get(config.model_type, 0)
    if config.model_type in _READ_FIRST_DENSE:
        first = config.number("first_k_dense_replace", "num_dense_layers", default=first)
    step = config.count("moe_layer_freq", default=1) if config.model_type == "axk1" else 1
    return index >= first and index % step == 0


def _is_ernie_sparse(config: ModelConfig, index: int) -> bool:
    """Whether the layer is one of every `moe_layer_interval`, from `moe_layer_start_index` to `moe_layer_end_index`."""
    last = config.values.get("moe_layer_end_index", -1)
    is_behind_last = type(last) is int and 0 <= last < index
    first, step = config.number("moe_layer_start_index", default=1), config.count("moe_layer_interval", default=1)
    return index >= first and not is_behind_last and (index + 1) % step == 0


def _experts(config: ModelConfig, shard: TpShard, hidden: int, *, expert_parallel: bool) -> tuple[int, int]:
    """(weights that every token uses, weights of all experts together) of one layer."""
    inner = config.count("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    names = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
    shared = config.number(*names, default=inner if config.model_type == "llama4_text" else 0)
    if config.model_type != "nemotron_h":  # whose field is the size of all shared experts together
        counts = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        shared += config.number(*counts, default=0) * inner
    count = _num_experts(config)
    if expert_parallel:
        first, last = shard.split_evenly(count, "the experts, as --expert-parallel needs")
        routed = (last - first) * _mlp(config, inner, TpShard(0, 1), hidden)
    else:
        routed = count * _mlp(config, inner, shard, hidden)
    return (count + _num_identities(config)) * hidden + _mlp(config, shared, shard, hidden), routed
