"""Architectures beyond those that are promised: which are served, which are refused and why, and tiny models of each.

The values of `SERVED` and `REFUSED_SHAPES` are settings that a tiny model of the architecture needs. The values of
`REFUSED` are patterns of the reason.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from tests.workers.checkpoints import VOCAB, tiny_checkpoint

_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
)
_LATENT_EXPERTS = _EXPERTS | _LATENT | dict(n_routed_experts=4, n_group=1, topk_group=1)
SERVED: dict[str, dict[str, Any]] = {
    "axk1": _LATENT_EXPERTS,
    "biogpt": {},
    "cohere": {},
    "cohere2": {},
    "codegen": dict(rotary_dim=8),
    "exaone4": {},
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "gemma3n_text": dict(
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
    ),
    "gemma": {},
    "gemma4_text": dict(
        head_dim=16,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
    "glm4": {},
    "glm4_moe": _EXPERTS | dict(n_routed_experts=4),
    "glm4_moe_lite": _LATENT_EXPERTS,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=16),
    "gpt_neox": {},
    "gptj": dict(rotary_dim=8),
    "gpt_oss": dict(
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=16,  # shorter than the prompt: sinks with and without a window
        rope_parameters=dict(rope_type="default", rope_theta=1e4),
    ),
    "hunyuan_v1_moe": dict(head_dim=16, num_experts=4, moe_topk=2),
    "longcat_flash": _LATENT
    | dict(
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        head_dim=8,
    ),
    "mimo_v2_flash": _EXPERTS | dict(n_routed_experts=4, head_dim=24, v_head_dim=16, sliding_window=16),
    "nemotron": {},
    "olmo3": {},
    "olmoe": _EXPERTS,
    "opt": dict(word_embed_proj_dim=64, ffn_dim=96),
    "phi": {},
    "phimoe": dict(num_local_experts=4, sliding_window=16),
    "qwen2_moe": _EXPERTS | dict(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "smollm3": {},
    "stablelm": dict(qk_layernorm=True, use_qkv_bias=True),
    "starcoder2": {},
    "youtu": _LATENT,
}
REFUSED = {
    "bloom": "outside of transformers' attention interface",
    "diffllama": "calls attention more than once",
    "llama4_text": "its attention mask is neither causal nor a sliding window .*; set --max-model-len to at most 16",
    "recurrent_gemma": "temporal_block.conv_1d .a convolution over 4 tokens. computes a token's result from other",
    "zaya": "qkv_proj.conv_qk_depthwise .a convolution over 2 tokens. computes a token's result from other tokens",
}

REFUSED_SHAPES: dict[str, dict[str, Any]] = {"zaya": dict(num_experts_per_tok=1, num_experts=4, head_dim=16)}
REFUSED_SHAPES["llama4_text"] = dict(attention_chunk_size=16, num_local_experts=4, head_dim=16)


def shape_of(model_type: str, **differences: Any) -> Any:
    """The config of a tiny model of that type."""
    shape = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    limits = dict(num_key_value_heads=2, max_position_embeddings=256, vocab_size=VOCAB)
    tokens = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return CONFIG_MAPPING[model_type](**(shape | limits | tokens | differences))


def write(model_type: str, directory: Path, **differences: Any) -> Path:
    return tiny_checkpoint(model_type, directory, config=shape_of(model_type, **differences))
