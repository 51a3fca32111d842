"""FAMILIES: the names of tensors in GGUF, and what llama.cpp's converter changes in their values, by model family.

llama.cpp's converter renames tensors, stacks the experts of a layer, and changes values where its code computes
otherwise than transformers': it adds 1 to the norms of Gemma, and reorders the rows of llama's queries and keys. A
GgufFamily says how to undo that. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf import config_fields as fields
from coatcheck.workers.gguf.block_codes import Array
from coatcheck.workers.gguf.gguf_file import GgufFile

RowOrder = Callable[[GgufFile, int], Array]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A model family. `model_type`: transformers' name. `config`: returns the fields of its config.json.

    `names`: {name in GGUF: name in transformers}, without .weight and .bias, with {} for the layer; or both with their
    endings. Experts are stacked in GGUF and have a second {} in transformers.
    `plain`: names in GGUF of weights that are no linears, and so cannot stay quantised.
    `orders`: weights whose rows GGUF has in another order. A function returns, for the file and the number of rows,
    which row in GGUF each row in transformers is.
    `norm_offset`: added to norms in GGUF. `transposed`: weights that transformers stores as [in, out].
    """

    model_type: str
    config: Callable[[GgufFile], dict[str, Any]]
    names: Mapping[str, str]
    plain: frozenset[str] = frozenset(("token_embd",))
    orders: Mapping[str, RowOrder] = field(default_factory=dict)
    norm_offset: float = 0.0
    transposed: frozenset[str] = frozenset()


# Tensors with tables of rotary embeddings. config_fields.py reads them.
ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Weights that a rank holds as one. They stay quantised only if all are stored in the same way.
MERGED: Final = (
    ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"),
    ("blk.{}.ffn_gate", "blk.{}.ffn_up"),
    ("blk.{}.ffn_gate_shexp", "blk.{}.ffn_up_shexp"),
    ("blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps"),
)


def _rotary_pairs(heads_key: str) -> RowOrder:
    """GGUF's llama has the two rows of a rotary pair side by side, transformers has the second rows of all pairs of a
    head behind the first ones. `heads_key`: the metadata key of the number of heads."""

    def order(file: GgufFile, rows: int) -> Array:
        heads = file.count(heads_key, file.count("attention.head_count"))
        _check_division(file, rows, 2 * heads)
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    return order


