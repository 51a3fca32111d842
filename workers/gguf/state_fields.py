"""The fields of config.json of hybrids: most layers have a state, the others attention. Imports no torch."""

from typing import Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.config_fields import granite_scales
from coatcheck.workers.gguf.expert_fields import dense_layers_first
from coatcheck.workers.gguf.field_readers import (
    Fields,
    gated_fields,
    has_tensor,
    head_width,
    rotary_share,
    rotated_head_width,
    size_fields,
    vocab_size,
)
from coatcheck.workers.gguf.gguf_file import GgufFile


def lfm2(file: GgufFile) -> Fields:
    fields = _short_convolutions(file)
    return fields | dict(block_auto_adjust_ff_dim=False, block_ff_dim=fields["intermediate_size"])


def lfm2_moe(file: GgufFile) -> Fields:
    return _short_convolutions(file) | dict(
        num_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        moe_intermediate_size=file.count("expert_feed_forward_length"),
        num_dense_layers=file.count("leading_dense_block_count", 0),
        use_expert_bias=any(name.endswith("exp_probs_b.bias") for name in file.tensors),
        norm_topk_prob=True,
    )


def _short_convolutions(file: GgufFile) -> Fields:
    return size_fields(file) | dict(
        norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        conv_L_cache=file.count("shortconv.l_cache"),
        conv_bias=any(name.endswith("shortconv.conv.bias") for name in file.tensors),
        layer_types=["full_attention" if count else "conv" for count in _heads_by_layer(file)],
    )


def lfm2_kinds(file: GgufFile) -> list[str]:
    """ "attention" or "state" for each layer."""
    return ["attention" if count else "state" for count in _heads_by_layer(file)]


def lfm2_moe_kinds(file: GgufFile) -> list[str]:
    """As `lfm2_kinds`, with " dense" or " experts" behind it."""
    return [" ".join(kinds) for kinds in zip(lfm2_kinds(file), dense_layers_first(file), strict=True)]


def _heads_by_layer(file: GgufFile) -> list[int]:
    """The number of key/value heads of each layer; 0 for one with a state."""
    heads = file.find("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != file.num_layers:
        raise InvalidModel(
            f"{file.path} does not say which layers have attention ({file.architecture}.attention.head_count_kv)"
        )
    return heads


def qwen35(file: GgufFile) -> Fields:
    return _delta_net(file) | dict(intermediate_size=file.count("feed_forward_length"))


def _delta_net(file: GgufFile) -> Fields:
    value_heads = file.count("ssm.time_step_rank")
    fields = gated_fields(file, inner=file.count("feed_forward_length", 0)) | dict(
        head_dim=head_width(file),
        attention_bias=any(name.endswith("attn_k.bias") for name in file.tensors),
        linear_conv_kernel_dim=file.count("ssm.conv_kernel"),
        linear_key_head_dim=file.count("ssm.state_size"),
        linear_value_head_dim=file.count("ssm.inner_size") // value_heads,
        linear_num_key_heads=file.count("ssm.group_count"),
        linear_num_value_heads=value_heads,
        layer_types=["full_attention" if kind == "attention" else "linear_attention" for kind in qwen35_kinds(file)],
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def qwen35_kinds(file: GgufFile) -> list[str]:
    """ "attention" or "state" for each layer."""
    listed = file.find("attention.recurrent_layers")
    if isinstance(listed, list) and len(listed) >= file.num_layers:
        return ["state" if has_state else "attention" for has_state in listed[: file.num_layers]]
    step = file.count("full_attention_interval", 4)
    return ["attention" if (layer + 1) % step == 0 else "state" for layer in range(file.num_layers)]


def qwen35_moe(file: GgufFile) -> Fields:
    fields = _delta_net(file) | dict(
        num_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        moe_intermediate_size=file.count("expert_feed_forward_length"),
        shared_expert_intermediate_size=file.tensor("blk.0.ffn_up_shexp.weight").shape[0],
    )
    del fields["intermediate_size"]
    return fields


def qwen3_next(file: GgufFile) -> Fields:
    return qwen35_moe(file) | dict(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])


def granite_hybrid(file: GgufFile) -> Fields:
    """Files whose layers all have attention are of `granite` or `granitemoe`."""
    shared = next((name for leaf in ("ffn_up_shexp", "ffn_up") if (name := f"blk.0.{leaf}.weight") in file.tensors), "")
    width = file.tensor(shared or "blk.0.ffn_up.weight").shape[0]
    experts = file.count("expert_count", 0)
    inner = file.tensor("blk.0.ffn_up_exps.weight").shape[-2] if experts else width
    return gated_fields(file, inner=inner) | granite_scales(file) | _mamba2(file) | dict(
        mamba_expand=file.count("ssm.inner_size") // file.count("embedding_length"),
        attention_bias=any(name.endswith("attn_q.bias") for name in file.tensors),
        num_local_experts=experts,
        num_experts_per_tok=file.count("expert_used_count", 0),
        shared_intermediate_size=width,
        position_embedding_type="rope" if file.find("rope.scaling.finetuned") else "nope",
        layer_types=["full_attention" if count else "linear_attention" for count in _heads_by_layer(file)],
    )  # fmt: skip


def granite_hybrid_kinds(file: GgufFile) -> list[str]:
    """As `lfm2_kinds`, with " dense" or " experts" behind it, which is the same for all layers."""
    mlp = "experts" if file.count("expert_count", 0) else "dense"
    return [f"{mixer} {mlp}" for mixer in lfm2_kinds(file)]


def _mamba2(file: GgufFile) -> Fields:
    heads = file.count("ssm.time_step_rank")
    return dict(
        mamba_n_heads=heads,
        mamba_d_head=file.count("ssm.inner_size") // heads,
        mamba_n_groups=file.count("ssm.group_count"),
        mamba_d_state=file.count("ssm.state_size"),
        mamba_d_conv=file.count("ssm.conv_kernel"),
        mamba_conv_bias=any(name.endswith("ssm_conv1d.bias") for name in file.tensors),
        mamba_proj_bias=any(name.endswith("ssm_in.bias") for name in file.tensors),
    )


def falcon_h1(file: GgufFile) -> Fields:
    """llama.cpp's converter multiplies the weights with the multipliers of config.json, so these are 1 here."""
    return gated_fields(file) | _mamba2(file) | dict(
        head_dim=rotated_head_width(file),
        mamba_d_ssm=file.count("ssm.inner_size"),
        mamba_rms_norm=has_tensor(file, "blk.0.ssm_norm.weight"),
        mamba_norm_before_gate=False,
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        mlp_bias=has_tensor(file, "blk.0.ffn_gate.bias"),
        projectors_bias=has_tensor(file, "blk.0.ssm_out.bias"),
    )  # fmt: skip


def mamba2(file: GgufFile) -> Fields:
    sizes = _mamba2(file)
    return _backbone(file) | dict(
        num_heads=sizes["mamba_n_heads"],
        head_dim=sizes["mamba_d_head"],
        n_groups=sizes["mamba_n_groups"],
        use_bias=sizes["mamba_proj_bias"],
    )


def mamba(file: GgufFile) -> Fields:
    return _backbone(file) | dict(
        intermediate_size=file.count("ssm.inner_size"),
        time_step_rank=file.count("ssm.time_step_rank"),
        use_bias=has_tensor(file, "blk.0.ssm_in.bias"),
    )


def _backbone(file: GgufFile) -> Fields:
    return dict(
        vocab_size=vocab_size(file),
        hidden_size=file.count("embedding_length"),
        num_hidden_layers=file.num_layers,
        layer_norm_epsilon=file.number("attention.layer_norm_rms_epsilon"),
        state_size=file.count("ssm.state_size"),
        conv_kernel=file.count("ssm.conv_kernel"),
        expand=file.count("ssm.inner_size") // file.count("embedding_length"),
        use_conv_bias=has_tensor(file, "blk.0.ssm_conv1d.bias"),
    )


_EPSILON: Final = "attention.layer_norm_rms_epsilon"
_NEMOTRON_H_TYPES: Final = {
    "state": "linear_attention", "attention": "full_attention", "dense": "mlp", "experts": "moe",
}  # fmt: skip


def nemotron_h(file: GgufFile) -> Fields:
    """With the fields of experts only if layers have them. Converters differ in `feed_forward_length`, so the width of
    the MLPs is read from a tensor."""
    kinds, sizes = nemotron_h_kinds(file), _mamba2(file)
    dense = kinds.index("dense") if "dense" in kinds else -1
    inner = file.tensor(f"blk.{dense}.ffn_up.weight").shape[0] if dense >= 0 else file.count("embedding_length")
    fields = size_fields(file, inner=inner) | dict(
        layer_norm_epsilon=file.number(_EPSILON if file.find(_EPSILON) is not None else "attention.layer_norm_epsilon"),
        head_dim=head_width(file),
        layers_block_type=[_NEMOTRON_H_TYPES[kind] for kind in kinds],
        mamba_num_heads=sizes["mamba_n_heads"],
        mamba_head_dim=sizes["mamba_d_head"],
        n_groups=sizes["mamba_n_groups"],
        ssm_state_size=sizes["mamba_d_state"],
        conv_kernel=sizes["mamba_d_conv"],
        use_conv_bias=sizes["mamba_conv_bias"],
        mamba_proj_bias=sizes["mamba_proj_bias"],
        attention_bias=any(name.endswith("attn_q.bias") for name in file.tensors),
        mlp_bias=any(name.endswith("ffn_up.bias") for name in file.tensors),
    )
    del fields["rope_parameters"]
    if "experts" in kinds:
        shared = file.tensor(f"blk.{kinds.index('experts')}.ffn_up_shexp.weight")
        latent = file.count("moe_latent_size", 0)
        fields |= dict(
            n_routed_experts=file.count("expert_count"),
            num_experts_per_tok=file.count("expert_used_count"),
            n_shared_experts=file.count("expert_shared_count", 1),
            moe_intermediate_size=file.count("expert_feed_forward_length"),
            moe_shared_expert_intermediate_size=shared.shape[0],
            moe_latent_size=latent or None,
            routed_scaling_factor=float(file.number("expert_weights_scale", 1.0)),
            norm_topk_prob=bool(file.find("expert_weights_norm")),
            n_group=file.count("expert_group_count", 1),
            topk_group=file.count("expert_group_used_count", 1),
        )
    return fields


def nemotron_h_kinds(file: GgufFile) -> list[str]:
    """ "state", "attention", "dense" or "experts" for each layer, by the tensors that it has."""
    marks = {"ssm_in": "state", "attn_q": "attention", "ffn_gate_inp": "experts", "ffn_up": "dense"}
    kinds = []
    for layer in range(file.num_layers):
        kind = next((kind for leaf, kind in marks.items() if f"blk.{layer}.{leaf}.weight" in file.tensors), None)
        if kind is None:
            raise InvalidModel(f"{file.path} has no mixer in layer {layer}; fetch it again")
        kinds.append(kind)
    return kinds
