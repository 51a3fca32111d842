"""The fields of config.json from a GGUF file's metadata: one function for each model family. Imports no torch.

Metadata lacks some fields of the original config.json. Such a field gets the value that all published models of the
family have.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf.block_codes import dequantise
from coatcheck.workers.gguf.gguf_file import GgufFile

Fields = dict[str, Any]

# Llama 3's rotary scaling. Its factor differs from model to model, these are the same for all.
_LLAMA3: Final = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# The numbers of layers of the largest Gemma 2 and Gemma 3, which scale queries by hidden_size / heads.
_LARGEST_GEMMA: Final = {"gemma2": 46, "gemma3": 62}


def refuse_architecture(file: GgufFile, served: Iterable[str]) -> InvalidModel:
    """The error for an architecture that is not served from GGUF."""
    return InvalidModel(
        f"{file.path} has the architecture {file.architecture}, which is not served from GGUF; served are "
        f"{', '.join(sorted(served))}; serve the model's safetensors checkpoint instead"
    )


def llama(file: GgufFile) -> Fields:
    """Also Mistral's models, which have the same layers."""
    return _gated(file) | dict(
        head_dim=_head_dim(file),
        attention_bias=_has(file, "blk.0.attn_q.bias"),
        mlp_bias=_has(file, "blk.0.ffn_gate.bias"),
    )


def mixtral(file: GgufFile) -> Fields:
    return _gated(file) | dict(
        head_dim=_head_dim(file),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        sliding_window=None,
    )


def granite(file: GgufFile) -> Fields:
    return _gated(file) | dict(
        attention_bias=_has(file, "blk.0.attn_q.bias"),
        mlp_bias=_has(file, "blk.0.ffn_gate.bias"),
        attention_multiplier=file.number("attention.scale"),
        embedding_multiplier=file.number("embedding_scale"),
        residual_multiplier=file.number("residual_scale"),
        logits_scaling=file.number("logit_scale"),
    )


def smollm3(file: GgufFile) -> Fields:
    return _gated(file) | dict(no_rope_layer_interval=4, use_sliding_window=False)


def qwen(file: GgufFile) -> Fields:
    return _gated(file) | dict(use_sliding_window=False)


def qwen3(file: GgufFile) -> Fields:
    return qwen(file) | dict(head_dim=_head_dim(file), attention_bias=_has(file, "blk.0.attn_q.bias"))


def qwen2_moe(file: GgufFile) -> Fields:
    return _qwen_experts(file) | dict(
        norm_topk_prob=False,
        shared_expert_intermediate_size=file.tensor("blk.0.ffn_up_shexp.weight").shape[0],
        qkv_bias=_has(file, "blk.0.attn_q.bias"),
    )


def qwen3_moe(file: GgufFile) -> Fields:
    return _qwen_experts(file) | dict(head_dim=_head_dim(file), norm_topk_prob=True)


