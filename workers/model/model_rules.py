"""Checks of a model that need only its config.json and the settings.

`coatcheck serve` applies them before anything starts. The ranks apply them again to transformers' config objects.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coatcheck.kernels.linear_attention.state_sizes import (
    MAX_STATE,
    MAX_STATE_SIZE,
    fits_gpu,
    fits_native,
    takes_state_size,
)
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.checkpoint.text_tower import MULTIMODAL_TYPES
from coatcheck.workers.core.model_spec import (
    DeltaNetSpec,
    LayerSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)

# By model type: config.json fields of DeepSeek's own code that transformers does not read, and the values for which
# transformers computes the same as DeepSeek's code.
_ROUTING: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
    },
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
}

_MAX_TAPS: Final = 8  # tokens that a convolution kernel reads at most
_DELTA_NETS: Final = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_BAMBAS: Final = ("bamba", "falcon_h1", "granitemoehybrid")
_MAMBAS: Final = ("falcon_mamba", "mamba", "mamba2")
# By model type: the config.json fields of the sizes of layers with a state. If there are several, the first that
# config.json has counts, and the last is transformers' own. `a.b`: the field b of the object a.
_CONV_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(_DELTA_NETS, ("linear_conv_kernel_dim",)),
    "kimi_linear": ("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), ("conv_L_cache",)),
    **dict.fromkeys((*_BAMBAS, "jamba", "zamba2"), ("mamba_d_conv",)),
    **dict.fromkeys(_MAMBAS, ("conv_kernel",)),
    "nemotron_h": ("mamba_d_conv", "conv_kernel"),
}
_KEY_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(_DELTA_NETS, ("linear_key_head_dim",)),
    "kimi_linear": ("linear_attn_config.head_dim", "linear_head_dim"),
}
_VALUE_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    **_KEY_SIZES,
    **dict.fromkeys(_DELTA_NETS, ("linear_value_head_dim",)),
}
# Of Mamba-2 mixers.
_STATE_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys((*_BAMBAS, "zamba2"), ("mamba_d_state",)),
    "mamba2": ("state_size",),
    "nemotron_h": ("ssm_state_size",),
}


def check_docstrings() -> None:
    """Raise InvalidConfig if this Python process removes docstrings. transformers parses its own to build a model."""
    if sys.flags.optimize > 1:
        raise InvalidConfig(
            "this Python removes docstrings (PYTHONOPTIMIZE=2 or python -OO), and transformers needs its own to build "
            "a model; set PYTHONOPTIMIZE=1, or unset it"
        )


def check_model_kind(model_type: str, *, is_multimodal: bool, is_encoder_decoder: bool) -> None:
    """Raise InvalidModel for a kind of model that is not served.

    `is_multimodal`: the model takes more than text, and its text model cannot be served alone (text_tower.py).
    """
    if is_multimodal:
        raise InvalidModel(
            f"{model_type} is multimodal, and its text model is not served; the text models of these types are: "
            f"{', '.join(sorted(MULTIMODAL_TYPES))}"
        )
    if is_encoder_decoder:
        raise InvalidModel(f"{model_type} is an encoder-decoder; only decoder-only models are served")


def check_latent_attention(name: str, model_type: str, values: Mapping[str, Any]) -> None:
    """Raise InvalidModel for a config.json of deepseek_v2 or deepseek_v3 that transformers' code would compute wrongly.

    transformers has one way of routing for each model type, and ignores these fields. Other model types pass.
    `name`: of the model. `values`: the fields of config.json.
    """
    for field, served in _ROUTING.get(model_type, {}).items():
        if values.get(field, served[0]) not in served:
            raise InvalidModel(
                f"{name}: config.json has {field} {values[field]!r}; {model_type} is served with "
                f"{' or '.join(repr(value) for value in served)}: correct it, or use a checkpoint that has it"
            )
    if model_type not in _ROUTING:
        return
    rope_dim = values.get("qk_rope_head_dim")
    if isinstance(rope_dim, int) and rope_dim % 2:
        raise InvalidModel(
            f"{name}: config.json has qk_rope_head_dim {rope_dim}; it must be even, because rotary embeddings rotate "
            "pairs: correct it, or fetch config.json again"
        )
    experts, groups, chosen = (values.get(field) or 1 for field in ("n_routed_experts", "n_group", "topk_group"))
    has_groups = model_type == "deepseek_v3" or values.get("topk_method") == "group_limited_greedy"
    if not has_groups or not all(isinstance(count, int) for count in (experts, groups, chosen)):
        return
    usable = chosen * (experts // groups)
    if experts % groups or chosen > groups or (values.get("num_experts_per_tok") or 1) > usable:
        raise InvalidModel(
            f"{name}: config.json has {experts} n_routed_experts in {groups} n_group, of which a token uses "
            f"{chosen} topk_group and {values.get('num_experts_per_tok')} num_experts_per_tok; n_group must divide the "
            "experts, and the chosen groups must hold the experts per token: correct them, or fetch config.json again"
        )


def resolve_max_model_len(
    requested: int | None, model_len: int, rope_parameters: Mapping[str, Any], index_topk: int | None = None
) -> int:
    """The max_model_len to serve: `requested`, or else the model's own length.

    `model_len`: config.json's max_position_embeddings. `rope_parameters`: of config.json; empty if absent, or if they
    differ by layer type. With yarn the model's own length is the original length times the factor. With dynamic NTK
    `requested` may be up to the factor times the model's own length. `index_topk`: of a model with sparse attention;
    up to this length sparse attention equals full attention.
    Raises InvalidConfig if `requested` is longer: the model was not trained for such positions, or would attend to
    other tokens.
    """
    longest = model_len
    kind, factor = rope_parameters.get("rope_type"), rope_parameters.get("factor")
    if kind == "yarn" and factor:
        stretched = int(factor * rope_parameters.get("original_max_position_embeddings", model_len))
        model_len = longest = max(model_len, stretched)
    elif kind == "dynamic":
        longest = int(model_len * (factor or 1.0))
    if index_topk is not None and index_topk < longest:
        if requested is not None and requested > index_topk:
            raise InvalidConfig(
                f"max-model-len is {requested}, but the model's attention is sparse and is served only where it equals "
                f"full attention, up to index_topk {index_topk}; use at most that"
            )
        model_len = longest = min(model_len, index_topk)
    if requested is not None and requested > longest:
        raise InvalidConfig(f"max-model-len is {requested}, but the model supports {longest}; use at most that")
    return requested or model_len


def deterministic_experts_error(module: str, model_type: str) -> InvalidConfig:
    """The error for --deterministic with a mixture of experts whose router is transformers' own code."""
    return InvalidConfig(
        f"deterministic: {module} of {model_type} is behind a router that our batch-invariant kernels do not compute; "
        "serve it without --deterministic"
    )


