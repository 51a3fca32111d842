"""Names of tensors: {name in GGUF: name in transformers} of the model families, and of parts that families share.

Names have no .weight and .bias, or both have their endings. {} is the layer; experts are stacked in GGUF and have a
second {} in transformers. Imports no torch.
"""

from typing import Final


def _layer(**names: str) -> dict[str, str]:
    return {f"blk.{{}}.{leaf}": f"model.layers.{{}}.{name}" for leaf, name in names.items()}


_ENDS: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION: Final = _layer(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
)
_GATED: Final = _layer(ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
_HEAD_NORMS: Final = _layer(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
LLAMA: Final = _ENDS | _ATTENTION | _GATED
_EXPERTS: Final = _layer(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{}.gate_proj",
    ffn_up_exps="mlp.experts.{}.up_proj",
    ffn_down_exps="mlp.experts.{}.down_proj",
)
_SHARED_EXPERT: Final = _layer(
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
_MIXTRAL: Final = _layer(
    ffn_gate_inp="block_sparse_moe.gate",
    ffn_gate_exps="block_sparse_moe.experts.{}.w1",
    ffn_up_exps="block_sparse_moe.experts.{}.w3",
    ffn_down_exps="block_sparse_moe.experts.{}.w2",
)
_GEMMA_NORMS: Final = _layer(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_PLAIN_MLP: Final = _layer(ffn_up="mlp.up_proj", ffn_down="mlp.down_proj")
GPT2: Final = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}
GPT_OSS: Final = (
    _ENDS
    | _ATTENTION
    | _layer(post_attention_norm="post_attention_layernorm", ffn_gate_inp="mlp.router")
    | {"blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks"}
    | _layer(
        ffn_gate_exps="mlp.experts.gate_up_proj",
        ffn_up_exps="mlp.experts.gate_up_proj",
        ffn_down_exps="mlp.experts.down_proj",
    )
)
LFM2: Final = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
} | _layer(
    attn_norm="operator_norm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.out_proj",
    attn_q_norm="self_attn.q_layernorm",
    attn_k_norm="self_attn.k_layernorm",
    ffn_norm="ffn_norm",
    ffn_gate="feed_forward.w1",
    ffn_up="feed_forward.w3",
    ffn_down="feed_forward.w2",
) | {
    "blk.{}.shortconv.conv": "model.layers.{}.conv.conv",
    "blk.{}.shortconv.in_proj": "model.layers.{}.conv.in_proj",
    "blk.{}.shortconv.out_proj": "model.layers.{}.conv.out_proj",
}  # fmt: skip


def _mamba2(prefix: str) -> dict[str, str]:
    """`prefix`: of the names of a layer's mixer in transformers."""
    leaves = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_dt.bias": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {f"blk.{{}}.{leaf}": f"{prefix}.{name}" for leaf, name in leaves.items()}


LFM2_MOE: Final = LFM2 | _layer(
    ffn_gate_inp="feed_forward.gate",
    ffn_gate_exps="feed_forward.experts.{}.w1",
    ffn_up_exps="feed_forward.experts.{}.w3",
    ffn_down_exps="feed_forward.experts.{}.w2",
) | {"blk.{}.exp_probs_b.bias": "model.layers.{}.feed_forward.expert_bias"}  # fmt: skip

FALCON: Final = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "blk.{}.attn_output": "transformer.h.{}.self_attention.dense",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}
GPT_NEOX: Final = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "blk.{}.attn_norm": "gpt_neox.layers.{}.input_layernorm",
    "blk.{}.attn_qkv": "gpt_neox.layers.{}.attention.query_key_value",
    "blk.{}.attn_output": "gpt_neox.layers.{}.attention.dense",
    "blk.{}.ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
}

