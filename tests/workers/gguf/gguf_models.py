"""write_model(): tiny models as GGUF files, and as checkpoints with the weights that the files stand for."""

import shutil
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType as Type
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING

from coatcheck.workers.verification.random_model import write_random_checkpoint
from tests.workers.gguf.gguf_files import KindOf, byte_tokenizer, write_file

_EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=256)
_LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
_LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32,
    short_factor=[1 + 0.05 * place for place in range(16)], long_factor=[1 + 0.5 * place for place in range(16)],
)  # fmt: skip
_SHARE = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)
_PLAIN_NORMS: dict[str, Any] = dict(use_qkv_bias=True, rope_parameters=_SHARE)
_GPT2: dict[str, Any] = dict(n_embd=256, n_head=8, n_layer=2, n_inner=512, n_positions=256)
_ROUTED: dict[str, Any] = dict(
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=256, n_shared_experts=1, first_k_dense_replace=1,
    num_hidden_layers=3,
)  # fmt: skip
_LATENT: dict[str, Any] = _ROUTED | dict(
    num_key_value_heads=8, q_lora_rank=128, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=64,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32.0,
    beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707,
)  # fmt: skip
_GEMMA4: dict[str, Any] = dict(
    head_dim=32, global_head_dim=64, sliding_window=16, num_hidden_layers=4, hidden_size_per_layer_input=64,
    layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=30.0,
)  # fmt: skip
_DELTA_NET: dict[str, Any] = dict(
    head_dim=64, num_hidden_layers=5, linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=32,
    linear_value_head_dim=32,
)  # fmt: skip
_SCALES: dict[str, Any] = dict(
    embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.3, attention_multiplier=0.2
)
_GRANITE_MOE: dict[str, Any] = _SCALES | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=256)
_MAMBA2: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=2, mamba_d_state=32)
_GRANITE_HYBRID: dict[str, Any] = _MAMBA2 | dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"],
    shared_intermediate_size=512, position_embedding_type="nope", max_position_embeddings=2**20,
)  # fmt: skip
_NEMOTRON_H: dict[str, Any] = dict(
    head_dim=64, mamba_num_heads=8, mamba_head_dim=32, n_groups=2, ssm_state_size=32, num_hidden_layers=4,
)  # fmt: skip
_QWEN3_NEXT: dict[str, Any] = _DELTA_NET | _EXPERTS | dict(shared_expert_intermediate_size=256, norm_topk_prob=True)
# name -> (llama.cpp's architecture, transformers' model type, fields of its config)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama-biases": ("llama", "llama", dict(attention_bias=True, mlp_bias=True)),
    "llama3": (
        "llama", "llama", dict(rope_parameters=_LLAMA3, max_position_embeddings=16384, tie_word_embeddings=True),
    ),
    "llama-other-divisors": (
        "llama", "llama", dict(rope_parameters=_LLAMA3 | dict(high_freq_factor=3.0), max_position_embeddings=16384),
    ),
    "mixtral": ("llama", "mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "granite": (
        "granite",
        "granite",
        _SCALES,
    ),
    "granite-moe": ("granitemoe", "granitemoe", _GRANITE_MOE),
    "granite-moe-shared": ("granitemoe", "granitemoeshared", _GRANITE_MOE | dict(shared_intermediate_size=512)),
    "granite-hybrid": ("granitehybrid", "granitemoehybrid", _GRANITE_MOE | _GRANITE_HYBRID),
    "granite-hybrid-dense": (
        "granitehybrid", "granitemoehybrid",
        _SCALES | _GRANITE_HYBRID | dict(num_local_experts=0, num_experts_per_tok=0),
    ),
    "falcon-h1": (
        "falcon-h1", "falcon_h1",
        _MAMBA2 | dict(head_dim=64, mamba_d_ssm=512, mamba_rms_norm=True, mamba_norm_before_gate=False),
    ),
    "nemotron-h": (
        "nemotron_h", "nemotron_h",
        _NEMOTRON_H | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]),
    ),
    "nemotron-h-moe": (
        "nemotron_h_moe", "nemotron_h",
        _NEMOTRON_H | dict(
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=256, moe_shared_expert_intermediate_size=512,
            intermediate_size=256, routed_scaling_factor=2.5,
        ),
    ),
    "mamba": ("mamba", "mamba", dict(state_size=16)),
    "falcon-mamba": ("mamba", "falcon_mamba", dict(state_size=16, use_bias=True)),
    "mamba2": ("mamba2", "mamba2", dict(num_heads=8, head_dim=64, n_groups=2, state_size=32)),
    "qwen3-next": ("qwen3next", "qwen3_next", _QWEN3_NEXT),
    "mistral3": ("mistral3", "mistral", dict(head_dim=64, sliding_window=None)),
    "ministral3": (
        "mistral3", "ministral3",
        dict(
            head_dim=64,
            rope_parameters=_YARN | dict(mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        ),
    ),
    "arcee": ("arcee", "arcee", dict(head_dim=64, mlp_bias=True)),
    "gptneox": ("gptneox", "gpt_neox", dict(num_key_value_heads=8, rope_parameters=_SHARE)),
    "gptneox-sequential": (
        "gptneox", "gpt_neox",
        dict(num_key_value_heads=8, use_parallel_residual=False, attention_bias=False, rope_parameters=_SHARE),
    ),
    "dots1": (
        "dots1", "dots1",
        _ROUTED | dict(head_dim=64, attention_bias=True, norm_topk_prob=True, routed_scaling_factor=2.5),
    ),
    "smollm3": ("smollm3", "smollm3", dict(num_hidden_layers=5)),
    "qwen2": ("qwen2", "qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("qwen3", "qwen3", dict(head_dim=64)),
    "qwen2-vl": ("qwen2vl", "qwen2", dict(tie_word_embeddings=True)),
    "qwen3-vl": ("qwen3vl", "qwen3", dict(head_dim=64)),
    "qwen3-vl-moe": ("qwen3vlmoe", "qwen3_moe", _EXPERTS | dict(head_dim=64, norm_topk_prob=True)),
    "qwen2-moe": ("qwen2moe", "qwen2_moe", _EXPERTS | dict(shared_expert_intermediate_size=256)),
    "qwen3-moe": ("qwen3moe", "qwen3_moe", _EXPERTS | dict(head_dim=64, norm_topk_prob=True)),
    "olmo": ("olmo", "olmo", {}),
    "olmo-clipped": ("olmo", "olmo", dict(clip_qkv=0.5, tie_word_embeddings=True)),
    "olmo2": ("olmo2", "olmo2", {}),
    "phi2": ("phi2", "phi", dict(num_key_value_heads=8, rope_parameters=_SHARE)),
    "phi3": ("phi3", "phi3", dict(rope_parameters=_SHARE, original_max_position_embeddings=256)),
    "phi3-longrope": ("phi3", "phi3", dict(rope_parameters=_LONGROPE, original_max_position_embeddings=32)),
    "gemma": ("gemma", "gemma", dict(head_dim=64, tie_word_embeddings=True)),
    "gemma2": ("gemma2", "gemma2", dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32)),
    "gemma3": (
        "gemma3", "gemma3_text", dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=32, num_hidden_layers=7),
    ),
    "gemma3n": (
        "gemma3n", "gemma3n_text",
        dict(
            num_hidden_layers=5, head_dim=32, sliding_window=16, num_kv_shared_layers=2, laurel_rank=32,
            hidden_size_per_layer_input=32, activation_sparsity_pattern=[0.95, 0.0, 0.95, 0.0, 0.0],
            layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
                         "full_attention"],
        ),
    ),
    "gemma4": ("gemma4", "gemma4_text", _GEMMA4 | dict(num_kv_shared_layers=2, use_double_wide_mlp=True)),
    "gemma4-large": (
        "gemma4", "gemma4_text",
        _GEMMA4 | dict(hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma4-moe": (
        "gemma4", "gemma4_text",
        _GEMMA4 | dict(
            hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
            num_experts=4, top_k_experts=2, moe_intermediate_size=256,
        ),
    ),
    "starcoder2": ("starcoder2", "starcoder2", dict(use_bias=True, sliding_window=4096)),
    "stablelm": ("stablelm", "stablelm", _PLAIN_NORMS),
    "stablelm-parallel": ("stablelm", "stablelm", _PLAIN_NORMS | dict(use_parallel_residual=True)),
    "nemotron": ("nemotron", "nemotron", dict(rope_parameters=_SHARE, hidden_act="relu2")),
    "gpt2": ("gpt2", "gpt2", _GPT2),
    "falcon": ("falcon", "falcon", dict(multi_query=True, alibi=False, num_kv_heads=1, ffn_hidden_size=512)),
    "falcon-groups": (
        "falcon", "falcon",
        dict(new_decoder_architecture=True, alibi=False, num_kv_heads=2, ffn_hidden_size=512, multi_query=False),
    ),
    "minimax-m2": (
        "minimax-m2", "minimax_m2",
        dict(head_dim=64, num_local_experts=4, num_experts_per_tok=2, rope_parameters=_SHARE),
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt_oss",
        dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, intermediate_size=256, sliding_window=16),
    ),
    "lfm2": (
        "lfm2", "lfm2",
        dict(
            num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "conv"], block_auto_adjust_ff_dim=False,
        ),
    ),
    "lfm2-moe": (
        "lfm2moe", "lfm2_moe",
        _EXPERTS | dict(
            num_hidden_layers=4, layer_types=["conv", "full_attention", "conv", "full_attention"], num_dense_layers=2,
        ),
    ),
    "qwen35": ("qwen35", "qwen3_5_text", _DELTA_NET),
    "qwen35-equal-heads": ("qwen35", "qwen3_5_text", _DELTA_NET | dict(linear_num_key_heads=8)),
    "qwen35-moe": ("qwen35moe", "qwen3_5_moe_text", _DELTA_NET | _EXPERTS | dict(shared_expert_intermediate_size=256)),
    "olmoe": ("olmoe", "olmoe", dict(num_experts=4, num_experts_per_tok=2)),
    "deepseek-v2": (
        "deepseek2", "deepseek_v2",
        _LATENT | dict(q_lora_rank=None, n_shared_experts=2, n_group=1, topk_group=1, rope_parameters=_YARN),
    ),
    "deepseek-v3": (
        "deepseek2", "deepseek_v3",
        _LATENT | dict(n_group=2, topk_group=1, routed_scaling_factor=2.5, rope_parameters=_YARN),
    ),
    "glm4-moe-lite": ("deepseek2", "glm4_moe_lite", _LATENT | dict(n_group=1, topk_group=1, routed_scaling_factor=1.8)),
    "glm4": ("glm4", "glm4", dict(head_dim=64, attention_bias=True, rope_parameters=_SHARE)),
    "glm4-sections": (
        "glm4", "glm4", dict(head_dim=64, rope_parameters=_SHARE | dict(mrope_section=[8, 4, 4])),
    ),
    "glm4-moe": (
        "glm4moe", "glm4_moe",
        _ROUTED | dict(
            head_dim=64, attention_bias=True, use_qk_norm=True, routed_scaling_factor=2.5, rope_parameters=_SHARE,
        ),
    ),
    "command-r": ("command-r", "cohere", dict(logit_scale=0.25)),
    "command-r-head-norms": ("command-r", "cohere", dict(logit_scale=0.25, use_qk_norm=True)),
    "cohere2": ("cohere2", "cohere2", dict(num_hidden_layers=5, sliding_window=16, logit_scale=0.25)),
    "exaone4": ("exaone4", "exaone4", dict(num_hidden_layers=5, sliding_window=16, sliding_window_pattern=4)),
    "exaone4-no-window": (
        "exaone4", "exaone4",
        dict(
            sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 2,
            rope_parameters=_LLAMA3 | dict(factor=16.0), max_position_embeddings=16384,
        ),
    ),
    "ernie4_5": ("ernie4_5", "ernie4_5", dict(head_dim=64)),
    "ernie4_5-moe": (
        "ernie4_5-moe", "ernie4_5_moe",
        dict(
            num_hidden_layers=3, moe_num_experts=4, moe_k=2, moe_intermediate_size=256, moe_num_shared_experts=2,
            moe_layer_start_index=1, moe_layer_end_index=2,
        ),
    ),
    "ernie4_5-moe-interval": (
        "ernie4_5-moe", "ernie4_5_moe",
        dict(
            num_hidden_layers=6, moe_num_experts=4, moe_k=2, moe_intermediate_size=256, moe_num_shared_experts=1,
            moe_layer_start_index=2, moe_layer_end_index=5, moe_layer_interval=2,
        ),
    ),
    "hunyuan": ("hunyuan-dense", "hunyuan_v1_dense", dict(head_dim=64, tie_word_embeddings=True)),
    "hunyuan-alpha": (
        "hunyuan-dense", "hunyuan_v1_dense",
        dict(head_dim=64, rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=1.0, alpha=50.0)),
    ),
    "hunyuan-moe": ("hunyuan-moe", "hunyuan_v1_moe", dict(head_dim=32, num_experts=4, moe_topk=2)),
    "seed-oss": ("seed_oss", "seed_oss", dict(head_dim=64, attention_bias=True)),
}  # fmt: skip


def write_model(
    name: str, folder: Path, kind_of: KindOf | Type, *, tokenizer: Tokenizer | None = None, **overrides: Any
) -> tuple[Path, Path]:
    """(a GGUF file, a checkpoint in transformers' format with the weights that the file stands for, in float32).

    `kind_of`: the type of each matrix. `tokenizer`: byte-level; its vocabulary gives the model's.
    """
    tokenizer = tokenizer or byte_tokenizer()
    arch, model_type, fields = MODELS[name]
    shape = dict(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    if "hidden_size_per_layer_input" in fields:
        fields = fields | dict(vocab_size_per_layer_input=tokenizer.get_vocab_size())
    config = CONFIG_MAPPING[model_type](**{**shape, **fields, **overrides})
    source = write_random_checkpoint(config, folder / f"{name}-source", seed=sum(name.encode()))
    plain = Path(shutil.copytree(source, folder / f"{name}-plain"))
    path = folder / f"{name}.gguf"
    weights = write_file(source, path, arch, kind_of if callable(kind_of) else lambda _: kind_of, tokenizer)
    save_file(
        {key: tensor.contiguous() for key, tensor in weights.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    return path, plain
