"""HybridLayers: which layers of a hybrid model have attention and which keep a state, read from config.json alone.

Missing fields take the defaults of transformers' config classes. Layer types may have the names of older releases
("mamba", "attention").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from coatcheck.cluster.planner.model_config import ModelConfig
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.core.model_spec import (
    DeltaNetSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)

_ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "attention", "hybrid"})
_STATE: Final = frozenset({"linear_attention", "mamba", "conv", "hybrid"})
_MLP: Final = frozenset({"mlp", "moe"})
# Types whose layers are mixers alone, without attention and MLP.
WITHOUT_ATTENTION: Final = frozenset({"falcon_mamba", "mamba", "mamba2"})
# The letters of nemotron_h's hybrid_override_pattern.
_LETTERS: Final = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class HybridLayers:
    """`kinds`: the type of each layer. `has_mlp_layers`: an MLP is a layer of its own (nemotron_h), part of a shared
    block (zamba2), or there is none.
    `states`: those layers that keep a state."""

    kinds: tuple[str, ...]
    has_mlp_layers: bool
    states: tuple[StateSpec, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> Self | None:
        """Return None for a family that is not hybrid. Raise InvalidModel if fields are missing or do not fit."""
        if (read := _STATE_OF.get(config.model_type)) is None:
            return None
        kinds = _layer_kinds(config)
        states = tuple(read(config, layer) for layer, kind in enumerate(kinds) if kind in _STATE)
        return cls(kinds, config.model_type in {"nemotron_h", "zamba2", *WITHOUT_ATTENTION}, states)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers with attention."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind in _ATTENTION)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts. In nemotron_h only the layers that are an MLP have one."""
        return not self.has_mlp_layers or self.kinds[layer] in _MLP

    def has_experts(self, layer: int) -> bool | None:
        """Whether a layer of nemotron_h is a mixture of experts. None for other families: their kinds do not say."""
        return self.kinds[layer] == "moe" if self.has_mlp_layers else None


def _layer_kinds(config: ModelConfig) -> tuple[str, ...]:
    """The type of every layer. Raise InvalidModel for a type that is not served."""
    values, family = config.values, config.model_type
    count = config.number("num_hidden_layers", "n_layer", "num_layers", default=0)
    listed = values.get("layers_block_type") or values.get("layer_types")
    pattern = values.get("hybrid_override_pattern")
    if family == "falcon_h1":
        kinds = ["hybrid"] * count
    elif family == "bamba":
        attending = _layer_indices(config, "attn_layer_indices") or []
        kinds = ["full_attention" if layer in attending else "linear_attention" for layer in range(count)]
    elif family in WITHOUT_ATTENTION:
        kinds = ["linear_attention"] * count
    elif family == "jamba":
        period, offset = config.count("attn_layer_period", default=8), config.number("attn_layer_offset", default=4)
        kinds = ["linear_attention" if layer % period != offset else "full_attention" for layer in range(count)]
    elif isinstance(listed, list):
        kinds = [str(kind) for kind in listed]
    elif isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    elif family == "lfm2":
        indices = _layer_indices(config, "full_attn_idxs")
        kinds = ["full_attention" if indices is None or layer in indices else "conv" for layer in range(count)]
    elif family == "kimi_linear":
        kinds = _kimi_kinds(config, count)
    elif family == "lfm3":
        kinds = [("conv" if layer % 2 or not layer else "sliding_attention") for layer in range(count)]
        kinds[2::4] = ["full_attention"] * len(kinds[2::4])
    elif family == "minimax":
        kinds = ["linear_attention" if layer % 2 else "full_attention" for layer in range(count)]
    elif family in _DELTA_NETS:
        interval = config.count("full_attention_interval", default=4)
        kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)]
    else:
        raise InvalidModel(f"{config.name}: config.json has no layer_types, which sizing needs; add it")
    if family != "nemotron_h" and len(kinds) != count:
        raise InvalidModel(f"{config.name}: config.json has {len(kinds)} layer_types for {count} layers")
    unknown = sorted(set(kinds) - _ATTENTION - _STATE - _MLP)
    if unknown:
        raise InvalidModel(
            f"{config.name}: config.json has layers of type {', '.join(unknown)}; {family} is served with "
            f"{', '.join(sorted(_ATTENTION | _STATE | _MLP))}"
        )
    return tuple(kinds)


