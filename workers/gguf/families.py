"""FAMILIES: the names of tensors in GGUF, and what llama.cpp's converter changes in their values, by model family.

llama.cpp's converter renames tensors, stacks the experts of a layer, and changes values where its code computes
otherwise than transformers': it adds 1 to the norms of Gemma, and reorders the rows of llama's queries and keys. A
GgufFamily says how to undo that. Imports no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.gguf import config_fields as fields
from coatcheck.workers.gguf import expert_fields, row_orders, state_fields
from coatcheck.workers.gguf import tensor_names as names
from coatcheck.workers.gguf.block_codes import Array
from coatcheck.workers.gguf.gguf_file import GgufFile
from coatcheck.workers.gguf.row_orders import Joined, RowOrder

Change = Callable[[Array], Array]


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """The tensors that only one kind of layer has, by their names in the layer with endings.

    `required`: every such layer has them. `optional`: they exist in some models. `unused`: files may have them, and no
    code reads them.
    """

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    def __or__(self, other: "LayerTensors") -> "LayerTensors":
        """Of a layer that is of both kinds."""
        return LayerTensors(self.required | other.required, self.optional | other.optional, self.unused | other.unused)


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A model family. `model_type`: transformers' name. `config`: returns the fields of its config.json.

    `names`: see tensor_names.py.
    `plain`: names in GGUF of weights that are no linears, and so cannot stay quantised.
    `orders`, `column_orders`: weights whose rows, or columns, GGUF has in another order.
    `changes`: {name in a layer, with its ending: function of GGUF's values in float32 that returns transformers'}.
    `joined`: weights that GGUF has as several tensors.
    `transposed`: weights that transformers stores as [in, out].
    `kinds`: for a family whose layers differ, returns the kind of each layer. `kind_tensors`: by kind.
    """

    model_type: str
    config: Callable[[GgufFile], dict[str, Any]]
    names: Mapping[str, str]
    plain: frozenset[str] = frozenset(("token_embd",))
    orders: Mapping[str, RowOrder] = field(default_factory=dict)
    column_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    joined: tuple[Joined, ...] = ()
    transposed: frozenset[str] = frozenset()
    kinds: Callable[[GgufFile], Sequence[str]] | None = None
    kind_tensors: Mapping[str, LayerTensors] = field(default_factory=dict)

    def joined_with(self, leaf: str) -> Joined | None:
        """The weight of which the tensor `leaf` is a part; None if it is a weight of its own."""
        return next((joined for joined in self.joined if leaf in joined.leaves), None)


# Tensors with tables of rotary embeddings. field_readers.py reads them.
ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Weights that a rank holds as one. They stay quantised only if all are stored in the same way.
MERGED: Final = (
    ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"),
    ("blk.{}.attn_q_a", "blk.{}.attn_kv_a_mqa"),
    ("blk.{}.attn_qkv", "blk.{}.attn_gate", "blk.{}.ssm_beta", "blk.{}.ssm_alpha", "blk.{}.ssm_ba"),
    ("blk.{}.ffn_gate", "blk.{}.ffn_up"),
    ("blk.{}.ffn_gate_shexp", "blk.{}.ffn_up_shexp"),
    ("blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps"),
)


def _subtract_one(values: Array) -> Array:
    return values - np.float32(1)


def _log_of_negative(values: Array) -> Array:
    """GGUF's -exp(A_log) as A_log."""
    logarithms: Array = np.log(-values)
    return logarithms


def _weights(*leaves: str) -> frozenset[str]:
    return frozenset(f"{leaf}.weight" for leaf in leaves)


