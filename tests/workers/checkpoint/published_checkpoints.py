"""Tiny checkpoints with the config.json, tensors and shards of published models.

The configs have the fields of the published ones, in the form of the release that wrote them, with small sizes.
"""

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from coatcheck.workers.verification.random_model import write_random_checkpoint
from tests.workers.quantised_checkpoints import Quantise, Weights, awq, fp8_blocks, mxfp4_experts, packed_int4

VOCAB = 640
_DEEPSEEK: dict[str, Any] = dict(
    architectures=["DeepseekV3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    auto_map={
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    aux_loss_alpha=0.001, bos_token_id=0, eos_token_id=1, ep_size=1, first_k_dense_replace=1, hidden_act="silu",
    hidden_size=64, initializer_range=0.02, intermediate_size=96, kv_lora_rank=32, max_position_embeddings=512,
    model_type="deepseek_v3", moe_intermediate_size=64, moe_layer_freq=1, n_group=2, n_routed_experts=8,
    n_shared_experts=1, norm_topk_prob=True, num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=3,
    num_key_value_heads=4, num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=32, qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    quantization_config={"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                         "weight_block_size": [16, 40]},
    rms_norm_eps=1e-6,
    rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 8, "mscale": 1.0, "mscale_all_dim": 1.0,
                  "original_max_position_embeddings": 64, "type": "yarn"},
    rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False,
    topk_group=1, topk_method="noaux_tc", torch_dtype="bfloat16", transformers_version="4.33.1", use_cache=True,
    v_head_dim=16, vocab_size=VOCAB,
)  # fmt: skip
_QWEN: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=0,
    decoder_sparse_step=1, eos_token_id=1, head_dim=32, hidden_act="silu", hidden_size=64, initializer_range=0.02,
    intermediate_size=96, max_position_embeddings=512, max_window_layers=3, mlp_only_layers=[],
    model_type="qwen3_moe", moe_intermediate_size=32, norm_topk_prob=True, num_attention_heads=4, num_experts=8,
    num_experts_per_tok=2, num_hidden_layers=3, num_key_value_heads=2, output_router_logits=False, rms_norm_eps=1e-6,
    rope_scaling=None, rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None,
    tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.51.0", use_cache=True,
    use_sliding_window=False, vocab_size=VOCAB,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "DeepSeek-R1": _DEEPSEEK,
    "Kimi-K2-Instruct": {**_DEEPSEEK, "model_type": "kimi_k2", "n_group": 1, "num_nextn_predict_layers": 0,
                         "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1},
    "Kimi-K2-Thinking": {**_DEEPSEEK, "model_type": "kimi_k2", "n_group": 1, "num_nextn_predict_layers": 0,
                         "rope_theta": 50000.0, "topk_group": 1,
                         "quantization_config": {
                             "quant_method": "compressed-tensors", "format": "pack-quantized",
                             "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
                             "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                                 "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                                 "symmetric": True}}}}},
    "Qwen3-235B-A22B-FP8": {**_QWEN, "quantization_config": {
        "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 40]}},
    "Qwen3-30B-A3B-AWQ": {**_QWEN, "quantization_config": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "group_size": 32, "modules_to_not_convert": ["gate"],
        "quant_method": "awq", "version": "gemm", "zero_point": True}},
    "GLM-4.5": dict(
        architectures=["Glm4MoeForCausalLM"], attention_bias=True, attention_dropout=0.0, pad_token_id=0,
        eos_token_id=[1, 2, 3], head_dim=16, hidden_act="silu", hidden_size=64, partial_rotary_factor=0.5,
        initializer_range=0.02, intermediate_size=96, max_position_embeddings=512, model_type="glm4_moe",
        moe_intermediate_size=32, norm_topk_prob=True, num_attention_heads=6, n_group=1, topk_group=1,
        n_routed_experts=8, n_shared_experts=1, routed_scaling_factor=2.5, num_experts_per_tok=2,
        first_k_dense_replace=1, num_hidden_layers=3, num_key_value_heads=2, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=1000000, num_nextn_predict_layers=1, tie_word_embeddings=False, torch_dtype="bfloat16",
        transformers_version="4.54.0", use_cache=True, use_qk_norm=True, vocab_size=VOCAB,
    ),
    "GLM-4.7-Flash": dict(
        architectures=["Glm4MoeLiteForCausalLM"], attention_bias=False, attention_dropout=0.0, pad_token_id=0,
        eos_token_id=[1, 2, 3], hidden_act="silu", hidden_size=64, intermediate_size=96, max_position_embeddings=512,
        model_type="glm4_moe_lite", moe_intermediate_size=32, topk_method="noaux_tc", norm_topk_prob=True,
        num_attention_heads=5, n_group=1, topk_group=1, n_routed_experts=8, n_shared_experts=1,
        routed_scaling_factor=1.8, num_experts_per_tok=2, first_k_dense_replace=1, num_hidden_layers=3,
        num_key_value_heads=5, num_nextn_predict_layers=1, partial_rotary_factor=1.0, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=1000000, tie_word_embeddings=False, dtype="bfloat16", q_lora_rank=48,
        kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=32, vocab_size=VOCAB,
    ),
    "LongCat-Flash-Chat-FP8": dict(
        architectures=["LongcatFlashForCausalLM"], attention_bias=False, attention_method="MLA", bos_token_id=1,
        eos_token_id=2, hidden_size=96, ffn_hidden_size=128, expert_ffn_hidden_size=32, num_layers=2,
        num_attention_heads=4, kv_lora_rank=32, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, head_dim=8,
        v_head_dim=16, mla_scale_kv_lora=True, mla_scale_q_lora=True, max_position_embeddings=512,
        model_type="longcat_flash", moe_topk=4, n_routed_experts=8, zero_expert_num=4, zero_expert_type="identity",
        rms_norm_eps=1e-5, rope_theta=10000000.0, routed_scaling_factor=6.0, router_bias=False,
        tie_word_embeddings=False,
        torch_dtype="bfloat16", use_cache=True, vocab_size=VOCAB,
        quantization_config={"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                             "weight_block_size": [16, 40]},
    ),
    "MiMo-V2-Flash": dict(
        architectures=["MiMoV2FlashForCausalLM"], add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True,
        attention_bias=False, attention_chunk_size=16, attention_dropout=0.0, attention_value_scale=0.707, head_dim=24,
        hidden_act="silu", hidden_size=64, hybrid_layer_pattern=[0, 1, 1, 1, 1, 0], intermediate_size=96,
        layernorm_epsilon=1e-5, max_position_embeddings=512, model_type="mimo_v2_flash", moe_intermediate_size=32,
        moe_layer_freq=[0, 1, 1, 1, 1, 1], n_group=1, n_routed_experts=8, n_shared_experts=None, norm_topk_prob=True,
        num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=6, num_key_value_heads=1,
        partial_rotary_factor=0.334, rope_theta=5000000, routed_scaling_factor=None, scoring_func="sigmoid",
        sliding_window=16, sliding_window_size=16, swa_head_dim=24, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, swa_rope_theta=10000, swa_v_head_dim=16, tie_word_embeddings=False, topk_group=1,
        topk_method="noaux_tc", torch_dtype="bfloat16", use_cache=True, v_head_dim=16, vocab_size=VOCAB,
        quantization_config={"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                             "ignored_layers": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(6)],
                             "weight_block_size": [16, 40]},
    ),
    "LFM2-8B-A1B": dict(
        architectures=["Lfm2MoeForCausalLM"], bos_token_id=1, conv_L_cache=3, conv_bias=False, dtype="bfloat16",
        eos_token_id=2, hidden_size=64, initializer_range=0.02, intermediate_size=96,
        layer_types=["conv", "conv", "full_attention", "conv"], max_position_embeddings=512, model_type="lfm2_moe",
        moe_intermediate_size=32, norm_eps=1e-5, norm_topk_prob=True, num_attention_heads=4, num_dense_layers=2,
        num_experts=8, num_experts_per_tok=2, num_hidden_layers=4, num_key_value_heads=2, pad_token_id=0,
        rope_theta=1000000.0, routed_scaling_factor=1.0, transformers_version="4.57.0.dev0", use_cache=True,
        use_expert_bias=True, vocab_size=VOCAB,
    ),
    "NVIDIA-Nemotron-3-Super-120B-A12B": dict(
        architectures=["NemotronHForCausalLM"], attention_bias=False, attention_dropout=0.0,
        auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, bos_token_id=1, chunk_size=16,
        conv_kernel=4, eos_token_id=2, expand=2, head_dim=16, hidden_dropout=0.0, hidden_size=64,
        hybrid_override_pattern="MEM-M*EM", initializer_range=0.02, intermediate_size=48, layer_norm_epsilon=1e-5,
        mamba_head_dim=16, mamba_hidden_act="silu", mamba_num_heads=8, mamba_proj_bias=False,
        mamba_ssm_cache_dtype="float32", max_position_embeddings=512, mlp_bias=False, mlp_hidden_act="relu2",
        model_type="nemotron_h", moe_intermediate_size=48, moe_latent_size=32, moe_shared_expert_intermediate_size=96,
        mtp_hybrid_override_pattern="*E", n_group=1, n_groups=2, n_routed_experts=8, n_shared_experts=1, norm_eps=1e-5,
        norm_topk_prob=True, num_attention_heads=4, num_experts_per_tok=2, num_hidden_layers=8, num_key_value_heads=2,
        num_logits_to_keep=1, num_nextn_predict_layers=1, pad_token_id=0, partial_rotary_factor=1.0,
        rescale_prenorm_residual=True, residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=5.0,
        sliding_window=None, ssm_state_size=32, tie_word_embeddings=False, time_step_floor=0.0001,
        time_step_limit=[0.0, math.inf], time_step_max=0.1, time_step_min=0.001, topk_group=1, torch_dtype="bfloat16",
        transformers_version="4.57.1", use_bias=False, use_cache=True, use_conv_bias=True, use_mamba_kernels=True,
        vocab_size=VOCAB,
    ),
    "Qwen3-Next-80B-A3B": dict(
        architectures=["Qwen3NextForCausalLM"], attention_dropout=0.0, bos_token_id=0, decoder_sparse_step=1,
        eos_token_id=1, full_attention_interval=4, head_dim=32, hidden_act="silu", hidden_size=64,
        initializer_range=0.02, intermediate_size=96, linear_conv_kernel_dim=4, linear_key_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=16, max_position_embeddings=512,
        mlp_only_layers=[], model_type="qwen3_next", moe_intermediate_size=32, norm_topk_prob=True,
        num_attention_heads=4, num_experts=8, num_experts_per_tok=2, num_hidden_layers=4, num_key_value_heads=2,
        output_router_logits=False, partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=10000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=32,
        tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.57.0.dev0", use_cache=True,
        use_sliding_window=False, vocab_size=VOCAB,
    ),
    "gpt-oss-20b": dict(
        architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=2,
        experts_per_token=2, head_dim=16, hidden_act="silu", hidden_size=64, initial_context_length=64,
        initializer_range=0.02, intermediate_size=64, layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=2048, model_type="gpt_oss", num_attention_heads=8, num_experts_per_tok=2,
        num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, output_router_logits=False, pad_token_id=0,
        quantization_config={
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                       "lm_head"],
            "quant_method": "mxfp4"},
        rms_norm_eps=1e-5,
        rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 64,
                      "rope_type": "yarn", "truncate": False},
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=16, swiglu_limit=7.0, tie_word_embeddings=False,
        transformers_version="4.55.0.dev0", use_cache=True, vocab_size=VOCAB,
    ),
}  # fmt: skip