def _layer_indices(config: ModelConfig, field: str) -> Sequence[int] | None:
    """A list of layer indices; None if it is absent. Raise InvalidModel for anything else."""
    indices = config.values.get(field)
    if indices is None:
        return None
    if not isinstance(indices, list) or any(type(index) is not int for index in indices):
        raise InvalidModel(f"{config.name}: config.json has {field} {indices!r}; it should be a list of layer indices")
    return indices


def _check_dt_limits(config: ModelConfig) -> None:
    """Raise InvalidModel unless time_step_limit is absent, null, or a list of the smallest and the largest dt."""
    limits = config.values.get("time_step_limit")
    if limits is not None and (not isinstance(limits, list) or len(limits) != 2):
        raise InvalidModel(
            f"{config.name}: config.json has time_step_limit {limits!r}; it should be a list of two numbers"
        )


def _delta_net(config: ModelConfig, layer: int) -> DeltaNetSpec:
    heads, is_olmo = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}, config.model_type == "olmo_hybrid"
    if is_olmo:
        heads = dict.fromkeys(heads, config.count("num_attention_heads", default=30))
    key_heads, value_heads = (config.count(name, default=default) for name, default in heads.items())
    if value_heads % key_heads:
        raise InvalidModel(
            f"{config.name}: config.json has {key_heads} linear_num_key_heads for {value_heads} "
            "linear_num_value_heads; the key heads must divide the value heads"
        )
    key_dim = 3 * config.count("hidden_size", default=3840) // (4 * key_heads) if is_olmo else 128
    key_dim = config.count("linear_key_head_dim", default=key_dim)
    return DeltaNetSpec(
        layer=layer,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=config.count("linear_value_head_dim", default=2 * key_dim if is_olmo else 128),
        conv_size=config.count("linear_conv_kernel_dim", default=4),
    )


def _kimi_delta_net(config: ModelConfig, layer: int) -> DeltaNetSpec:
    own = ModelConfig(config.name, _kimi_fields(config))
    heads = own.count("num_heads", default=config.count("linear_num_heads", default=32))
    dim = own.count("head_dim", default=config.count("linear_head_dim", default=128))
    conv_size = own.count("short_conv_kernel_size", default=config.count("linear_conv_kernel_dim", default=4))
    return DeltaNetSpec(layer, heads, heads, dim, dim, conv_size, has_channel_decays=True)


def _kimi_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of published checkpoints' `linear_attn_config`; empty if it is absent."""
    fields = config.values.get("linear_attn_config")
    return fields if isinstance(fields, dict) else {}


def _kimi_kinds(config: ModelConfig, count: int) -> list[str]:
    """The layer types of a config.json without layer_types, as transformers derives them. Its lists count layers from
    1. Without both lists every fourth layer from the fifth on has attention."""
    fields = _kimi_fields(config)
    attending = _layer_indices(ModelConfig(config.name, fields), "full_attn_layers")
    if attending is None or "kda_layers" not in fields:
        attending = range(5, count + 1, 4)
    return ["full_attention" if layer + 1 in attending else "linear_attention" for layer in range(count)]


def _short_conv(config: ModelConfig, layer: int) -> ShortConvSpec:
    size = config.count("conv_L_cache", default=7 if config.model_type == "lfm3" else 3)
    return ShortConvSpec(layer, config.count("hidden_size"), size)