_NORMS_WITH_ONE: Final[Mapping[str, Change]] = dict.fromkeys(
    (
        "attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight", "ffn_norm.weight",
        "post_ffw_norm.weight", "output_norm.weight",
    ),
    _subtract_one,
)  # fmt: skip
_ATTENTION_TENSORS: Final = LayerTensors(
    _weights("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm")
)
_DENSE_OR_EXPERTS: Final = {
    "dense": LayerTensors(_weights("ffn_gate", "ffn_up", "ffn_down")),
    "experts": LayerTensors(
        _weights("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        _weights("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp") | {"exp_probs_b.bias"},
    ),
}
_SHORT_CONVOLUTION: Final = LayerTensors(
    _weights("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"),
    frozenset(("shortconv.conv.bias", "shortconv.in_proj.bias", "shortconv.out_proj.bias")),
)
_DELTA_NET: Final[dict[str, Any]] = dict(
    plain=frozenset(("token_embd", "ssm_conv1d")),
    orders=row_orders.DELTA_NET_ORDERS,
    column_orders=row_orders.DELTA_NET_COLUMNS,
    changes={**_NORMS_WITH_ONE, "ssm_a": _log_of_negative},
    kinds=state_fields.qwen35_kinds,
    kind_tensors={
        "attention": _ATTENTION_TENSORS,
        "state": LayerTensors(
            _weights("attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", "ssm_conv1d", "ssm_norm", "ssm_out")
            | {"ssm_a", "ssm_dt.bias"}
        ),
    },
)
_LATENT: Final[dict[str, Any]] = dict(kinds=expert_fields.dense_layers_first, kind_tensors=_DENSE_OR_EXPERTS)
_MIXERS: Final = {
    "attention": LayerTensors(_weights("attn_q", "attn_k", "attn_v", "attn_output")),
    "state": LayerTensors(
        _weights("ssm_in", "ssm_conv1d", "ssm_norm", "ssm_out") | {"ssm_a", "ssm_d", "ssm_dt.bias"},
        frozenset(("ssm_conv1d.bias", "ssm_in.bias", "ssm_out.bias")),
    ),
}
_MAMBA2: Final[dict[str, Any]] = dict(
    plain=frozenset(("token_embd", "ssm_conv1d", "ffn_gate_inp")), changes={"ssm_a": _log_of_negative}
)
_NEMOTRON_H: Final = GgufFamily(
    "nemotron_h",
    state_fields.nemotron_h,
    names.NEMOTRON_H,
    orders=row_orders.LLAMA_ORDERS,
    kinds=state_fields.nemotron_h_kinds,
    kind_tensors=_MIXERS | {
        "dense": LayerTensors(_weights("ffn_up", "ffn_down")),
        "experts": LayerTensors(
            _weights("ffn_gate_inp", "ffn_up_exps", "ffn_down_exps", "ffn_up_shexp", "ffn_down_shexp"),
            _weights("ffn_latent_down", "ffn_latent_up") | {"exp_probs_b.bias"},
        ),
    },
    **_MAMBA2,
)  # fmt: skip
# By whether dt, B and C are normed, as in Falcon Mamba.
_MAMBAS: Final = {
    has_norms: GgufFamily(
        "falcon_mamba" if has_norms else "mamba",
        state_fields.mamba,
        names.MAMBA,
        plain=frozenset(("token_embd", "ssm_conv1d", "ssm_x", "ssm_dt")),
        changes={"ssm_a": _log_of_negative},
    )
    for has_norms in (False, True)
}
# By whether the projections to q, k, v and z are one tensor, as in files of the first months.
_QWEN3_NEXTS: Final = {
    is_one: GgufFamily(
        "qwen3_next",
        state_fields.qwen3_next,
        names.QWEN3_NEXT,
        plain=frozenset(("token_embd", "ssm_conv1d")),
        changes={**_NORMS_WITH_ONE, "ssm_a": _log_of_negative},
        joined=(row_orders.QKV_AND_Z,),
        kinds=state_fields.qwen35_kinds,
        kind_tensors={
            "attention": _ATTENTION_TENSORS,
            "state": LayerTensors(
                _weights(*qkvz, "ssm_ba", "ssm_conv1d", "ssm_norm", "ssm_out") | {"ssm_a", "ssm_dt.bias"}
            ),
        },
    )
    for is_one, qkvz in ((True, ("ssm_in",)), (False, ("attn_qkv", "attn_gate")))
}
# By whether there are shared experts.
_GRANITE_MOES: Final = {
    has_shared: GgufFamily(
        "granitemoeshared" if has_shared else "granitemoe",
        expert_fields.granite_moe,
        names.GRANITE_MOE,
        orders=row_orders.LLAMA_ORDERS,
        joined=(row_orders.EXPERTS_GATE_AND_UP, row_orders.SHARED_GATE_AND_UP),
    )
    for has_shared in (False, True)
}

# By whether layers have one norm, or one for attention and one for the MLP.
_FALCONS: Final = {
    has_two: GgufFamily("falcon", fields.falcon, names.FALCON | norms, orders=row_orders.FALCON_ORDERS)
    for has_two, norms in (
        (False, {"blk.{}.attn_norm": "transformer.h.{}.input_layernorm"}),
        (True, {"blk.{}.attn_norm_2": "transformer.h.{}.ln_attn", "blk.{}.attn_norm": "transformer.h.{}.ln_mlp"}),
    )
}
# By whether queries are scaled by their position.
_MISTRAL3S: Final = {
    False: GgufFamily("mistral", fields.mistral, names.LLAMA, orders=row_orders.LLAMA_ORDERS),
    True: GgufFamily("ministral3", fields.ministral3, names.LLAMA, orders=row_orders.LLAMA_ORDERS),
}
# By whether the router has a bias on its scores.
_DEEPSEEKS: Final = {
    False: GgufFamily("deepseek_v2", expert_fields.deepseek_v2, names.DEEPSEEK, **_LATENT),
    True: GgufFamily("deepseek_v3", expert_fields.deepseek_v3, names.DEEPSEEK, **_LATENT),
}
_MIXTURE_OF_LLAMA: Final = GgufFamily(
    "mixtral", expert_fields.mixtral, names.MIXTURE_OF_LLAMA, orders=row_orders.LLAMA_ORDERS
)

# By general.architecture.
FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "llama": GgufFamily("llama", fields.llama, names.LLAMA, orders=row_orders.LLAMA_ORDERS),
    "granite": GgufFamily("granite", fields.granite, names.LLAMA, orders=row_orders.LLAMA_ORDERS),
    "granitemoe": _GRANITE_MOES[False],
    "granitehybrid": GgufFamily(
        "granitemoehybrid",
        state_fields.granite_hybrid,
        names.GRANITE_HYBRID,
        orders=row_orders.LLAMA_ORDERS,
        joined=(row_orders.EXPERTS_GATE_AND_UP, row_orders.SHARED_GATE_AND_UP, row_orders.GATE_AND_UP),
        kinds=state_fields.granite_hybrid_kinds,
        kind_tensors={
            f"{mixer} {mlp}": tensors | _DENSE_OR_EXPERTS[mlp]
            for mixer, tensors in _MIXERS.items()
            for mlp in _DENSE_OR_EXPERTS
        },
        **_MAMBA2,
    ),
    "falcon-h1": GgufFamily("falcon_h1", state_fields.falcon_h1, names.FALCON_H1, **_MAMBA2),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "mistral3": _MISTRAL3S[True],
    "arcee": GgufFamily("arcee", fields.arcee, names.ARCEE, orders=row_orders.LLAMA_ORDERS),
    "mamba": _MAMBAS[False],
    "mamba2": GgufFamily("mamba2", state_fields.mamba2, names.MAMBA2, **_MAMBA2),
    "smollm3": GgufFamily("smollm3", fields.smollm3, names.LLAMA, orders=row_orders.LLAMA_ORDERS),
    "qwen2": GgufFamily("qwen2", fields.qwen, names.LLAMA),
    "qwen3": GgufFamily("qwen3", fields.qwen3, names.QWEN3),
    "qwen2moe": GgufFamily("qwen2_moe", expert_fields.qwen2_moe, names.QWEN2_MOE),
    "qwen3moe": GgufFamily("qwen3_moe", expert_fields.qwen3_moe, names.QWEN3_MOE),
    # The text models of Qwen-VL. Their rotary sections (one each for time, height and width) have the same positions in
    # texts, which makes them one.
    "qwen2vl": GgufFamily("qwen2", fields.qwen, names.LLAMA),
    "qwen3vl": GgufFamily("qwen3", fields.qwen3, names.QWEN3),
    "qwen3vlmoe": GgufFamily("qwen3_moe", expert_fields.qwen3_moe, names.QWEN3_MOE),
    "qwen3next": _QWEN3_NEXTS[False],
    "qwen35": GgufFamily("qwen3_5_text", state_fields.qwen35, names.QWEN35, **_DELTA_NET),
    "qwen35moe": GgufFamily("qwen3_5_moe_text", state_fields.qwen35_moe, names.QWEN35_MOE, **_DELTA_NET),
    "olmo": GgufFamily("olmo", fields.olmo, names.OLMO, orders=row_orders.LLAMA_ORDERS),
    "olmo2": GgufFamily("olmo2", fields.olmo2, names.OLMO2),
    "olmoe": GgufFamily("olmoe", expert_fields.olmoe, names.QWEN3_MOE),
    "phi2": GgufFamily("phi", fields.phi2, names.PHI2),
    "phi3": GgufFamily("phi3", fields.phi3, names.PHI3),
    "gemma": GgufFamily("gemma", fields.gemma, names.LLAMA, changes=_NORMS_WITH_ONE),
    "gemma2": GgufFamily("gemma2", fields.gemma2, names.GEMMA2, changes=_NORMS_WITH_ONE),
    "gemma3": GgufFamily("gemma3_text", fields.gemma3, names.GEMMA3, changes=_NORMS_WITH_ONE),
    "gemma3n": GgufFamily(
        "gemma3n_text",
        fields.gemma3n,
        names.GEMMA3N,
        plain=frozenset(
            (
                "token_embd",
                "per_layer_token_embd",
                "per_layer_model_proj",
                "altup_proj",
                "altup_unembd_proj",
                "altup_correct_coef",
                "altup_predict_coef",
                "altup_router",
            )
        ),
        kinds=fields.gemma3n_kinds,
        kind_tensors={
            "own": LayerTensors(_weights("attn_k", "attn_v", "attn_k_norm")),
            "shared": LayerTensors(frozenset(), unused=_weights("attn_k", "attn_v", "attn_k_norm")),
        },
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        fields.gemma4,
        names.GEMMA4,
        plain=frozenset(("token_embd", "per_layer_token_embd", "per_layer_model_proj", "ffn_gate_inp")),
        kinds=fields.gemma4_kinds,
        kind_tensors={
            "local": LayerTensors(_weights("attn_k", "attn_v", "attn_k_norm")),
            "full": LayerTensors(_weights("attn_k", "attn_k_norm")),
            "shared": LayerTensors(frozenset(), unused=_weights("attn_k", "attn_v", "attn_k_norm")),
        },
    ),
    "starcoder2": GgufFamily("starcoder2", fields.starcoder2, names.STARCODER2),
    "stablelm": GgufFamily("stablelm", fields.stablelm, names.LLAMA),
    "nemotron": GgufFamily("nemotron", fields.nemotron, names.NEMOTRON, changes=_NORMS_WITH_ONE),
    "gpt2": GgufFamily(
        "gpt2",
        fields.gpt2,
        names.GPT2,
        plain=frozenset(("token_embd", "position_embd", "attn_qkv", "attn_output", "ffn_up", "ffn_down")),
        transposed=frozenset(("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
    ),
    "gptneox": GgufFamily("gpt_neox", fields.gpt_neox, names.GPT_NEOX, orders=row_orders.GPT_NEOX_ORDERS),
    "falcon": _FALCONS[False],
    "minimax-m2": GgufFamily("minimax_m2", expert_fields.minimax_m2, names.MINIMAX_M2),
    "gpt-oss": GgufFamily("gpt_oss", expert_fields.gpt_oss, names.GPT_OSS),
    "lfm2": GgufFamily(
        "lfm2",
        state_fields.lfm2,
        names.LFM2,
        plain=frozenset(("token_embd", "shortconv.conv")),
        kinds=state_fields.lfm2_kinds,
        kind_tensors={"attention": _ATTENTION_TENSORS, "state": _SHORT_CONVOLUTION},
    ),
    "lfm2moe": GgufFamily(
        "lfm2_moe",
        state_fields.lfm2_moe,
        names.LFM2_MOE,
        plain=frozenset(("token_embd", "shortconv.conv")),
        kinds=state_fields.lfm2_moe_kinds,
        kind_tensors={
            f"{mixer} {mlp}": tensors | _DENSE_OR_EXPERTS[mlp]
            for mixer, tensors in (("attention", _ATTENTION_TENSORS), ("state", _SHORT_CONVOLUTION))
            for mlp in _DENSE_OR_EXPERTS
        },
    ),
    "deepseek2": _DEEPSEEKS[True],
    "dots1": GgufFamily(
        "dots1",
        expert_fields.dots1,
        names.DOTS1,
        kinds=expert_fields.dense_layers_first,
        kind_tensors=_DENSE_OR_EXPERTS,
    ),
    "glm4": GgufFamily("glm4", fields.glm4, names.GLM4, orders=row_orders.GLM4_ORDERS),
    "glm4moe": GgufFamily(
        "glm4_moe",
        expert_fields.glm4_moe,
        names.GLM4_MOE,
        kinds=expert_fields.dense_layers_first,
        kind_tensors=_DENSE_OR_EXPERTS,
    ),
    "command-r": GgufFamily(
        "cohere", fields.cohere, names.COHERE, plain=frozenset(("token_embd", "attn_q_norm", "attn_k_norm"))
    ),
    "cohere2": GgufFamily("cohere2", fields.cohere2, names.COHERE),
    "exaone4": GgufFamily("exaone4", fields.exaone4, names.EXAONE4),
    "ernie4_5": GgufFamily("ernie4_5", fields.ernie4_5, names.LLAMA),
    "ernie4_5-moe": GgufFamily(
        "ernie4_5_moe",
        expert_fields.ernie4_5_moe,
        names.ERNIE_MOE,
        kinds=expert_fields.ernie4_5_moe_kinds,
        kind_tensors=_DENSE_OR_EXPERTS,
    ),
    "hunyuan-dense": GgufFamily("hunyuan_v1_dense", fields.llama, names.HUNYUAN),
    "hunyuan-moe": GgufFamily("hunyuan_v1_moe", expert_fields.hunyuan_moe, names.HUNYUAN_MOE),
    "seed_oss": GgufFamily("seed_oss", fields.seed_oss, names.SEED_OSS),
}


def family_of(file: GgufFile) -> GgufFamily:
    """Raises InvalidModel for an architecture that is not served from GGUF."""
    if file.architecture == "llama" and file.count("expert_count", 0) > 0:
        return _MIXTURE_OF_LLAMA
    if file.architecture == "mamba":
        return _MAMBAS[bool(file.find("ssm.dt_b_c_rms"))]
    if file.architecture == "mistral3":
        return _MISTRAL3S[file.find("attention.temperature_scale") is not None]
    if file.architecture == "qwen3next":
        return _QWEN3_NEXTS["blk.0.ssm_in.weight" in file.tensors]
    if file.architecture == "granitemoe":
        return _GRANITE_MOES["blk.0.ffn_up_shexp.weight" in file.tensors]
    if file.architecture == "falcon":
        return _FALCONS["blk.0.attn_norm_2.weight" in file.tensors]
    if file.architecture == "deepseek2":
        return _DEEPSEEKS[any(name.endswith(".exp_probs_b.bias") for name in file.tensors)]
    if file.architecture not in FAMILIES:
        raise InvalidModel(
            f"{file.path} has the architecture {file.architecture}, which is not served from GGUF; served are "
            f"{', '.join(sorted(FAMILIES))}; serve the model's safetensors checkpoint instead"
        )
    return FAMILIES[file.architecture]
