"""Runs a model's forward pass with dummy weights, in seconds for any model size.

A model on the meta device has shapes but no values. Inside `use_dummy_weights` its code runs on the CPU with real
activations, but without weight matrices:

- a product with a weight matrix becomes a fixed sparse linear map of the same shape,
- all experts become one such map, scaled by their routing weights,
- small parameters (norms, biases) get random values.

A token's result depends on the same inputs as with real weights, but has another value. A 70B model computes a dozen
tokens in about a second.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_EXPERTS: Final = "coatcheck_dummy_experts"
_MAX_RANDOM_ELEMENTS: Final = 1 << 20  # larger parameters stay on meta
_MAX_TOKENS: Final = 64  # a probe has fewer tokens, so a longer axis is one of channels

_PRODUCTS: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
_DEVICE_GETTER: Final = Tensor.device.__get__  # a TorchFunctionMode sees the getters of attributes, too
_PRODUCTS_WITH_BIAS: Final = (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm)


class TokensMixed(Exception):
    """A module computes a token's result from other tokens; the message names the module."""


@contextmanager
def use_dummy_weights(model: PreTrainedModel) -> Iterator[None]:
    """Run `model`, whose parameters are on meta, on the CPU in float32. Restores parameters, buffers and config.

    A convolution over tokens raises TokensMixed.
    """
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _dummy_experts)
    parameters = {module: dict(module._parameters) for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    config: Any = model.config
    experts = getattr(config, "_experts_implementation", None)
    random = torch.Generator().manual_seed(0)
    try:
        config._experts_implementation = _EXPERTS
        for module, named in parameters.items():
            module._parameters.update({name: _dummy_parameter(module, p, random) for name, p in named.items()})
        for module, tensors in buffers.items():
            module._buffers.update({name: _dummy_buffer(b, random) for name, b in tensors.items()})
        with torch.no_grad(), _DummyWeights(model):
            yield
    finally:
        config._experts_implementation = experts
        for module, named in parameters.items():
            module._parameters.update(named)
        for module, tensors in buffers.items():
            module._buffers.update(tensors)


def _dummy_parameter(module: nn.Module, parameter: nn.Parameter | None, random: torch.Generator) -> nn.Parameter | None:
    if parameter is None:
        return None
    shape = parameter.shape
    # Exactly nn.Embedding, because a subclass may use its weight in another way.
    is_replaced = isinstance(module, nn.Linear) or type(module) is nn.Embedding
    if parameter.dim() > 1 and (is_replaced or shape.numel() > _MAX_RANDOM_ELEMENTS):
        return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    return nn.Parameter(_random_values(shape, random), requires_grad=False)


def _dummy_buffer(buffer: Tensor | None, random: torch.Generator) -> Tensor | None:
    if buffer is None:
        return None
    if not buffer.is_floating_point():
        return torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.cpu().clone()
    if buffer.is_meta or bool(buffer.isnan().any()):  # NaN: the model's initialiser left it out (see meta_model.py)
        return _random_values(buffer.shape, random)
    return buffer.to("cpu", torch.float32, copy=True)  # a forward pass may write to it


def _random_values(shape: torch.Size, random: torch.Generator) -> Tensor:
    """A vector with elements around 1, as a norm has, or a matrix or convolution that keeps the magnitude of its
    input."""
    if len(shape) < 2:
        return torch.rand(shape, generator=random) + 0.5
    values: Tensor = torch.randn(shape, generator=random) * (shape[1:].numel() or 1) ** -0.5
    return values


class _DummyWeights(TorchFunctionMode):
    """Replaces the torch functions that are called with a weight on meta."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_GETTER:  # models move ids to a weight's device
            return torch.device("cpu")
        if func is F.conv1d:
            self._refuse_convolution(*_positional(("input", "weight"), args, kwargs)[:2])
        elif func is F.linear:
            x, weight, bias = _positional(("input", "weight", "bias"), args, kwargs)
            if weight.is_meta and not x.is_meta:
                return _add_bias(_sparse_map(x, weight.shape[1], weight.shape[0]), bias)
        elif func is F.embedding:
            ids, weight, *_ = _positional(("input", "weight"), args, kwargs)
            if weight.is_meta and not ids.is_meta:
                return _dummy_embedding(ids, weight.shape[1])
        elif func in _PRODUCTS:
            x, weight = [*args, *kwargs.values()][:2]
            if weight.is_meta and not x.is_meta:
                return _sparse_map(x, weight.shape[-2], weight.shape[-1])
            if x.is_meta and not weight.is_meta:
                return _sparse_map(weight.transpose(-1, -2), x.shape[-1], x.shape[-2]).transpose(-1, -2)
        elif func in _PRODUCTS_WITH_BIAS:
            bias, x, weight, *_ = [*args, *kwargs.values()]
            if isinstance(weight, Tensor) and weight.is_meta and not x.is_meta:
                return _add_bias(_sparse_map(x, weight.shape[-2], weight.shape[-1]), bias)
        return func(*args, **kwargs)

    def _refuse_convolution(self, x: Tensor, weight: Tensor) -> None:
        """Raise TokensMixed for a convolution over tokens.

        In most models a recurrence follows the convolution. Without its CUDA kernels it would take minutes.
        """
        if weight.shape[-1] > 1 and x.shape[-1] < _MAX_TOKENS:
            parameters = ((name, p) for name, p in self._model.named_parameters() if not p.is_meta)
            name = next((name for name, p in parameters if p.data_ptr() == weight.data_ptr()), "one of its modules")
            raise TokensMixed(f"{name.removesuffix('.weight')} (a convolution over {weight.shape[-1]} tokens)")


def _positional(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def _add_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return product
    return product + (torch.full(bias.shape[-1:], 0.25) if bias.is_meta else bias)


def _sparse_map(x: Tensor, inputs: int, outputs: int) -> Tensor:
    """A sparse linear map, [..., inputs] -> [..., outputs]. Every output depends on some inputs, and some output
    depends on each input."""
    if x.shape[-1] != inputs:
        raise ValueError(f"a weight with {inputs} input features gets {x.shape[-1]}")
    factors = _map_factors(inputs, outputs).to(x.dtype)
    if inputs < outputs:
        x = x + x.roll(inputs // 3 + 1, -1)
        return torch.cat([x] * len(factors), dim=-1)[..., :outputs] * factors.flatten()[:outputs]
    if factors.numel() > inputs:
        x = F.pad(x, (0, factors.numel() - inputs))
    whole: Tensor = x.unflatten(-1, factors.shape) * factors
    y = whole.sum(-2) if len(factors) > 1 else whole.squeeze(-2)
    return y + y.roll(outputs // 3 + 1, -1)


@cache
def _map_factors(inputs: int, outputs: int) -> Tensor:
    """The map's factors, [ceil(larger / smaller), smaller] of `inputs` and `outputs`."""
    times, size = -(-max(inputs, outputs) // min(inputs, outputs)), min(inputs, outputs)
    random = torch.Generator().manual_seed(inputs * 1_000_003 + outputs)
    factors: Tensor = torch.randn(times, size, generator=random) / (times if inputs >= outputs else 1) ** 0.5
    return factors


def _dummy_embedding(ids: Tensor, width: int) -> Tensor:
    """[...] ids -> [..., width], a different row for every id."""
    frequencies = torch.rand(width, generator=torch.Generator().manual_seed(width)) * 3 + 0.1
    return torch.sin((ids.unsqueeze(-1) + 1) * frequencies)


def _dummy_experts(module: nn.Module, hidden: Tensor, *routing: Tensor, **others: Any) -> Tensor:
    """One map for all experts, scaled by the routing. A token's result depends on its own routing alone."""
    chosen = [x for x in (*routing, *others.values()) if isinstance(x, Tensor)]
    weight = sum((_routing_scale(x, hidden) for x in chosen), torch.ones(()))
    return _sparse_map(hidden, hidden.shape[-1], hidden.shape[-1]) * weight


def _routing_scale(routing: Tensor, hidden: Tensor) -> Tensor:
    """[..., 1]: one factor for each token, from its routing weights or its experts' indices."""
    value = torch.tanh(routing.float())
    order = torch.linspace(0.5, 1.0, value.shape[-1])
    return (value * order).sum(-1).reshape(*hidden.shape[:-1], 1)