def _lightning(config: ModelConfig, layer: int) -> LightningSpec:
    heads = config.count("num_attention_heads", default=32)
    return LightningSpec(layer, heads, config.count("head_dim", default=config.count("hidden_size") // heads))


def _mamba2(config: ModelConfig, layer: int) -> Mamba2Spec:
    """The Mamba-2 mixer of granitemoehybrid, bamba and falcon_h1."""
    _check_dt_limits(config)
    heads = config.count("mamba_n_heads", default=128)
    inner = config.count("mamba_expand", default=2) * config.count("hidden_size")
    has_norm = True
    if config.model_type == "falcon_h1":
        inner = config.count("mamba_d_ssm", default=inner if "mamba_d_ssm" in config.values else 1024)
        has_norm = bool(config.values.get("mamba_rms_norm"))
    if inner % heads:
        raise InvalidModel(
            f"{config.name}: config.json has {heads} mamba_n_heads for {inner} elements of the mixer; the heads must "
            "divide them"
        )
    groups = _head_groups(config, heads, config.count("mamba_n_groups", default=1))
    return Mamba2Spec(
        layer=layer,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_size=config.count("mamba_d_state", default=256),
        conv_size=config.count("mamba_d_conv", default=4),
        norm_size=inner // groups if has_norm else 0,
    )


def _nemotron_mamba2(config: ModelConfig, layer: int) -> Mamba2Spec:
    _check_dt_limits(config)
    heads, head_dim = config.count("mamba_num_heads", default=128), config.count("mamba_head_dim", default=64)
    groups = _head_groups(config, heads, config.count("mamba_n_groups", "n_groups", default=8))
    return Mamba2Spec(
        layer=layer,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=config.count("ssm_state_size", default=128),
        conv_size=config.count("mamba_d_conv", "conv_kernel", default=4),
        norm_size=heads * head_dim // groups,
    )


def _mamba(config: ModelConfig, layer: int) -> MambaSpec:
    """The Mamba mixer of jamba, whose fields begin with mamba_, and of mamba and falcon_mamba."""
    hidden = config.count("hidden_size")
    channels = config.count("mamba_expand", "expand", default=2) * hidden
    if config.model_type != "jamba":  # falcon_mamba's expand is not its width; jamba's field is the width of its MLP
        channels = config.count("intermediate_size", default=channels)
    ranks = ("mamba_dt_rank", "time_step_rank")
    is_auto = any(config.values.get(name) == "auto" for name in ranks)
    return MambaSpec(
        layer=layer,
        channels=channels,
        state_size=config.count("mamba_d_state", "state_size", default=16),
        dt_rank=-(-hidden // 16) if is_auto else config.count(*ranks, default=-(-hidden // 16)),
        conv_size=config.count("mamba_d_conv", "conv_kernel", default=4),
    )


def _plain_mamba2(config: ModelConfig, layer: int) -> Mamba2Spec:
    """The mixer of mamba2."""
    _check_dt_limits(config)
    heads, head_dim = config.count("num_heads", default=128), config.count("head_dim", default=64)
    groups = _head_groups(config, heads, config.count("n_groups", default=8))
    return Mamba2Spec(
        layer=layer,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=config.count("state_size", default=128),
        conv_size=config.count("conv_kernel", default=4),
        norm_size=heads * head_dim // groups,
    )


def _zamba2(config: ModelConfig, layer: int) -> Mamba2Spec:
    _check_dt_limits(config)
    heads = config.count("n_mamba_heads", default=8)
    inner = config.count("mamba_expand", default=2) * config.count("hidden_size", default=2560)
    groups = _head_groups(config, heads, config.count("mamba_ngroups", default=1))
    return Mamba2Spec(
        layer=layer,
        heads=heads,
        head_dim=inner // heads,
        groups=groups,
        state_size=config.count("mamba_d_state", default=64),
        conv_size=config.count("mamba_d_conv", default=4),
        norm_size=inner // groups,
    )


def _head_groups(config: ModelConfig, heads: int, groups: int) -> int:
    """Return `groups`. Raise InvalidModel unless they divide the heads."""
    if heads % groups:
        raise InvalidModel(
            f"{config.name}: config.json has {groups} groups for {heads} Mamba-2 heads; the groups must divide them"
        )
    return groups


_DELTA_NETS: Final = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
_STATE_OF: Final[dict[str, Callable[[ModelConfig, int], StateSpec]]] = {
    **dict.fromkeys(_DELTA_NETS, _delta_net),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _short_conv),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), _mamba2),
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), _mamba),
    "mamba2": _plain_mamba2,
    "minimax": _lightning,
    "kimi_linear": _kimi_delta_net,
    "nemotron_h": _nemotron_mamba2,
    "zamba2": _zamba2,
}
