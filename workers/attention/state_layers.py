"""Finds the layers of a hybrid model that keep a state in place of keys and values, or beside them.

workers/model/linear_attention.py computes these layers. attention_probe.py refuses models whose tokens interact outside
of attention. While the probe runs, `without_states` makes these layers compute each token alone, so that the probe
checks the rest of the model.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from coatcheck.workers.core.model_spec import (
    DeltaNetSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)

# Attention whose query projection outputs, for each head, the query and then a gate that multiplies the head's output.
_GATED_ATTENTIONS: Final = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})

_Other = TypeVar("_Other")
_State = TypeVar("_State")


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer that keeps a state. `module`: the name of transformers' module."""

    module: str
    spec: StateSpec


def find_state_layers(model: nn.Module) -> list[StateLayer]:
    """The layers of `model` that keep a state, in layer order. Their specs have the heads of all ranks."""
    return sorted(
        (StateLayer(name, spec) for name, _, spec in _state_modules(model)), key=lambda state: state.spec.layer
    )


def find_mlp_layers(model: nn.Module) -> set[int]:
    """The indices of the layers of `model` that are only an MLP or experts, without attention or state (nemotron_h)."""
    blocks: list[Any] = [module for module in model.modules() if type(module).__name__ == "NemotronHBlock"]
    return {block.layer_idx for block in blocks if block.block_type in ("mlp", "moe")}


def correct_dt_limits(model: nn.Module) -> None:
    """Set the limits of dt of all Mamba-2 mixers of transformers' `model` to config.json's `time_step_limit`.

    null means 0 to infinity; transformers' code fails on null. In nemotron_h and zamba2 transformers limits dt to at
    least `time_step_min`. But `time_step_min` only describes how training initialised dt_bias. The published models'
    own code limits dt by `time_step_limit`, which is 0 to infinity in all of them. A head that remembers thousands of
    tokens has a dt below `time_step_min` (huggingface/transformers pull request 48989).
    """
    for _, mixer, spec in _state_modules(model):
        if isinstance(spec, Mamba2Spec):
            is_wrong = type(mixer).__name__ in ("NemotronHMamba2Mixer", "Zamba2MambaMixer")
            limits = getattr(mixer.config, "time_step_limit", None) if is_wrong else mixer.time_step_limit
            mixer.time_step_limit = tuple(limits or (0.0, math.inf))


def has_output_gate(attention: nn.Module) -> bool:
    """Whether the query projection of an attention module outputs, for each head, a query and then a gate."""
    return type(attention).__name__ in _GATED_ATTENTIONS


def interleave(others: Sequence[_Other], states: Sequence[tuple[int, _State]]) -> list[_Other | _State]:
    """One item for each layer. `states`: (layer index, item). The other layers have the items of `others`, in order."""
    by_layer, rest = dict(states), iter(others)
    count = len(others) + len(by_layer)
    return [by_layer[layer] if layer in by_layer else next(rest) for layer in range(count)]


@contextmanager
def without_states(model: nn.Module) -> Iterator[None]:
    """While the context is open, layers of `model` with a state compute each token alone, with the same linears."""
    modules = [(module, spec) for _, module, spec in _state_modules(model)]
    for module, spec in modules:
        module.forward = _TokenwiseForward(module, spec)
    try:
        yield
    finally:
        for module, _ in modules:
            del module.forward


class _TokenwiseForward:
    """Replaces the forward of a layer with a state by its linears with tanh between them."""

    def __init__(self, module: Any, spec: StateSpec) -> None:
        self._module, self._size = module, spec.inner_size
        self._returns_pair = isinstance(spec, LightningSpec)

    def __call__(self, hidden_states: Tensor, *others: Any, **ignored: Any) -> Tensor | tuple[Tensor, None]:
        module = self._module
        # q_proj, k_proj and v_proj, or qkv_proj, are wide enough; the other linears of such a module may read another's
        # output.
        names = [name for name, _ in module.named_children() if re.fullmatch(r"in_proj.*|[qkv]+_proj", name)]
        wide = torch.cat([getattr(module, name)(hidden_states) for name in names], dim=-1)
        out: Tensor = output_projection(module)(torch.tanh(wide[..., : self._size]))
        return (out, None) if self._returns_pair else out


def output_projection(mixer: Any) -> Any:
    """The last linear of a layer with a state."""
    return mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj


def _read_delta_net(module: Any) -> DeltaNetSpec:
    return DeltaNetSpec(
        layer=module.layer_idx,
        key_heads=module.num_k_heads,
        value_heads=module.num_v_heads,
        key_dim=module.head_k_dim,
        value_dim=module.head_v_dim,
        conv_size=module.conv_kernel_size,
    )


def _read_kimi_delta_net(module: Any) -> DeltaNetSpec:
    return DeltaNetSpec(
        layer=module.layer_idx,
        key_heads=module.num_heads,
        value_heads=module.num_heads,
        key_dim=module.head_dim,
        value_dim=module.head_dim,
        conv_size=module.conv_kernel_size,
        has_channel_decays=True,
    )


def _read_short_conv(module: Any) -> ShortConvSpec:
    return ShortConvSpec(module.layer_idx, channels=module.conv.in_channels, conv_size=module.conv_kernel_size)


def _read_mamba2(module: Any) -> Mamba2Spec:
    return Mamba2Spec(
        layer=module.layer_idx,
        heads=module.num_heads,
        head_dim=module.head_dim,
        groups=module.n_groups,
        state_size=module.ssm_state_size,
        conv_size=module.conv_kernel_size,
        norm_size=_norm_size(module),
    )


def _read_mamba(module: Any) -> MambaSpec:
    return MambaSpec(
        layer=module.layer_idx,
        channels=module.intermediate_size,
        state_size=module.ssm_state_size,
        dt_rank=module.time_step_rank,
        conv_size=module.conv_kernel_size,
    )


def _read_lightning(module: Any) -> LightningSpec:
    return LightningSpec(module.layer_idx, heads=module.num_attention_heads, head_dim=module.head_dim)


def _norm_size(mixer: Any) -> int:
    """The number of elements whose mean square a Mamba-2 mixer's norm takes; 0 without a norm."""
    norm = mixer.norm
    if isinstance(norm, nn.Identity):
        return 0
    if hasattr(norm, "group_size"):
        return int(norm.group_size)
    return int(mixer.intermediate_size // getattr(norm, "n_groups", 1))


# By the class of transformers' module.
_READERS: Final[Mapping[str, Callable[[Any], StateSpec]]] = {
    **dict.fromkeys(
        ("OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        _read_delta_net,
    ),
    "KimiLinearDeltaAttention": _read_kimi_delta_net,
    "MiniMaxLightningAttention": _read_lightning,
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _read_short_conv),
    **dict.fromkeys(
        (
            "BambaMixer",
            "FalconH1Mixer",
            "GraniteMoeHybridMambaLayer",
            "Mamba2Mixer",
            "NemotronHMamba2Mixer",
            "Zamba2MambaMixer",
        ),
        _read_mamba2,
    ),
    **dict.fromkeys(("FalconMambaMixer", "JambaMambaMixer", "MambaMixer"), _read_mamba),
}


def _state_modules(model: nn.Module) -> list[tuple[str, Any, StateSpec]]:
    return [
        (name, module, read(module))
        for name, module in model.named_modules()
        if (read := _READERS.get(type(module).__name__)) is not None
    ]