def check_mla_shard(model_type: str, is_latent: bool) -> None:
    """Raise InvalidConfig if a model with --mla-shard tokens has no latent attention."""
    if not is_latent:
        raise InvalidConfig(
            f"mla-shard tokens divides the latents of latent attention (MLA), and {model_type} has none; leave "
            "--mla-shard out"
        )


def check_deterministic_heads(layer: LayerSpec) -> None:
    """Raise InvalidConfig for a head size that --deterministic does not support on CPUs."""
    if layer.is_latent:
        rank, rope_dim = layer.stored_dims
        if rank % 16 or rank > 512 or rope_dim % 16 or rope_dim > 64:
            raise InvalidConfig(
                "deterministic on CPU needs a kv_lora_rank of at most 512 and a qk_rope_head_dim of at most 64, both "
                f"multiples of 16 (here: {rank}, {rope_dim}); leave --deterministic out"
            )
    elif layer.head_dim % 16 or layer.head_dim > 256:
        raise InvalidConfig(
            "deterministic on CPU needs a head_dim that is a multiple of 16 and at most 256 (here: "
            f"{layer.head_dim}); leave --deterministic out"
        )


def check_deterministic_states(model_type: str, values: Mapping[str, Any], layers: Sequence[StateSpec]) -> None:
    """Raise InvalidConfig for a layer with a state whose sizes the C library's deterministic kernels do not compute.

    `values`: the fields of config.json.
    """
    for layer in layers:
        if isinstance(layer, DeltaNetSpec) and not fits_native(layer.key_dim, layer.value_dim):
            raise InvalidConfig(
                f"deterministic on CPU needs {_head_fields(model_type, values)} in multiples of 16 and at most "
                f"{MAX_STATE_SIZE} (here: {layer.key_dim}, {layer.value_dim}); leave --deterministic out"
            )
        if isinstance(layer, ShortConvSpec) and layer.channels % 16:
            raise InvalidConfig(
                "deterministic on CPU needs a hidden_size that is a multiple of 16 for short convolutions (here: "
                f"{layer.channels}); leave --deterministic out"
            )
        if isinstance(layer, MambaSpec) and (layer.channels % 16 or layer.state_size > MAX_STATE_SIZE):
            raise InvalidConfig(
                "deterministic on CPU needs Mamba mixers whose channels are a multiple of 16, with a state of at most "
                f"{MAX_STATE_SIZE} (here: {layer.channels}, {layer.state_size}); leave --deterministic out"
            )
        if isinstance(layer, LightningSpec) and layer.head_dim % 16:
            raise InvalidConfig(
                "deterministic on CPU needs a head_dim that is a multiple of 16 for lightning attention (here: "
                f"{layer.head_dim}); leave --deterministic out"
            )
        sizes = (layer.state_size, layer.conv_channels, layer.norm_size) if isinstance(layer, Mamba2Spec) else ()
        if any(size % 16 for size in sizes):
            raise InvalidConfig(
                "deterministic on CPU needs Mamba-2 mixers whose state size, channels and groups of the norm are "
                f"multiples of 16 (here: {', '.join(map(str, sizes))}); leave --deterministic out"
            )