def _qwen_experts(file: GgufFile) -> Fields:
    return qwen(file) | dict(
        num_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        moe_intermediate_size=file.tensor("blk.0.ffn_up_exps.weight").shape[-2],
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def olmo2(file: GgufFile) -> Fields:
    return _gated(file)


def phi3(file: GgufFile) -> Fields:
    original = file.find("rope.scaling.original_context_length")
    window = file.count("attention.sliding_window", 0)
    fields = _gated(file) | dict(
        sliding_window=window if 0 < window < file.count("context_length") else None,
        original_max_position_embeddings=original or file.count("context_length"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = _rotary_share(file)
    if _has(file, "rope_factors_long.weight"):
        fields["rope_parameters"] |= dict(
            rope_type="longrope",
            long_factor=_values(file, "rope_factors_long.weight"),
            short_factor=_values(file, "rope_factors_short.weight"),
            original_max_position_embeddings=fields["original_max_position_embeddings"],
        )
    return fields


def gemma(file: GgufFile) -> Fields:
    return _gated(file) | dict(head_dim=_head_dim(file), hidden_activation="gelu_pytorch_tanh")


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
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention"
            for layer in range(file.count("block_count"))
        ],
    )
    fields["rope_parameters"] = {"full_attention": _rope(file, 1000000.0), "sliding_attention": local}
    return fields


def _query_scalar(file: GgufFile) -> int:
    if file.count("block_count") == _LARGEST_GEMMA[file.architecture]:
        return file.count("embedding_length") // file.count("attention.head_count")
    return _head_dim(file)


def starcoder2(file: GgufFile) -> Fields:
    return _sizes(file) | dict(
        norm_epsilon=file.number("attention.layer_norm_epsilon"),
        use_bias=_has(file, "blk.0.attn_q.bias"),
        sliding_window=file.count("attention.sliding_window", 4096),
        hidden_act="gelu_pytorch_tanh",
    )


def stablelm(file: GgufFile) -> Fields:
    if _has(file, "blk.0.attn_q_norm.weight"):
        raise InvalidModel(f"{file.path} has norms for each head of stablelm, which are not read from GGUF")
    fields = _sizes(file) | dict(
        layer_norm_eps=file.number("attention.layer_norm_epsilon"),
        use_qkv_bias=_has(file, "blk.0.attn_q.bias"),
        use_parallel_residual=not _has(file, "blk.0.ffn_norm.weight"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = _rotary_share(file)
    return fields


def nemotron(file: GgufFile) -> Fields:
    fields = _sizes(file) | dict(
        norm_eps=file.number("attention.layer_norm_epsilon"),
        head_dim=_width(file),
        attention_bias=_has(file, "blk.0.attn_q.bias"),
        mlp_bias=_has(file, "blk.0.ffn_up.bias"),
        hidden_act="relu2",
    )
    fields["rope_parameters"]["partial_rotary_factor"] = _rotary_share(file)
    return fields


def gpt2(file: GgufFile) -> Fields:
    return dict(
        vocab_size=_vocab_size(file),
        n_positions=file.count("context_length"),
        n_embd=file.count("embedding_length"),
        n_layer=file.count("block_count"),
        n_head=file.count("attention.head_count"),
        n_inner=file.count("feed_forward_length"),
        layer_norm_epsilon=file.number("attention.layer_norm_epsilon"),
        activation_function="gelu_new",
    )


def gpt_oss(file: GgufFile) -> Fields:
    fields = _sizes(file, inner=file.tensor("blk.0.ffn_up_exps.weight").shape[-2]) | dict(
        rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        head_dim=_width(file),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
        sliding_window=file.count("attention.sliding_window"),
        attention_bias=True,
    )
    if fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"] = dict(beta_fast=32.0, beta_slow=1.0, truncate=False) | fields["rope_parameters"]
    return fields


def falcon(file: GgufFile) -> Fields:
    """Falcon's models with rotary embeddings."""
    fields, kv_heads = _sizes(file), file.count("attention.head_count_kv", 1)
    has_two_norms = _has(file, "blk.0.attn_norm_2.weight")
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


def minimax_m2(file: GgufFile) -> Fields:
    fields = _sizes(file, inner=file.tensor("blk.0.ffn_up_exps.weight").shape[-2]) | dict(
        rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        head_dim=_width(file),
        num_local_experts=file.count("expert_count"),
        num_experts_per_tok=file.count("expert_used_count"),
    )
    fields["rope_parameters"]["partial_rotary_factor"] = _rotary_share(file)
    return fields


def lfm2(file: GgufFile) -> Fields:
    heads = file.find("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != file.count("block_count"):
        raise InvalidModel(f"{file.path} does not say which layers have attention (lfm2.attention.head_count_kv)")
    fields = _sizes(file, kv_heads=max(heads)) | dict(
        norm_eps=file.number("attention.layer_norm_rms_epsilon"),
        block_auto_adjust_ff_dim=False,
        conv_L_cache=file.count("shortconv.l_cache"),
        conv_bias=any(name.endswith("shortconv.conv.bias") for name in file.tensors),
        layer_types=["full_attention" if count else "conv" for count in heads],
    )
    fields["block_ff_dim"] = fields["intermediate_size"]
    return fields


def _gated(file: GgufFile) -> Fields:
    """The fields of decoders with RMS norms."""
    return _sizes(file) | dict(rms_norm_eps=file.number("attention.layer_norm_rms_epsilon"))


def _sizes(file: GgufFile, *, inner: int | None = None, kv_heads: int | None = None) -> Fields:
    heads = file.count("attention.head_count")
    return dict(
        vocab_size=_vocab_size(file),
        hidden_size=file.count("embedding_length"),
        intermediate_size=file.count("feed_forward_length") if inner is None else inner,
        num_hidden_layers=file.count("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=file.count("attention.head_count_kv", heads) if kv_heads is None else kv_heads,
        max_position_embeddings=file.count("context_length"),
        rope_parameters=_rope(file, 10000.0),
    )


def _vocab_size(file: GgufFile) -> int:
    return file.tensor("token_embd.weight").shape[0]


def _has(file: GgufFile, tensor: str) -> bool:
    return tensor in file.tensors


def _width(file: GgufFile) -> int:
    """The width of a head by `attention.key_length`, whose default is hidden_size / heads."""
    return file.count("attention.key_length", file.count("embedding_length") // file.count("attention.head_count"))


def _head_dim(file: GgufFile) -> int:
    """As `_width`, for families that rotate whole heads. Raises InvalidModel for one that does not."""
    width = _width(file)
    if (rotated := file.count("rope.dimension_count", width)) != width:
        raise InvalidModel(
            f"{file.path} rotates {rotated} of the {width} elements of a head, which {file.architecture} does not do"
        )
    return width


def _rotary_share(file: GgufFile) -> float:
    width = _width(file)
    return file.count("rope.dimension_count", width) / width


def _values(file: GgufFile, tensor: str) -> list[float]:
    found = file.tensor(tensor)
    return [float(value) for value in dequantise(found.type, found.read_rows()).ravel()]


def _rope(file: GgufFile, theta: float) -> Fields:
    """rope_parameters. `theta`: the base of files that have none."""
    fields: Fields = dict(rope_type="default", rope_theta=float(file.number("rope.freq_base", theta)))
    if _has(file, "rope_freqs.weight"):
        return fields | _scaled_frequencies(file)
    kind = file.find("rope.scaling.type")
    factor = file.number("rope.scaling.factor", 1.0)
    if kind == "linear" and factor != 1:
        return fields | dict(rope_type="linear", factor=float(factor))
    if kind == "yarn":
        fields |= dict(rope_type="yarn", factor=float(factor))
        optional = {
            "original_max_position_embeddings": file.find("rope.scaling.original_context_length"),
            "beta_fast": file.find("rope.scaling.yarn_beta_fast"),
            "beta_slow": file.find("rope.scaling.yarn_beta_slow"),
        }
        return fields | {name: value for name, value in optional.items() if value is not None}
    if kind in (None, "none", "linear", "longrope"):  # longrope: its factors are tensors
        return fields
    raise InvalidModel(f"{file.path} scales rotary embeddings by {kind!r}, which is not read; served are linear, yarn")


def _scaled_frequencies(file: GgufFile) -> Fields:
    """The fields for `rope_freqs`, by which the frequencies are divided: those of Llama 3 if they give these divisors,
    else the divisors themselves."""
    divisors = np.array(_values(file, "rope_freqs.weight"))
    factor = float(round(divisors.max(), 3))
    theta, original = file.number("rope.freq_base", 10000.0), _LLAMA3["original_max_position_embeddings"]
    wavelengths = 2 * np.pi * theta ** (np.arange(len(divisors)) / len(divisors))
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((original / wavelengths - low) / (high - low), 0, 1)  # how much of a frequency is not scaled
    if np.allclose(1 / ((1 - share) / factor + share), divisors, rtol=1e-5):
        return dict(rope_type="llama3", factor=factor, **_LLAMA3)
    listed = divisors.tolist()
    length = file.count("context_length")
    return dict(
        rope_type="longrope", factor=1.0, attention_factor=1.0, original_max_position_embeddings=length,
        short_factor=listed, long_factor=listed,
    )  # fmt: skip
