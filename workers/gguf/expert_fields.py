"""The fields of config.json of mixtures of experts, one function for each family. Imports no torch."""

from typing import Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.config_fields import granite_scales, qwen
from coatcheck.workers.gguf.field_readers import (
    Fields,
    gated_fields,
    has_tensor,
    head_width,
    rotary_share,
    rotated_head_width,
    size_fields,
)
from coatcheck.workers.gguf.gguf_file import GgufFile

# (groups of experts, groups of which a token uses experts) of DeepSeek V2 and V3 by their number of experts, for files
# that were written before llama.cpp stored them. Other families have as many experts without groups: GLM-4.5 has 160.
_DEEPSEEK_GROUPS: Final = {160: (8, 3), 256: (8, 4)}


def mixtral(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(
        head_dim=rotated_head_width(file),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        sliding_window=None,
    )


def qwen2_moe(file: GgufFile) -> Fields:
    return _qwen_experts(file) | dict(
        norm_topk_prob=False,
        shared_expert_intermediate_size=file.tensor("blk.0.ffn_up_shexp.weight").shape[0],
        qkv_bias=has_tensor(file, "blk.0.attn_q.bias"),
    )


def qwen3_moe(file: GgufFile) -> Fields:
    return _qwen_experts(file) | dict(head_dim=rotated_head_width(file), norm_topk_prob=True)


def _qwen_experts(file: GgufFile) -> Fields:
    return qwen(file) | dict(
        num_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        moe_intermediate_size=file.tensor("blk.0.ffn_up_exps.weight").shape[-2],
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def granite_moe(file: GgufFile) -> Fields:
    """`shared_intermediate_size`: only if the file has shared experts."""
    up = file.tensor("blk.0.ffn_up_exps.weight")
    fields = gated_fields(file, inner=up.shape[-2]) | granite_scales(file) | dict(
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
    )  # fmt: skip
    if has_tensor(file, "blk.0.ffn_up_shexp.weight"):
        fields["shared_intermediate_size"] = file.tensor("blk.0.ffn_up_shexp.weight").shape[0]
    return fields


def gpt_oss(file: GgufFile) -> Fields:
    fields = size_fields(file, inner=file.tensor("blk.0.ffn_up_exps.weight").shape[-2]) | dict(
        rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        head_dim=head_width(file),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        sliding_window=file.count("attention.sliding_window"),
        attention_bias=True,
    )
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"] = dict(beta_fast=32.0, beta_slow=1.0, truncate=False) | fields["rope_parameters"]
    return fields


def minimax_m2(file: GgufFile) -> Fields:
    fields = size_fields(file, inner=file.tensor("blk.0.ffn_up_exps.weight").shape[-2]) | dict(
        rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        head_dim=head_width(file),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def olmoe(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(
        num_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        norm_topk_prob=False,
    )


def hunyuan_moe(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(
        intermediate_size=file.tensor("blk.0.ffn_up_exps.weight").shape[-2],
        head_dim=rotated_head_width(file),
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        num_experts=file.count("expert_count"),
        moe_topk=file.count("expert_used_count"),
    )


def ernie4_5_moe(file: GgufFile) -> Fields:
    kinds = ernie4_5_moe_kinds(file)
    if "experts" not in kinds:
        raise InvalidModel(f"{file.path} has no layer with experts; fetch it again")
    first = kinds.index("experts")
    up = file.tensor(f"blk.{first}.ffn_up_exps.weight")
    shared = file.tensors.get(f"blk.{first}.ffn_up_shexp.weight")
    return gated_fields(file) | dict(
        head_dim=rotated_head_width(file),
        use_bias=has_tensor(file, "blk.0.attn_q.bias"),
        moe_num_experts=file.count("expert_count"),
        moe_k=file.count("expert_used_count"),
        moe_layer_start_index=file.count("leading_dense_block_count", 0),
        moe_layer_end_index=file.num_layers - 1,
        moe_layer_interval=_expert_interval(file),
        moe_intermediate_size=up.shape[-2],
        moe_num_shared_experts=0 if shared is None else shared.rows // up.shape[-2],
    )


def ernie4_5_moe_kinds(file: GgufFile) -> list[str]:
    """As `dense_layers_first`, but behind the first layers only the last one of each interval has experts."""
    interval = _expert_interval(file)
    return [kind if (layer + 1) % interval == 0 else "dense" for layer, kind in enumerate(dense_layers_first(file))]


def _expert_interval(file: GgufFile) -> int:
    interval = file.count("interleave_moe_layer_step", 1)
    if interval < 1:
        raise InvalidModel(
            f"{file.path} has {file.architecture}.interleave_moe_layer_step {interval}; it should be at least 1"
        )
    return interval


def dense_layers_first(file: GgufFile) -> list[str]:
    """ "dense" or "experts" for each layer: the first `leading_dense_block_count` layers are dense."""
    dense = file.count("leading_dense_block_count", 0)
    return ["dense" if layer < dense else "experts" for layer in range(file.num_layers)]


def glm4_moe(file: GgufFile) -> Fields:
    fields = (
        gated_fields(file)
        | _routed_experts(file)
        | dict(
            head_dim=head_width(file),
            attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
            use_qk_norm=has_tensor(file, "blk.0.attn_q_norm.weight"),
        )
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def dots1(file: GgufFile) -> Fields:
    return gated_fields(file) | _routed_experts(file) | dict(
        head_dim=rotated_head_width(file),
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        sliding_window=None,
    )  # fmt: skip


def _routed_experts(file: GgufFile) -> Fields:
    """The fields of routed and shared experts, as DeepSeek and GLM name them."""
    if file.count("expert_count", 0) == 0:
        raise InvalidModel(f"{file.path} has no experts, which all {file.architecture} models that are served have")
    experts = file.count("expert_count")
    groups, used = _DEEPSEEK_GROUPS.get(experts, (1, 1)) if file.architecture == "deepseek2" else (1, 1)
    groups, used = file.count("expert_group_count", groups), file.count("expert_group_used_count", used)
    return dict(
        n_routed_experts=experts,
        num_experts_per_tok=file.count("expert_used_count"),
        n_shared_experts=file.count("expert_shared_count", 0),
        moe_intermediate_size=file.count("expert_feed_forward_length"),
        first_k_dense_replace=file.count("leading_dense_block_count", 0),
        routed_scaling_factor=float(file.number("expert_weights_scale", 1.0)),
        norm_topk_prob=bool(file.find("expert_weights_norm")),
        n_group=groups,
        topk_group=used,
    )


def deepseek_v3(file: GgufFile) -> Fields:
    return _latent_attention(file) | _routed_experts(file)


def deepseek_v2(file: GgufFile) -> Fields:
    experts = _routed_experts(file)
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return _latent_attention(file) | experts | dict(topk_method=method)


def _latent_attention(file: GgufFile) -> Fields:
    """The fields of DeepSeek's attention. Older files have the widths of keys and values as `key_length` and
    `value_length`. Newer files have those of latents there, and the others as `key_length_mla` and `value_length_mla`.
    """
    rotated = file.count("rope.dimension_count")
    key = file.count("attention.key_length_mla", file.count("attention.key_length"))
    value = file.count("attention.value_length_mla", file.count("attention.value_length"))
    fields = gated_fields(file) | dict(
        num_key_value_heads=file.count("attention.head_count"),
        q_lora_rank=file.count("attention.q_lora_rank") if has_tensor(file, "blk.0.attn_q_a.weight") else None,
        kv_lora_rank=file.count("attention.kv_lora_rank"),
        qk_rope_head_dim=rotated,
        qk_nope_head_dim=key - rotated,
        v_head_dim=value,
        attention_bias=has_tensor(file, "blk.0.attn_q_a.bias"),
    )
    if fields["rope_parameters"]["rope_type"] == "yarn":
        # llama.cpp stores a tenth of mscale_all_dim, which equals mscale in all published models.
        scale = round(10 * file.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        fields["rope_parameters"] |= dict(mscale=scale, mscale_all_dim=scale) if scale else {}
    return fields
