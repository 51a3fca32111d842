"""Tiny random checkpoints of every architecture that we serve, for the tests of several rooms.

`tiny_checkpoint(arch, directory)` writes one and returns its path.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from coatcheck.workers.verification.random_model import write_random_checkpoint

VOCAB = 199  # odd, so that no number of ranks divides it

_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    original_max_position_embeddings=32,
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.0, 2.0, 4.0, 8.0],
)

_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=64,
    mscale=0.7,
    mscale_all_dim=1.0,
)
_DEEPSEEK: dict[str, Any] = dict(
    num_key_value_heads=8,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_shared_experts=1,
    moe_intermediate_size=48,
    first_k_dense_replace=1,
)

# name -> (transformers' model type, what differs from the common shape)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
            tie_word_embeddings=True,
        ),
    ),
    "dynamic-rope": ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0))),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=16)),
    "mistral": ("mistral", dict(sliding_window=16, head_dim=16)),
    "gemma2": (
        "gemma2",
        dict(
            head_dim=16,
            sliding_window=16,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        ),
    ),
    "gemma3": ("gemma3_text", dict(head_dim=16, sliding_window=16, query_pre_attn_scalar=16, sliding_window_pattern=2)),
    "phi3": ("phi3", dict(rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5))),
    "phi3-longrope": ("phi3", dict(rope_parameters=_LONGROPE)),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        dict(embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.3, attention_multiplier=0.2),
    ),
    "deepseek-v2": ("deepseek_v2", _DEEPSEEK | dict(q_lora_rank=None, mlp_bias=True)),
    "deepseek-v2-groups": (
        "deepseek_v2",
        _DEEPSEEK | dict(attention_bias=True, topk_method="group_limited_greedy", n_group=2, topk_group=1),
    ),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK | dict(n_group=2, topk_group=1, rope_parameters=_YARN)),
    "deepseek-v3-halves": (
        "deepseek_v3",
        _DEEPSEEK
        | dict(
            n_group=1, topk_group=1, q_lora_rank=None, attention_bias=True, rope_interleave=False, n_shared_experts=2
        ),
    ),
    "mixtral": ("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3-moe": (
        "qwen3_moe",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
    ),
}

_LATENT = {name: value for name, value in _DEEPSEEK.items() if name.endswith(("rank", "dim"))} | dict(
    num_key_value_heads=8
)
_DELTA_NETS: dict[str, Any] = dict(  # three layers with a state, then one with attention
    num_hidden_layers=4,
    head_dim=32,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
)
_DELTA_NET_EXPERTS = _DELTA_NETS | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=64
)
_MAMBA: dict[str, Any] = dict(  # of most types with Mamba-2
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=32,
    mamba_chunk_size=16,
)
_JAMBA: dict[str, Any] = dict(  # Mamba, attention, Mamba, Mamba; every second layer has experts
    num_attention_heads=4,
    num_hidden_layers=4,
    attn_layer_period=4,
    attn_layer_offset=1,
    num_experts=4,
    num_experts_per_tok=2,
    mamba_d_state=8,
    mamba_dt_rank=5,
)
_LFM2: dict[str, Any] = dict(num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"])
# Types that only the parity tests and the tests of their peculiarities cover: `serve` verifies them when it starts.
FURTHER_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "axk1": ("axk1", _DEEPSEEK | dict(n_group=2, topk_group=1)),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        {name: value for name, value in _DEEPSEEK.items() if name != "first_k_dense_replace"},
    ),
    "falcon-mamba": ("falcon_mamba", dict(state_size=8, time_step_rank=5, use_bias=True)),
    "jamba": ("jamba", _JAMBA | dict(mamba_proj_bias=True)),
    "kimi-linear": (
        "kimi_linear",
        _LATENT
        | dict(
            num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            linear_num_heads=4,
            linear_head_dim=32,
            q_lora_rank=None,
            num_local_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=48,
            n_group=1,
            topk_group=1,
            tie_word_embeddings=False,
        ),
    ),
    "longcat-flash": (
        "longcat_flash",
        _LATENT
        | dict(
            num_layers=2,
            ffn_hidden_size=96,
            expert_ffn_hidden_size=48,
            n_routed_experts=8,
            zero_expert_num=4,
            moe_topk=4,
            head_dim=16,
        ),
    ),
    "mamba": ("mamba", dict(tie_word_embeddings=False)),
    "minimax": (
        "minimax",
        dict(
            num_hidden_layers=4,
            layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            block_size=16,
            full_attn_alpha_factor=0.9,
            full_attn_beta_factor=1.2,
            linear_attn_alpha_factor=1.3,
            linear_attn_beta_factor=0.8,
            mlp_alpha_factor=1.1,
            mlp_beta_factor=0.7,
        ),
    ),
    "mimo-v2-flash": (
        "mimo_v2_flash",
        dict(
            num_hidden_layers=6,  # the first and the last with full attention
            head_dim=24,
            v_head_dim=16,
            sliding_window=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
        ),
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        dict(
            num_hidden_layers=4,  # three layers with a state, then one with attention
            num_attention_heads=4,
            num_key_value_heads=4,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            linear_key_head_dim=16,
            linear_value_head_dim=32,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
    "qwen3-next": ("qwen3_next", _DELTA_NET_EXPERTS | dict(mlp_only_layers=[1])),
    "qwen3.5": ("qwen3_5_text", _DELTA_NETS),
    "qwen3.5-moe": ("qwen3_5_moe_text", _DELTA_NET_EXPERTS),
    "youtu": ("youtu", _LATENT | dict(tie_word_embeddings=True)),
}
# Architectures that no GPU kernel computes.
ON_CPUS = ("falcon-mamba", "jamba", "mamba")
# Types whose layers with a state are not divided over ranks.
ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("bamba", {k: v for k, v in _MAMBA.items() if k != "layer_types"} | dict(attn_layer_indices=[1])),
    "falcon-h1": (
        "falcon_h1",
        {k: v for k, v in _MAMBA.items() if k != "layer_types"}
        | dict(
            mamba_d_ssm=128,
            mamba_rms_norm=True,
            mamba_norm_before_gate=True,
            ssm_in_multiplier=1.3,
            ssm_multipliers=[0.7, 1.2, 0.9, 1.1, 0.8],
            key_multiplier=1.2,
        ),
    ),
    "falcon-h1-no-norm": (
        "falcon_h1",
        {k: v for k, v in _MAMBA.items() if k != "layer_types"} | dict(mamba_d_ssm=128, mamba_rms_norm=False),
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        _MAMBA
        | dict(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=48, position_embedding_type="rope")
        | dict(embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.3, attention_multiplier=0.2),
    ),
    "lfm2": ("lfm2", _LFM2 | dict(conv_bias=True, block_multiple_of=16)),
    "lfm2-moe": (
        "lfm2_moe",
        _LFM2 | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, num_dense_layers=1),
    ),
    "lfm3": (
        "lfm3",
        dict(
            num_hidden_layers=5,
            layer_types=["conv", "conv", "full_attention", "conv", "sliding_attention"],
            head_dim=16,
            sliding_window=16,
        ),
    ),
    "mamba2": (
        "mamba2",
        dict(num_heads=8, head_dim=16, n_groups=2, state_size=32, chunk_size=16, use_bias=True),
    ),
    "zamba2": (
        "zamba2",
        dict(
            # Small, because the rounding of a random model of this type grows fast from token to token.
            hidden_size=32,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_hidden_layers=6,
            layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid", "mamba"],
            num_mem_blocks=2,  # the first and the third hybrid layer share a block
            use_shared_attention_adapter=True,
            use_mem_rope=True,
            adapter_rank=16,
            n_mamba_heads=4,
            mamba_ngroups=2,
            mamba_d_state=32,
            chunk_size=16,
            time_step_min=1e-9,  # transformers takes this as the least dt of prompts
            time_step_floor=1e-2,
        ),
    ),
    "nemotron-h": (
        "nemotron_h",
        dict(
            num_hidden_layers=6,
            layers_block_type=["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"],
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            ssm_state_size=32,
            time_step_min=1e-5,  # transformers takes this as the least dt of prompts
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=48,
        ),
    ),
}


def tiny_config(arch: str, **overrides: Any) -> Any:
    """The config of a tiny model."""
    model_type, differences = (ARCHITECTURES | FURTHER_ARCHITECTURES | ONE_RANK)[arch]
    return CONFIG_MAPPING[model_type](**{**_COMMON, **differences, **overrides})


def tiny_checkpoint(
    arch: str, directory: Path, *, dtype: torch.dtype = torch.float32, config: Any = None, **overrides: Any
) -> Path:
    """Writes the checkpoint to `directory / arch` unless it is there, and returns that path.

    `config` stands for an architecture that is not in the table; `overrides` change the table's.
    """
    path = directory / arch
    if path.exists():
        return path
    config = config or tiny_config(arch, **overrides)
    return write_random_checkpoint(config, path, seed=sum(arch.encode()), dtype=dtype)