def _falcon_groups(file: GgufFile, rows: int) -> Array:
    """GGUF has the queries of all heads, then the keys, then the values. transformers has them by key/value head."""
    heads = file.count("attention.head_count")
    kv_heads = file.count("attention.head_count_kv", 1)
    _check_division(file, rows, heads + 2 * kv_heads)
    _check_division(file, heads, kv_heads)
    by_head = np.arange(rows).reshape(heads + 2 * kv_heads, -1)
    queries = by_head[:heads].reshape(kv_heads, heads // kv_heads, -1)
    keys, values = (by_head[start : start + kv_heads, np.newaxis] for start in (heads, heads + kv_heads))
    return np.concatenate([queries, keys, values], axis=1).ravel()


def _check_division(file: GgufFile, count: int, parts: int) -> None:
    if parts < 1 or count % parts:
        raise InvalidModel(f"{file.path}: heads of attention do not divide {count} by {parts}; fetch it again")


_LLAMA_ORDERS: Final = {
    "attn_q": _rotary_pairs("attention.head_count"),
    "attn_k": _rotary_pairs("attention.head_count_kv"),
}


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
_LLAMA: Final = _ENDS | _ATTENTION | _GATED
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
_GPT2: Final = {
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
_GPT_OSS: Final = (
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
_LFM2: Final = {
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

_FALCON: Final = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_qkv": "transformer.h.{}.self_attention.query_key_value",
    "blk.{}.attn_output": "transformer.h.{}.self_attention.dense",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.dense_h_to_4h",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.dense_4h_to_h",
}
_FALCON_ORDERS: Final = {"attn_qkv": _falcon_groups}
# By whether layers have one norm, or one for attention and one for the MLP.
_FALCONS: Final = {
    False: GgufFamily(
        "falcon",
        fields.falcon,
        _FALCON | {"blk.{}.attn_norm": "transformer.h.{}.input_layernorm"},
        orders=_FALCON_ORDERS,
    ),
    True: GgufFamily(
        "falcon",
        fields.falcon,
        _FALCON | {"blk.{}.attn_norm_2": "transformer.h.{}.ln_attn", "blk.{}.attn_norm": "transformer.h.{}.ln_mlp"},
        orders=_FALCON_ORDERS,
    ),
}
_DENSE_LLAMA: Final = GgufFamily("llama", fields.llama, _LLAMA, orders=_LLAMA_ORDERS)
_MIXTURE_OF_LLAMA: Final = GgufFamily("mixtral", fields.mixtral, _ENDS | _ATTENTION | _MIXTRAL, orders=_LLAMA_ORDERS)

# By general.architecture.
FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": _DENSE_LLAMA,
    "granite": GgufFamily("granite", fields.granite, _LLAMA, orders=_LLAMA_ORDERS),
    "smollm3": GgufFamily("smollm3", fields.smollm3, _LLAMA, orders=_LLAMA_ORDERS),
    "qwen2": GgufFamily("qwen2", fields.qwen, _LLAMA),
    "qwen3": GgufFamily("qwen3", fields.qwen3, _LLAMA | _HEAD_NORMS),
    "qwen2moe": GgufFamily("qwen2_moe", fields.qwen2_moe, _ENDS | _ATTENTION | _EXPERTS | _SHARED_EXPERT),
    "qwen3moe": GgufFamily("qwen3_moe", fields.qwen3_moe, _ENDS | _ATTENTION | _EXPERTS | _HEAD_NORMS),
    "olmo2": GgufFamily(
        "olmo2",
        fields.olmo2,
        _LLAMA
        | _HEAD_NORMS
        | _layer(post_attention_norm="post_attention_layernorm", post_ffw_norm="post_feedforward_layernorm"),
    ),
    "phi3": GgufFamily(
        "phi3",
        fields.phi3,
        _ENDS | _ATTENTION | _layer(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", ffn_down="mlp.down_proj"),
    ),
    "gemma": GgufFamily("gemma", fields.gemma, _LLAMA, norm_offset=1.0),
    "gemma2": GgufFamily("gemma2", fields.gemma2, _LLAMA | _GEMMA_NORMS, norm_offset=1.0),
    "gemma3": GgufFamily("gemma3_text", fields.gemma3, _LLAMA | _GEMMA_NORMS | _HEAD_NORMS, norm_offset=1.0),
    "starcoder2": GgufFamily(
        "starcoder2", fields.starcoder2, _ENDS | _ATTENTION | _layer(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
    ),
    "stablelm": GgufFamily("stablelm", fields.stablelm, _LLAMA),
    "nemotron": GgufFamily("nemotron", fields.nemotron, _ENDS | _ATTENTION | _PLAIN_MLP, norm_offset=1.0),
    "gpt2": GgufFamily(
        "gpt2",
        fields.gpt2,
        _GPT2,
        plain=frozenset(("token_embd", "position_embd", "attn_qkv", "attn_output", "ffn_up", "ffn_down")),
        transposed=frozenset(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    ),
    "falcon": _FALCONS[False],
    "minimax-m2": GgufFamily(
        "minimax_m2",
        fields.minimax_m2,
        _ENDS
        | _ATTENTION
        | _HEAD_NORMS
        | _MIXTRAL
        | {"blk.{}.exp_probs_b.bias": "model.layers.{}.block_sparse_moe.e_score_correction_bias"},
    ),
    "gpt-oss": GgufFamily("gpt_oss", fields.gpt_oss, _GPT_OSS),
    "lfm2": GgufFamily("lfm2", fields.lfm2, _LFM2, plain=frozenset(("token_embd", "shortconv.conv"))),
}


def family_of(file: GgufFile) -> GgufFamily:
    """Raises InvalidModel for an architecture that is not served from GGUF."""
    if file.architecture == "llama" and file.count("expert_count", 0) > 0:
        return _MIXTURE_OF_LLAMA
    if file.architecture == "falcon":
        return _FALCONS["blk.0.attn_norm_2.weight" in file.tensors]
    if file.architecture not in FAMILIES:
        raise fields.refuse_architecture(file, FAMILIES)
    return FAMILIES[file.architecture]
