"""The fields of config.json of dense models and Gemma 4, from a GGUF file's metadata: one function for each family.

Metadata lacks some fields of the original config.json. Such a field gets the value that all published models of the
family have. Imports no torch.
"""

from statistics import NormalDist
from typing import Final

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.field_readers import (
    Fields,
    gated_fields,
    has_tensor,
    head_width,
    rope_fields,
    rotary_share,
    rotated_head_width,
    size_fields,
    tensor_values,
    vocab_size,
)
from coatcheck.workers.gguf.gguf_file import GgufFile

# The numbers of layers of the largest Gemma 2 and Gemma 3, which scale queries by hidden_size / heads.
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}


def llama(file: GgufFile) -> Fields:
    """Also Mistral's models, which have the same layers."""
    return gated_fields(file) | dict(
        head_dim=rotated_head_width(file),
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        mlp_bias=has_tensor(file, "blk.0.ffn_gate.bias"),
    )


def mistral(file: GgufFile) -> Fields:
    return llama(file) | dict(sliding_window=None)


def ministral3(file: GgufFile) -> Fields:
    """Queries grow with the logarithm of their position, as in Llama 4."""
    fields = llama(file)
    scale = float(file.number("rope.scaling.yarn_log_multiplier"))
    fields["rope_parameters"] |= dict(
        mscale=scale, mscale_all_dim=scale, llama_4_scaling_beta=float(file.number("attention.temperature_scale"))
    )
    return fields