def _head_fields(model_type: str, values: Mapping[str, Any]) -> str:
    """The fields of the sizes of a delta net's heads, for a message."""
    fields = (_field_of(sizes, model_type, values) for sizes in (_KEY_SIZES, _VALUE_SIZES))
    return " and ".join(dict.fromkeys(fields))


def _field_of(sizes: Mapping[str, tuple[str, ...]], model_type: str, values: Mapping[str, Any]) -> str:
    """The field of config.json that gives a size. `sizes`: the possible ones of each model type."""
    fields = sizes[model_type]
    return next((field for field in fields if _has_field(values, field)), fields[-1])


def _has_field(values: Mapping[str, Any], field: str) -> bool:
    outer, _, inner = field.rpartition(".")
    own = values.get(outer) if outer else values
    return isinstance(own, Mapping) and own.get(inner) is not None


def check_convolutions(model_type: str, values: Mapping[str, Any], layers: Sequence[StateSpec]) -> None:
    """Raise InvalidModel for a layer whose convolution reads more tokens than the kernels compute. `values`: the fields
    of config.json."""
    for layer in layers:
        if (size := layer.window[0] + 1) > _MAX_TAPS:
            field = _field_of(_CONV_SIZES, model_type, values)
            raise InvalidModel(
                f"{model_type} with {field} {size} cannot be served: convolutions read at most {_MAX_TAPS} tokens; "
                f"correct {field}, if config.json is wrong"
            )


def check_mixer_activation(model_type: str, activation: str) -> None:
    """Raise InvalidModel unless the activation before the recurrence of a layer with a state is silu."""
    if activation not in ("silu", "swish"):
        field = "mamba_hidden_act" if model_type == "nemotron_h" else "hidden_act"
        raise InvalidModel(
            f"{model_type} with {field} {activation} cannot be served: the kernels of layers with a state compute silu "
            f"alone; correct {field}, if config.json is wrong"
        )


def check_host_tier(architecture: str, host_kv_memory: float, *, has_states: bool) -> None:
    """Raise InvalidConfig for a host tier with a model that keeps states: no prompt could start at its blocks."""
    if host_kv_memory and has_states:
        raise InvalidConfig(
            f"host-kv-memory keeps blocks of KV, and some layers of {architecture} keep states, whose snapshots stay "
            "on the device: no prompt could start at a block from host memory; leave --host-kv-memory out"
        )


def check_state_device(device: str, model_type: str, values: Mapping[str, Any], layers: Sequence[StateSpec]) -> None:
    """Raise InvalidConfig for layers with a state whose sizes the GPU kernels do not compute, unless `device`, torch's
    device type, is cpu. `values`: the fields of config.json."""
    for layer in layers if device != "cpu" else ():
        if isinstance(layer, DeltaNetSpec) and not fits_gpu(layer.key_dim, layer.value_dim):
            raise InvalidConfig(
                f"gated delta nets on a GPU need {_head_fields(model_type, values)} in powers of two from 16 "
                f"on, at most {MAX_STATE} as a product (here: {layer.key_dim}, {layer.value_dim}); set --device cpu"
            )
        if isinstance(layer, MambaSpec):
            raise InvalidConfig(
                "Mamba mixers of the first version (selective scan) have no GPU kernel; set --device cpu"
            )
        if isinstance(layer, LightningSpec) and not takes_state_size(layer.head_dim):
            raise InvalidConfig(
                "lightning attention on a GPU needs a head_dim that is a power of two from 16 to "
                f"{MAX_STATE_SIZE} (here: {layer.head_dim}); set --device cpu"
            )
        if isinstance(layer, Mamba2Spec) and not takes_state_size(layer.state_size):
            raise InvalidConfig(
                f"Mamba-2 on a GPU needs a {_field_of(_STATE_SIZES, model_type, values)} that is a power of two from "
                f"16 to {MAX_STATE_SIZE} (here: {layer.state_size}); set --device cpu"
            )
