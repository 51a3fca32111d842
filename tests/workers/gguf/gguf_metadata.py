"""add_fields(): the metadata of a model as llama.cpp's converter writes it, from the fields of its config.json."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np


def add_fields(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    own = {
        "gpt2": _add_gpt2_fields,
        "gemma4": _add_gemma4_fields,
        "mamba": _add_mamba_fields,
        "mamba2": _add_mamba_fields,
    }
    if arch in own:
        own[arch](writer, config)
        return
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layer_count(config) + (arch == "glm4moe"))
    if arch.startswith("nemotron_h"):
        mlps = [kind in ("mlp", "moe") for kind in config["layers_block_type"]]
        writer.add_feed_forward_length([config["intermediate_size"] * has_mlp for has_mlp in mlps])
    elif arch not in ("qwen35moe", "qwen3next"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if arch == "deepseek2":
        _add_latent_widths(writer, config, rope)
    else:
        if arch != "phi2":  # whose heads have hidden_size / heads elements, and whose base is 10000
            writer.add_key_length(width)
            writer.add_value_length(width)
        writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1)))
    if arch != "phi2" and rope:
        writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1) ** (width / (width - 2)))
    rms_names = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon")
    names = ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps: Any = config["norm_eps"] if arch == "nemotron" else next((config[key] for key in names if key in config), None)
    if arch.startswith("nemotron_h"):
        eps = None
    if arch == "olmo":
        eps = 1e-5
        if config["clip_qkv"] is not None:
            writer.add_clamp_kqv(config["clip_qkv"])
    if eps is not None:
        writer.add_layer_norm_eps(eps)
    else:
        writer.add_layer_norm_rms_eps(next(config[key] for key in rms_names if key in config))
    writer.add_vocab_size(config["vocab_size"])
    kv_heads: Any = config.get("num_kv_heads" if arch == "falcon" else "num_key_value_heads")
    if arch in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif arch in ("granitehybrid", "nemotron_h", "nemotron_h_moe"):
        kinds = config.get("layer_types") or config["layers_block_type"]
        writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    else:
        writer.add_head_count_kv(kv_heads)
    counts = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((config[key] for key in counts if config.get(key)), None)
    if experts and arch != "nemotron_h":
        _add_experts(writer, arch, config, experts)
    if arch in ("gemma2", "gemma3", "phi3", "gpt-oss", "cohere2", "exaone4") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if arch == "exaone4":
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch.startswith("granite"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        _add_delta_net(writer, arch, config)
    if arch in ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"):
        _add_mamba2(writer, config)
    if arch == "granitehybrid":
        writer.add_rope_scaling_finetuned(False)
    if arch == "gptneox":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if arch == "gemma3n":
        _add_gemma3n_fields(writer, config)
    if "vl" in arch:
        writer.add_rope_dimension_sections([8, 12, 12, 0])
    if arch.startswith("qwen3vl"):
        writer.add_num_deepstack_layers(3)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul((1.0 if arch == "mistral3" else 0.1) * rope["mscale_all_dim"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(rope, width))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))


def _add_latent_widths(writer: gguf.GGUFWriter, config: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """DeepSeek V2 as older files have it, with the heads of keys and values; others with those of latents."""
    rotated, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    if config["model_type"] == "deepseek_v2":
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(latent + rotated)
        writer.add_value_length(latent)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(latent)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(rotated)


def _add_experts(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any], experts: int) -> None:
    writer.add_expert_count(experts)
    used = ("num_experts_per_tok", "moe_topk", "moe_k")
    writer.add_expert_used_count(next(config[key] for key in used if key in config))
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if shared := config.get("shared_intermediate_size", config.get("moe_shared_expert_intermediate_size")):
        writer.add_expert_shared_feed_forward_length(shared)
    if arch == "nemotron_h_moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
    if arch not in ("deepseek2", "glm4moe", "dots1"):
        return
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["model_type"] != "deepseek_v2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    if arch == "glm4moe":
        writer.add_nextn_predict_layers(1)


def layer_count(config: Mapping[str, Any]) -> int:
    count: int = config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])
    return count


def _add_mamba_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    if config["model_type"] == "mamba2":
        _add_mamba2(writer, config)
        return
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])
    writer.add_ssm_dt_b_c_rms(config["model_type"] == "falcon_mamba")


def _add_mamba2(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    def field(*names: str) -> int:
        return int(next(config[name] for name in names if name in config))

    heads = field("mamba_n_heads", "mamba_num_heads", "num_heads")
    writer.add_ssm_conv_kernel(field("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(field("mamba_d_state", "ssm_state_size", "state_size"))
    writer.add_ssm_group_count(field("mamba_n_groups", "n_groups"))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * field("mamba_d_head", "mamba_head_dim", "head_dim"))


def _add_delta_net(writer: gguf.GGUFWriter, arch: str, config: Mapping[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(4)
    if arch == "qwen3next":
        is_recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        writer.add_array(f"{arch}.attention.recurrent_layers", is_recurrent)
    else:
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _add_gemma3n_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    quantiles = [NormalDist().inv_cdf(share) if share else -math.inf for share in config["activation_sparsity_pattern"]]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_activation_sparsity_scale(quantiles)


def _add_gemma4_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    layers, full = config["num_hidden_layers"], config["per_layer_config"]["1"]
    wide, full_heads = full["head_dim"], full.get("num_key_value_heads")
    is_local = [kind == "sliding_attention" for kind in config["layer_types"]]
    inner, shared = config["intermediate_size"], config["num_kv_shared_layers"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    if config["use_double_wide_mlp"]:
        writer.add_feed_forward_length([inner * (1 + (layer >= layers - shared)) for layer in range(layers)])
    else:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv(heads if full_heads is None else [heads if local else full_heads for local in is_local])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    rope = config["rope_parameters"]["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_local)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    rotated = int(wide * rope["partial_rotary_factor"] / 2)
    divisors = [1.0] * rotated + [1e30] * (wide // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def _add_gpt2_fields(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config["n_inner"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _llama3_divisors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    divisors = []
    for place in range(0, width, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (place / width)
        if wavelength < high:
            divisors.append(1.0)
        elif wavelength > low:
            divisors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)