def arcee(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(
        head_dim=rotated_head_width(file),
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        mlp_bias=has_tensor(file, "blk.0.ffn_up.bias"),
    )


def granite(file: GgufFile) -> Fields:
    return (
        gated_fields(file)
        | dict(
            attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
            mlp_bias=has_tensor(file, "blk.0.ffn_gate.bias"),
        )
        | granite_scales(file)
    )


def granite_scales(file: GgufFile) -> Fields:
    return dict(
        attention_multiplier=file.number("attention.scale"),
        embedding_multiplier=file.number("embedding_scale"),
        residual_multiplier=file.number("residual_scale"),
        logits_scaling=file.number("logit_scale"),
    )


def smollm3(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(no_rope_layer_interval=4, use_sliding_window=False)


def qwen(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(use_sliding_window=False)


def qwen3(file: GgufFile) -> Fields:
    return qwen(file) | dict(head_dim=rotated_head_width(file), attention_bias=has_tensor(file, "blk.0.attn_q.bias"))


def olmo2(file: GgufFile) -> Fields:
    return gated_fields(file)


def olmo(file: GgufFile) -> Fields:
    """Its norms have no weights, and no epsilon in config.json."""
    if has_tensor(file, "blk.0.attn_q.bias"):
        raise InvalidModel(f"{file.path} has biases in the attention of olmo, which are not read from GGUF")
    return size_fields(file) | dict(clip_qkv=file.find("attention.clamp_kqv"))


def phi2(file: GgufFile) -> Fields:
    if has_tensor(file, "blk.0.attn_qkv.weight"):
        raise InvalidModel(
            f"{file.path} has q, k and v of phi2 as one tensor, which is not read from GGUF; use a file that a newer "
            "llama.cpp has converted"
        )
    fields = size_fields(file) | dict(layer_norm_eps=file.number("attention.layer_norm_epsilon"), hidden_act="gelu_new")
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def gpt_neox(file: GgufFile) -> Fields:
    fields = size_fields(file) | dict(
        layer_norm_eps=file.number("attention.layer_norm_epsilon"),
        use_parallel_residual=file.find("use_parallel_residual") is not False,
        attention_bias=has_tensor(file, "blk.0.attn_qkv.bias"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def phi3(file: GgufFile) -> Fields:
    original = file.find("rope.scaling.original_context_length")
    window = file.count("attention.sliding_window", 0)
    fields = gated_fields(file) | dict(
        sliding_window=window if 0 < window < file.count("context_length") else None,
        original_max_position_embeddings=original or file.count("context_length"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    if has_tensor(file, "rope_factors_long.weight"):
        fields["rope_parameters"] |= dict(
            rope_type="longrope",
            long_factor=tensor_values(file, "rope_factors_long.weight"),
            short_factor=tensor_values(file, "rope_factors_short.weight"),
            original_max_position_embeddings=fields["original_max_position_embeddings"],
        )
    return fields


def gemma(file: GgufFile, *, inner: int | None = None) -> Fields:
    """`inner`: as of gated_fields."""
    return gated_fields(file, inner=inner) | dict(
        head_dim=rotated_head_width(file), hidden_activation="gelu_pytorch_tanh"
    )


def gemma2(file: GgufFile) -> Fields:
    return gemma(file) | dict(
        sliding_window=file.count("attention.sliding_window", 4096),
        attn_logit_softcapping=file.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=file.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_query_scalar(file),
    )


def gemma3(file: GgufFile) -> Fields:
    local = dict(rope_type="default", rope_theta=file.number("rope.freq_base_swa", 10000.0))
    fields = gemma(file) | dict(
        sliding_window=file.count("attention.sliding_window", 1024),
        query_pre_attn_scalar=_query_scalar(file),
        layer_types=[
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(file.num_layers)
        ],
    )
    fields["rope_parameters"] = {"full_attention": rope_fields(file, 1000000.0), "sliding_attention": local}
    return fields


def gemma3n(file: GgufFile) -> Fields:
    """Metadata has the quantile of the normal distribution for each share of activations that are zeroed."""
    scales = file.find("activation_sparsity_scale")
    if not isinstance(scales, list) or len(scales) != file.num_layers:
        raise InvalidModel(f"{file.path} has no gemma3n.activation_sparsity_scale for each layer; fetch it again")
    fields = gemma(file, inner=_by_layer(file, "feed_forward_length")[0]) | dict(
        sliding_window=file.count("attention.sliding_window", 512),
        layer_types=["sliding_attention" if local else "full_attention" for local in _is_local(file)],
        final_logit_softcapping=file.number("final_logit_softcapping", 30.0),
        num_kv_shared_layers=file.count("attention.shared_kv_layers", 0),
        hidden_size_per_layer_input=file.count("embedding_length_per_layer_input"),
        vocab_size_per_layer_input=file.tensor("per_layer_token_embd.weight").shape[0],
        laurel_rank=file.tensor("blk.0.laurel_l.weight").shape[0],
        altup_num_inputs=file.count("altup.num_inputs"),
        altup_active_idx=file.count("altup.active_idx"),
        activation_sparsity_pattern=[round(NormalDist().cdf(scale), 4) for scale in scales],
    )
    local = dict(rope_type="default", rope_theta=file.number("rope.freq_base_swa", 10000.0))
    fields["rope_parameters"] = {"full_attention": rope_fields(file, 1000000.0), "sliding_attention": local}
    return fields


def gemma3n_kinds(file: GgufFile) -> list[str]:
    """For each layer: "own", or "shared" if it reads the keys and values of an earlier layer."""
    last = file.num_layers - file.count("attention.shared_kv_layers", 0)
    return ["own" if layer < last else "shared" for layer in range(file.num_layers)]


def _query_scalar(file: GgufFile) -> int:
    if file.num_layers == _LARGEST_GEMMA[file.architecture]:
        return file.count("embedding_length") // file.count("attention.head_count")
    return rotated_head_width(file)


def gemma4(file: GgufFile) -> Fields:
    """Layers with a window and layers with full attention have heads of different widths. The last `shared_kv_layers`
    layers read the keys and values of earlier layers."""
    kinds, is_local = gemma4_kinds(file), _is_local(file)
    heads, inner = _by_layer(file, "attention.head_count_kv"), _by_layer(file, "feed_forward_length")
    last = file.num_layers - file.count("attention.shared_kv_layers", 0)
    full = [layer for layer, kind in enumerate(kinds) if kind == "full"]
    has_equal_values = any(not has_tensor(file, f"blk.{layer}.attn_v.weight") for layer in full)
    fields = gated_fields(file, inner=inner[0]) | dict(
        num_key_value_heads=heads[is_local.index(True)],
        head_dim=file.count("attention.key_length_swa"),
        global_head_dim=file.count("attention.key_length"),
        num_global_key_value_heads=heads[is_local.index(False)] if has_equal_values else None,
        attention_k_eq_v=has_equal_values,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=file.count("attention.sliding_window"),
        layer_types=["sliding_attention" if local else "full_attention" for local in is_local],
        final_logit_softcapping=file.find("final_logit_softcapping"),
        num_kv_shared_layers=file.num_layers - last,
        use_double_wide_mlp=inner[-1] > inner[0],
        hidden_size_per_layer_input=file.count("embedding_length_per_layer_input", 0),
        enable_moe_block=file.count("expert_count", 0) > 0,
    )
    if has_tensor(file, "per_layer_token_embd.weight"):
        fields["vocab_size_per_layer_input"] = file.tensor("per_layer_token_embd.weight").shape[0]
    if fields["enable_moe_block"]:
        fields |= dict(
            num_experts=file.count("expert_count"),
            top_k_experts=file.count("expert_used_count"),
            moe_intermediate_size=file.count("expert_feed_forward_length"),
        )
    divisors = tensor_values(file, "rope_freqs.weight")  # 1 for rotated pairs, 1e30 for others
    fields["rope_parameters"] = {
        "full_attention": dict(
            rope_type="proportional",
            rope_theta=float(file.number("rope.freq_base", 1000000.0)),
            partial_rotary_factor=sum(divisor == 1 for divisor in divisors) / len(divisors),
        ),
        "sliding_attention": dict(rope_type="default", rope_theta=float(file.number("rope.freq_base_swa", 10000.0))),
    }
    return fields


def gemma4_kinds(file: GgufFile) -> list[str]:
    """For each layer: "local" or "full", or "shared" if it reads the keys and values of an earlier layer."""
    last = file.num_layers - file.count("attention.shared_kv_layers", 0)
    return ["shared" if layer >= last else "local" if local else "full" for layer, local in enumerate(_is_local(file))]


def _is_local(file: GgufFile) -> list[bool]:
    """Whether each layer has a window."""
    listed = file.find("attention.sliding_window_pattern")
    if not isinstance(listed, list) or len(listed) != file.num_layers or len(set(map(bool, listed))) != 2:
        raise InvalidModel(
            f"{file.path} does not say which layers have a window "
            f"({file.architecture}.attention.sliding_window_pattern); fetch it again"
        )
    return [bool(local) for local in listed]


def _by_layer(file: GgufFile, key: str) -> list[int]:
    """The value of `key` for each layer. Metadata may have a list, or one number for all layers."""
    value = file.find(key)
    if not isinstance(value, list):
        return [file.count(key)] * file.num_layers
    if len(value) != file.num_layers:
        raise InvalidModel(
            f"{file.path} has {len(value)} numbers in {file.architecture}.{key}, for {file.num_layers} layers; "
            "fetch it again"
        )
    return [int(one) for one in value]


def starcoder2(file: GgufFile) -> Fields:
    return size_fields(file) | dict(
        norm_epsilon=file.number("attention.layer_norm_epsilon"),
        use_bias=has_tensor(file, "blk.0.attn_q.bias"),
        sliding_window=file.count("attention.sliding_window", 4096),
        hidden_act="gelu_pytorch_tanh",
    )


def stablelm(file: GgufFile) -> Fields:
    if has_tensor(file, "blk.0.attn_q_norm.weight"):
        raise InvalidModel(f"{file.path} has norms for each head of stablelm, which are not read from GGUF")
    fields = size_fields(file) | dict(
        layer_norm_eps=file.number("attention.layer_norm_epsilon"),
        use_qkv_bias=has_tensor(file, "blk.0.attn_q.bias"),
        use_parallel_residual=not has_tensor(file, "blk.0.ffn_norm.weight"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def nemotron(file: GgufFile) -> Fields:
    fields = size_fields(file) | dict(
        norm_eps=file.number("attention.layer_norm_epsilon"),
        head_dim=head_width(file),
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        mlp_bias=has_tensor(file, "blk.0.ffn_up.bias"),
        hidden_act="relu2",
    )
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def gpt2(file: GgufFile) -> Fields:
    return dict(
        vocab_size=vocab_size(file),
        n_positions=file.count("context_length"),
        n_embd=file.count("embedding_length"),
        n_layer=file.num_layers,
        n_head=file.count("attention.head_count"),
        n_inner=file.count("feed_forward_length"),
        layer_norm_epsilon=file.number("attention.layer_norm_epsilon"),
        activation_function="gelu_new",
    )


def falcon(file: GgufFile) -> Fields:
    """Falcon's models with rotary embeddings."""
    fields, kv_heads = size_fields(file), file.count("attention.head_count_kv", 1)
    has_two_norms = has_tensor(file, "blk.0.attn_norm_2.weight")
    is_new = has_two_norms or kv_heads > 1
    return fields | dict(
        num_kv_heads=kv_heads,
        ffn_hidden_size=file.tensor("blk.0.ffn_up.weight").shape[0],
        layer_norm_epsilon=file.number("attention.layer_norm_epsilon"),
        new_decoder_architecture=is_new,
        num_ln_in_parallel_attn=None if not is_new else 2 if has_two_norms else 1,
        multi_query=kv_heads == 1,
        parallel_attn=True,
        bias=False,
        alibi=False,
    )


def glm4(file: GgufFile) -> Fields:
    fields = gated_fields(file) | dict(head_dim=head_width(file), attention_bias=has_tensor(file, "blk.0.attn_q.bias"))
    fields["rope_parameters"]["partial_rotary_factor"] = rotary_share(file)
    return fields


def exaone4(file: GgufFile) -> Fields:
    """Without a list in the file, every fourth layer of a model with a window attends to all tokens."""
    window, layers = file.count("attention.sliding_window", 0), range(file.num_layers)
    if isinstance(file.find("attention.sliding_window_pattern"), list):
        is_local = _is_local(file)
    else:
        is_local = [window > 0 and (layer + 1) % 4 != 0 for layer in layers]
    return gated_fields(file) | dict(
        head_dim=rotated_head_width(file),
        sliding_window=window or None,
        sliding_window_pattern=4 if window else None,
        layer_types=["sliding_attention" if is_local[layer] else "full_attention" for layer in layers],
    )


def ernie4_5(file: GgufFile) -> Fields:
    return gated_fields(file) | dict(head_dim=rotated_head_width(file), use_bias=has_tensor(file, "blk.0.attn_q.bias"))


def seed_oss(file: GgufFile) -> Fields:
    return llama(file) | dict(attention_out_bias=has_tensor(file, "blk.0.attn_output.bias"))


def cohere(file: GgufFile) -> Fields:
    return size_fields(file) | dict(
        layer_norm_eps=file.number("attention.layer_norm_epsilon"),
        logit_scale=file.number("logit_scale"),
        attention_bias=has_tensor(file, "blk.0.attn_q.bias"),
        use_qk_norm=has_tensor(file, "blk.0.attn_q_norm.weight"),
    )


def cohere2(file: GgufFile) -> Fields:
    """Every fourth layer attends to all tokens."""
    fields = cohere(file) | dict(
        head_dim=rotated_head_width(file),
        sliding_window=file.count("attention.sliding_window"),
        layer_types=[
            "full_attention" if (layer + 1) % 4 == 0 else "sliding_attention" for layer in range(file.num_layers)
        ],
    )
    del fields["use_qk_norm"]
    return fields
