"""Tiny random models of every causal architecture of transformers, in many variants, beside our engine.

`configs_of(model_type)` gives the variants, `verdict_on(name, config, directory)` serves one and compares its logits
with transformers'. A variant is equal, or refused with a reason; anything else is a fault of ours.
"""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.checkpoint.text_tower import MULTIMODAL_TYPES
from coatcheck.workers.model.lm_head import probe_head
from coatcheck.workers.model.meta_model import build_meta_model, choose_length, read_config
from coatcheck.workers.verification.comparison import NoReference, find_difference
from tests.workers.checkpoints import VOCAB, tiny_checkpoint

# Multimodal types are compared by tests/workers/model/test_text_towers.py.
MODEL_TYPES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in MULTIMODAL_TYPES)
LAYERS = 4
_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_LATENT: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, index_n_heads=4,
    index_head_dim=16, index_topk=8,
)  # fmt: skip

# Every config takes all of these: what a family does not know changes nothing of it.
_SHAPE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    vocab_size=VOCAB,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    is_decoder=True,
)

# What a family needs besides to be built, and to be small.
_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": dict(attn_layer_indices=[1, 3]),
    "granitemoehybrid": dict(layer_types=["linear_attention", "full_attention"] * (LAYERS // 2)),
    "ctrl": dict(n_positions=256),
    "codegen": dict(rotary_dim=8),
    "gptj": dict(rotary_dim=8),
    "dots3_note_text": dict(num_key_value_heads=4),
    "lfm2": dict(layer_types=["conv", "full_attention"] * (LAYERS // 2)),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * (LAYERS // 2)),
    "lfm3": dict(head_dim=16, sliding_window=16),
    "axk1": _LATENT | dict(num_key_value_heads=4, n_group=2, topk_group=1),
    "axk2": _LATENT,
    "bitnet": dict(hidden_act="relu2"),
    "cohere_compass_text": dict(rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in _MIXED}),
    "deepseek_v2": _LATENT | dict(num_key_value_heads=4, head_dim=8),
    "deepseek_v3": _LATENT | dict(num_key_value_heads=4, n_group=2, topk_group=1),
    "deepseek_v32": _LATENT | dict(num_key_value_heads=4, index_topk=64, n_group=2, topk_group=1),
    "dots1": dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=32),
    "gemma3_text": dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=16),
    "gemma3n_text": dict(
        head_dim=16, num_kv_shared_layers=0, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        laurel_rank=8, activation_sparsity_pattern=None, layer_types=_MIXED, sliding_window=16,
    ),
    "gemma4_text": dict(
        head_dim=16, global_head_dim=16, num_kv_shared_layers=0, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB, layer_types=_MIXED, sliding_window=16,
    ),
    "glm_moe_dsa": _LATENT | dict(num_key_value_heads=4, index_topk=64),
    "gpt_neo": dict(attention_types=[[["global", "local"], LAYERS // 2]], window_size=16),
    "gpt_oss": dict(head_dim=16),
    "helium": dict(head_dim=16),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16, moe_topk=2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "kimi_linear": _LATENT
    | dict(num_key_value_heads=4, layer_types=["linear_attention", "full_attention"] * (LAYERS // 2)),
    "glm4_moe_lite": _LATENT | dict(num_key_value_heads=4),
    "longcat_flash": _LATENT
    | dict(
        num_key_value_heads=4, num_layers=LAYERS, ffn_hidden_size=96, expert_ffn_hidden_size=32, zero_expert_num=2,
        head_dim=8,
    ),
    "mamba2": dict(num_heads=8, head_dim=16, state_size=16, n_groups=1),
    "minicpm3": _LATENT,
    "mimo_v2_flash": dict(head_dim=24, v_head_dim=16, sliding_window=16),
    "ministral": dict(head_dim=16),
    "qwen2_moe": dict(shared_expert_intermediate_size=32),
    "youtu": _LATENT | dict(num_key_value_heads=4),
    # Narrow, because the rounding of a random model of this type grows fast from token to token.
    "zamba2": dict(
        hidden_size=32, layers_block_type=["linear_attention", "hybrid"] * (LAYERS // 2), n_mamba_heads=4,
        num_key_value_heads=4, adapter_rank=4, time_step_min=1e-9, time_step_floor=1e-2,
    ),
    "zaya": dict(head_dim=16, num_experts_per_tok=1),
}  # fmt: skip

_ROPE: dict[str, dict[str, Any]] = {
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=64),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    "longrope": dict(
        short_factor=[1.0 + i / 10 for i in range(8)],
        long_factor=[1.0 + i for i in range(8)],
        original_max_position_embeddings=32,
    ),
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": dict(sliding_window=16, use_sliding_window=True, max_window_layers=2, window_size=16),
    "windows-everywhere": dict(sliding_window=16, use_sliding_window=True, layer_types=["sliding_attention"] * LAYERS),
    "windows-mixed": dict(sliding_window=16, use_sliding_window=True, layer_types=_MIXED),
    "no-window": dict(sliding_window=None, use_sliding_window=False, layer_types=["full_attention"] * LAYERS),
    "chunked": dict(attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"] * (LAYERS // 2)),
    "one-kv-head": dict(num_key_value_heads=1, multi_query=True),
    "all-kv-heads": dict(num_key_value_heads=4, multi_query=False),
    "wide-heads": dict(head_dim=32, global_head_dim=32),
    "tied": dict(tie_word_embeddings=True),
    "untied": dict(tie_word_embeddings=False),
    "biases": dict(
        attention_bias=True, mlp_bias=True, qkv_bias=True, use_bias=True, use_qkv_bias=True, bias=True,
        add_bias_linear=True, lm_head_bias=True,
    ),
    "no-biases": dict(
        attention_bias=False, mlp_bias=False, qkv_bias=False, use_bias=False, use_qkv_bias=False, bias=False,
        add_bias_linear=False, lm_head_bias=False,
    ),
    "softcaps": dict(attn_logit_softcapping=5.0, final_logit_softcapping=10.0, query_pre_attn_scalar=16),
    "scales": dict(
        embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2,
        logit_scale=0.5, scale_embedding=True, router_scaling_factor=0.7, routed_scaling_factor=1.5,
    ),
    "partial-rotary": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5), rotary_pct=0.5,
        rotary_dim=8,
    ),
    "norms": dict(
        qk_layernorm=True, use_qk_norm=True, qk_norm=True, layer_norm_type="rms_norm", norm_type="rms_norm",
        clip_qkv=1.0, apply_residual_connection_post_layernorm=True,
    ),
    "parallel": dict(use_parallel_residual=False, parallel_attn=False, new_decoder_architecture=True),
    "alibi": dict(alibi=True),
    "gelu": dict(hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", activation_function="relu"),
    "dense-first": dict(
        first_k_dense_replace=2, mlp_only_layers=[1], num_dense_layers=2, decoder_sparse_step=2,
        moe_layer_start_index=2, moe_layer_interval=2, interleave_moe_layer_step=2,
    ),
    "routing": dict(norm_topk_prob=True, n_group=2, topk_group=1, scoring_func="sigmoid", score_func="sigmoid"),
    "no-rope": dict(
        no_rope_layers=[1, 0] * (LAYERS // 2), no_rope_layer_interval=2, position_embedding_type="nope",
        attn_temperature_tuning=True, floor_scale=8, attn_scale=0.5,
    ),
    "gemma-experts": dict(enable_moe_block=True, top_k_experts=2),
    "kv-shared": dict(num_kv_shared_layers=2),
    "scaled-attention": dict(
        scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False, use_qk_scaling=True, attention_scale=0.5,
        mup_attn_scale=2.0, attention_value_scale=0.5,
    ),
    **{f"rope-{kind}": dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4) | _ROPE[kind]) for kind in _ROPE},
}  # fmt: skip

# Prompts of another seed where those of seed 0 meet a near tie of experts, which rounding decides. laguna/gelu: in
# layer 2 the second and the third expert of token 29 score within 3e-7 of each other.
_SEEDS = {"laguna/gelu": 1}

_LARGE = 10**8  # parameters of a family with parts that no setting makes small; its variants would take minutes


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one variant was served. `detail`: the refusal, the difference, or what was raised.

    "no reference": transformers builds the variant but cannot run it, so that there is nothing to compare with.
    """

    name: str
    outcome: Literal["equal", "refused", "no reference", "wrong", "crashed"]
    detail: str = ""


def documented_model_types() -> tuple[set[str], set[str], set[str]]:
    """The lists of docs/models.md: types of the parity tests, types that are served besides, and multimodal types."""
    lists = [paragraph for paragraph in _PAGE.read_text().split("\n\n") if re.fullmatch(r"(`[\w-]+`\s*)+", paragraph)]
    tested, others, multimodal = (set(re.findall(r"`([\w-]+)`", paragraph)) for paragraph in lists)
    return tested, others, multimodal


def config_of(model_type: str, **differences: Any) -> Any:
    """The config of a tiny model of that type; raises whatever transformers raises at one that cannot be."""
    settings = deepcopy(
        _SHAPE | _FAMILY.get(model_type, {}) | differences
    )  # some configs write into what they are given
    return CONFIG_MAPPING[model_type](**settings)


def configs_of(model_type: str) -> Iterator[tuple[str, Any]]:
    """(name, config) of all variants that say something of this family and that transformers builds."""
    seen: set[str] = set()
    try:
        known = config_of(model_type)
    except Exception:  # this type's config class refuses a config of this form
        try:
            known = CONFIG_MAPPING[model_type]()
        except Exception:  # gemma4_assistant: the class refuses its own defaults
            return
    for variant, differences in _VARIANTS.items():
        relevant = {key: value for key, value in differences.items() if key in known.to_dict()}
        try:
            config = config_of(model_type, **relevant)
            text = str(config)
            if text not in seen and _is_whole_decoder(config):
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
                if variant != "plain" and sum(p.numel() for p in model.parameters()) > _LARGE:
                    continue
        except Exception:  # transformers' own word on a combination that it does not have
            continue
        if text not in seen:
            seen.add(text)
            yield f"{model_type}/{variant}", config


def _is_whole_decoder(config: Any) -> bool:
    return config.get_text_config() is config and not config.is_encoder_decoder


def verdict_on(name: str, config: Any, directory: Path) -> Verdict:
    """Serves the config's random model in all cases of workers/verification, and compares with transformers."""
    try:
        config.save_pretrained(directory)
        if _is_whole_decoder(config):  # without weights, which a model refused may have gigabytes of
            served = read_config(directory)
            model = build_meta_model(served, torch.float32, torch.device("cpu"), choose_length(served, None))
            probe_attention(model)
            probe_head(model)
        else:
            read_config(directory)
        checkpoint = tiny_checkpoint(name.replace("/", "-"), directory, config=config)
        difference = find_difference(checkpoint, seed=_SEEDS.get(name, 0))
    except InvalidModel as refusal:
        return Verdict(name, "refused", str(refusal))
    except NoReference as reason:
        return Verdict(name, "no reference", str(reason))
    except Exception as error:
        return Verdict(name, "crashed", f"{type(error).__name__}: {error}")
    return Verdict(name, "equal") if difference is None else Verdict(name, "wrong", str(difference))
