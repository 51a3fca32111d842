"""The layers of a hybrid model that keep a state in place of keys and values: transformers' gated delta nets.

Our own code computes these layers (workers/model/linear_attention.py). The probe of attention_probe.py refuses layers
whose tokens interact outside of attention. So `pass_tokens_alone` removes the interaction of these layers while the
probe runs, and the probe checks everything else.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from coatcheck.workers.core.model_spec import DeltaNetSpec, StateSpec

_DELTA_NETS: Final = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
# Attention whose query projection has each head's query and then its gate, by which the head's output is multiplied.
_GATED_ATTENTIONS: Final = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})

_Other = TypeVar("_Other")
_State = TypeVar("_State")


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer that keeps a state. `module`: the name of transformers' module."""

    module: str
    spec: StateSpec


def find_state_layers(model: nn.Module) -> list[StateLayer]:
    """The gated delta nets of `model` with the heads of all ranks, in the order of the layers."""
    found = [
        StateLayer(
            name,
            DeltaNetSpec(
                layer=module.layer_idx,
                key_heads=module.num_k_heads,
                value_heads=module.num_v_heads,
                key_dim=module.head_k_dim,
                value_dim=module.head_v_dim,
                conv_size=module.conv_kernel_size,
            ),
        )
        for name, module in _delta_nets(model)
    ]
    return sorted(found, key=lambda state: state.spec.layer)


def has_output_gate(attention: nn.Module) -> bool:
    """Whether an attention module's query projection has a gate behind each head's query."""
    return type(attention).__name__ in _GATED_ATTENTIONS


def interleave(others: Sequence[_Other], states: Sequence[tuple[int, _State]]) -> list[_Other | _State]:
    """`states` at the layers that they name, and `others`, in their order, at the layers between them."""
    by_layer, rest = dict(states), iter(others)
    count = len(others) + len(by_layer)
    return [by_layer[layer] if layer in by_layer else next(rest) for layer in range(count)]


@contextmanager
def pass_tokens_alone(model: nn.Module) -> Iterator[None]:
    """While inside, every gated delta net of `model` computes each token from itself alone, with the same linears."""
    modules: list[Any] = [module for _, module in _delta_nets(model)]
    for module in modules:
        module.forward = _TokenwiseForward(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


class _TokenwiseForward:
    """The forward of a gated delta net without its recurrence: the linears of each token, with tanh between them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden_states: Tensor, **ignored: Any) -> Tensor:
        module = self._module
        names = [name for name, child in module.named_children() if name.startswith("in_proj")]
        wide = torch.cat([getattr(module, name)(hidden_states) for name in names], dim=-1)
        out: Tensor = module.out_proj(torch.tanh(wide[..., : module.value_dim]))
        return out


def _delta_nets(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if type(module).__name__ in _DELTA_NETS]