_ROUTED_EXPERTS: Final = _EXPERTS | _layer(
    ffn_gate_shexp="mlp.shared_experts.gate_proj",
    ffn_up_shexp="mlp.shared_experts.up_proj",
    ffn_down_shexp="mlp.shared_experts.down_proj",
) | {"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias"}  # fmt: skip
_ERNIE_EXPERTS: Final = _ROUTED_EXPERTS | {
    "blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.moe_statics.e_score_correction_bias"
}
_HUNYUAN_HEAD_NORMS: Final = _layer(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm")
_HUNYUAN_EXPERTS: Final = _EXPERTS | _layer(
    ffn_gate_inp="mlp.gate.wg",
    ffn_gate_shexp="mlp.shared_mlp.gate_proj",
    ffn_up_shexp="mlp.shared_mlp.up_proj",
    ffn_down_shexp="mlp.shared_mlp.down_proj",
)
GLM4: Final = _ENDS | _ATTENTION | _layer(
    post_attention_norm="post_self_attn_layernorm",
    post_ffw_norm="post_mlp_layernorm",
    ffn_up="mlp.gate_up_proj",
    ffn_down="mlp.down_proj",
)  # fmt: skip
_LATENT_ATTENTION: Final = _layer(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_q_a="self_attn.q_a_proj",
    attn_q_a_norm="self_attn.q_a_layernorm",
    attn_q_b="self_attn.q_b_proj",
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
    attn_kv_a_norm="self_attn.kv_a_layernorm",
    attn_kv_b="self_attn.kv_b_proj",
    attn_k_b="self_attn.kv_b_proj",
    attn_v_b="self_attn.kv_b_proj",
    attn_output="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
)
_DELTA_NET: Final = _layer(
    attn_qkv="linear_attn.in_proj_qkv",
    attn_gate="linear_attn.in_proj_z",
    ssm_beta="linear_attn.in_proj_b",
    ssm_alpha="linear_attn.in_proj_a",
    ssm_conv1d="linear_attn.conv1d",
    ssm_norm="linear_attn.norm",
    ssm_out="linear_attn.out_proj",
) | {
    "blk.{}.ssm_a": "model.layers.{}.linear_attn.A_log",
    "blk.{}.ssm_dt.bias": "model.layers.{}.linear_attn.dt_bias",
}  # fmt: skip

_POST_NORMS: Final = _layer(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm")
_POST_ATTENTION_NORM: Final = _layer(post_attention_norm="post_attention_layernorm")

MIXTURE_OF_LLAMA: Final = _ENDS | _ATTENTION | _MIXTRAL
QWEN3: Final = LLAMA | _HEAD_NORMS
QWEN2_MOE: Final = _ENDS | _ATTENTION | _EXPERTS | _SHARED_EXPERT
QWEN3_MOE: Final = _ENDS | _ATTENTION | _EXPERTS | _HEAD_NORMS
QWEN35: Final = QWEN3 | _POST_ATTENTION_NORM | _DELTA_NET
QWEN35_MOE: Final = QWEN3_MOE | _SHARED_EXPERT | _POST_ATTENTION_NORM | _DELTA_NET
# The norms of OLMo have no weights.
OLMO: Final = {name: other for name, other in LLAMA.items() if not name.endswith("norm")}
OLMO2: Final = QWEN3 | _POST_NORMS
PHI2: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.final_layernorm",
    "output": "lm_head",
} | _layer(
    attn_norm="input_layernorm",
    attn_q="self_attn.q_proj",
    attn_k="self_attn.k_proj",
    attn_v="self_attn.v_proj",
    attn_output="self_attn.dense",
    ffn_up="mlp.fc1",
    ffn_down="mlp.fc2",
)
PHI3: Final = (
    _ENDS | _ATTENTION | _layer(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj")
)
GEMMA2: Final = LLAMA | _GEMMA_NORMS
GEMMA3: Final = GEMMA2 | _HEAD_NORMS
STARCODER2: Final = _ENDS | _ATTENTION | _layer(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
NEMOTRON: Final = _ENDS | _ATTENTION | _PLAIN_MLP
MINIMAX_M2: Final = (
    MIXTURE_OF_LLAMA
    | _HEAD_NORMS
    | {"blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias"}
)
ARCEE: Final = _ENDS | _ATTENTION | _PLAIN_MLP
DOTS1: Final = QWEN3 | _ROUTED_EXPERTS
GLM4_MOE: Final = QWEN3 | _POST_ATTENTION_NORM | _ROUTED_EXPERTS
DEEPSEEK: Final = _ENDS | _LATENT_ATTENTION | _GATED | _ROUTED_EXPERTS
COHERE: Final = QWEN3
EXAONE4: Final = QWEN3 | _POST_NORMS
ERNIE_MOE: Final = LLAMA | _ERNIE_EXPERTS
HUNYUAN: Final = LLAMA | _HUNYUAN_HEAD_NORMS
HUNYUAN_MOE: Final = HUNYUAN | _HUNYUAN_EXPERTS
SEED_OSS: Final = LLAMA | _POST_ATTENTION_NORM
_PER_LAYER_INPUTS: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    **_layer(inp_gate="per_layer_input_gate", proj="per_layer_projection", post_norm="post_per_layer_input_norm"),
}
GEMMA3N: Final = (
    GEMMA3
    | _PER_LAYER_INPUTS
    | {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"}
    | {"blk.{}.altup_correct_scale.weight": "model.layers.{}.altup.correct_output_scale"}
    | _layer(
        altup_correct_coef="altup.correction_coefs",
        altup_predict_coef="altup.prediction_coefs",
        altup_router="altup.modality_router",
        altup_router_norm="altup.router_norm",
        laurel_l="laurel.linear_left",
        laurel_r="laurel.linear_right",
        laurel_post_norm="laurel.post_laurel_norm",
    )
)
GEMMA4: Final = (
    GEMMA3
    | _PER_LAYER_INPUTS
    | _layer(
        ffn_gate_inp="router.proj",
        pre_ffw_norm_2="pre_feedforward_layernorm_2",
        post_ffw_norm_1="post_feedforward_layernorm_1",
        post_ffw_norm_2="post_feedforward_layernorm_2",
    )
    | {
        "blk.{}.layer_output_scale.weight": "model.layers.{}.layer_scalar",
        "blk.{}.ffn_gate_inp.scale": "model.layers.{}.router.scale",
        "blk.{}.ffn_down_exps.scale": "model.layers.{}.router.per_expert_scale",
        "blk.{}.ffn_gate_up_exps.weight": "model.layers.{}.experts.gate_up_proj",
        "blk.{}.ffn_down_exps.weight": "model.layers.{}.experts.down_proj",
    }
)
QWEN3_NEXT: Final = QWEN35_MOE | _layer(
    attn_qkv="linear_attn.in_proj_qkvz",
    attn_gate="linear_attn.in_proj_qkvz",
    ssm_in="linear_attn.in_proj_qkvz",
    ssm_ba="linear_attn.in_proj_ba",
)
GRANITE_MOE: Final = _ENDS | _ATTENTION | _layer(
    ffn_gate_inp="block_sparse_moe.router.layer",
    ffn_gate_exps="block_sparse_moe.input_linear",
    ffn_up_exps="block_sparse_moe.input_linear",
    ffn_down_exps="block_sparse_moe.output_linear",
    ffn_gate_shexp="shared_mlp.input_linear",
    ffn_up_shexp="shared_mlp.input_linear",
    ffn_down_shexp="shared_mlp.output_linear",
)  # fmt: skip
GRANITE_HYBRID: Final = (
    GRANITE_MOE
    | _mamba2("model.layers.{}.mamba")
    | _layer(ffn_gate="shared_mlp.input_linear", ffn_up="shared_mlp.input_linear", ffn_down="shared_mlp.output_linear")
)
FALCON_H1: Final = (
    _ATTENTION
    | {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
    | _mamba2("model.layers.{}.mamba")
    | _layer(
        ffn_norm="pre_ff_layernorm.weight",  # stored without an ending
        ffn_gate="feed_forward.gate_proj",
        ffn_up="feed_forward.up_proj",
        ffn_down="feed_forward.down_proj",
    )
)
_NEMOTRON_H_MIXERS: Final = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
    "ffn_gate_inp": "gate",
    "exp_probs_b.bias": "gate.e_score_correction_bias",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_up_shexp": "shared_experts.up_proj",
    "ffn_down_shexp": "shared_experts.down_proj",
    "ffn_latent_down": "fc1_latent_proj",
    "ffn_latent_up": "fc2_latent_proj",
}
_BACKBONE: Final = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "backbone.layers.{}.norm",
}
_BACKBONE_MIXER: Final = "backbone.layers.{}.mixer"
NEMOTRON_H: Final = {
    **_BACKBONE,
    **_mamba2(_BACKBONE_MIXER),
    **{f"blk.{{}}.{leaf}": f"{_BACKBONE_MIXER}.{name}" for leaf, name in _NEMOTRON_H_MIXERS.items()},
}
MAMBA2: Final = _BACKBONE | _mamba2(_BACKBONE_MIXER)
_MAMBA_LEAVES: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
MAMBA: Final = _BACKBONE | {f"blk.{{}}.{leaf}": f"{_BACKBONE_MIXER}.{name}" for leaf, name in _MAMBA_LEAVES.items()}