def write_published(name: str, directory: Path) -> tuple[Path, Path]:
    """(the checkpoint, one that transformers reads with the weights that its codes stand for, in float32)"""
    config, path, plain = CONFIGS[name], directory / name, directory / f"{name}-plain"
    known = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    fields = {
        key: value for key, value in config.items() if key not in ("auto_map", "quantization_config", "torch_dtype")
    }
    write_random_checkpoint(CONFIG_MAPPING[known].from_dict(fields | {"model_type": known}), plain, seed=len(name))
    stored, exact = _quantise(name, load_file(plain / "model.safetensors"))
    save_file(
        {key: tensor.contiguous() for key, tensor in exact.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    if "zero_expert_num" in config:  # transformers stores some weights of experts that have none
        named = re.compile(r"\.experts\.(\d+)\.")
        stored = {
            key: tensor
            for key, tensor in stored.items()
            if (found := named.search(key)) is None or int(found[1]) < config["n_routed_experts"]
        }
        stored["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(64, 128)
    if config["model_type"] in ("nemotron_h", "qwen3_next"):  # layers for multi-token prediction
        stored["mtp.layers.0.eh_proj.weight"] = torch.zeros(64, 128)
    elif config.get("num_nextn_predict_layers"):
        last = config["num_hidden_layers"]
        stored |= {
            key.replace(f".{last - 1}.", f".{last}.", 1): tensor.clone()
            for key, tensor in stored.items()
            if key.startswith(f"model.layers.{last - 1}.")
        }
        stored[f"model.layers.{last}.eh_proj.weight"] = torch.zeros(64, 128)
        stored |= {f"model.layers.{last}.{norm}.weight": torch.ones(64) for norm in ("enorm", "hnorm")}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    keys = sorted(stored)
    index: dict[str, str] = {}
    for shard in range(2):
        file = f"model-{shard + 1:05}-of-000002.safetensors"
        save_file({key: stored[key].contiguous() for key in keys[shard::2]}, path / file, {"format": "pt"})
        index |= dict.fromkeys(keys[shard::2], file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path, plain


def _quantise(name: str, weights: Weights) -> tuple[Weights, Weights]:
    """(the stored tensors, the weights that they stand for)"""
    if name == "gpt-oss-20b":
        stored, exact = dict(weights), dict(weights)
        for key in [key for key in weights if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            blocks, scales, exact[key] = mxfp4_experts(stored.pop(key))
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        return stored, exact
    quantise = _METHODS.get(name)
    if quantise is None:
        return weights, weights
    stored, exact = {}, {}
    for key, tensor in weights.items():
        if ".layers." in key and key.endswith(("_proj.weight", "_proj_with_mqa.weight")) and _is_quantised(name, key):
            parts, exact[key] = quantise(tensor.float())
            stored |= {f"{key.removesuffix('.weight')}.{leaf}": part for leaf, part in parts.items()}
        else:
            stored[key] = exact[key] = tensor
    return stored, exact


def _is_quantised(name: str, key: str) -> bool:
    if name == "MiMo-V2-Flash":
        return not key.endswith("o_proj.weight")
    return name != "Kimi-K2-Thinking" or ".experts." in key


_METHODS: dict[str, Quantise] = {
    "DeepSeek-R1": fp8_blocks(16, 40),
    "Kimi-K2-Instruct": fp8_blocks(16, 40),
    "Kimi-K2-Thinking": packed_int4(32),
    "LongCat-Flash-Chat-FP8": fp8_blocks(16, 40),
    "MiMo-V2-Flash": fp8_blocks(16, 40),
    "Qwen3-235B-A22B-FP8": fp8_blocks(16, 40),
    "Qwen3-30B-A3B-AWQ": awq(4, 32),
}


def write_tiktoken(directory: Path) -> list[bytes]:
    """Kimi's tokenizer files, with 384 tokens and 256 special ones. Returns the bytes of the tokens by rank."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [
        "the",
        "and",
        " the",
        " and",
        "ing",
        " quick",
        "12",
        "123",
        "你好",
        "'s",
        " é",
        "\n\n",
        "...",
        "fox",
        " fox",
    ]
    for word in words:
        data = word.encode()
        for stop in range(2, len(data) + 1):
            if data[:stop] not in tokens:
                tokens.append(data[:stop])
    tokens += [b"zz" + bytes([97 + place % 26, 97 + place // 26]) for place in range(384 - len(tokens))]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    special = {384: "[BOS]", 385: "[EOS]", 386: "<|im_end|>", 387: "<|im_user|>", 388: "<|im_assistant|>"}
    settings = {
        "added_tokens_decoder": {str(place): {"content": text, "special": True} for place, text in special.items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer",
        "chat_template": "{% for m in messages %}<|im_user|>{{ m.content }}<|im_end|>{% endfor %}<|im_assistant|>",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokens
