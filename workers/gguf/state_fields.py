"""The fields of config.json of hybrids: most layers have a state, the others attention. Imports no torch."""

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.expert_fields import dense_layers_first
from coatcheck.workers.gguf.field_readers import Fields, gated_fields, head_width, rotary_share, size_fields
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
