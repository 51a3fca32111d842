"""StandIn: runs a model's forward pass with cheap dummy weights.

A model on the meta device has shapes but no values. Inside `stand_in_weights` its code runs on the CPU with real
values: a product with a weight becomes a fixed sparse linear map of the same shape, experts become one such map scaled
by their routing weights, and small parameters (norms, biases) are random. A 70B model then computes a dozen tokens in
about a second. A token's result depends on the same inputs as with real weights; only its value differs.
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

_EXPERTS: Final = "coatcheck_stand_in"
_LARGEST: Final = 1 << 20  # most elements of a parameter that is filled with random values

_FEW_TOKENS: Final = 64  # more than the tokens of a probe's pass: a longer axis is channels, not tokens

_RIGHT_PRODUCTS: Final = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
_DEVICE_OF: Final = Tensor.device.__get__  # a getter that torch passes to the mode
_SUMMED_PRODUCTS: Final = (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm)


class TokensMixed(Exception):
    """A module computes a token's result from its neighbours; the message names the module."""


@contextmanager
def stand_in_weights(model: PreTrainedModel) -> Iterator[None]:
    """While inside, `model`, whose parameters are on meta, runs on the CPU in float32. Restores everything at the
    end."""
    parameters = {module: dict(module._parameters) for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    config: Any = model.config
    experts = getattr(config, "_experts_implementation", None)
    random = torch.Generator().manual_seed(0)
    try:
        config._experts_implementation = _EXPERTS
        for module, named in parameters.items():
            module._parameters.update({name: _parameter(module, p, random) for name, p in named.items()})
        for module, tensors in buffers.items():
            module._buffers.update({name: _buffer(b, random) for name, b in tensors.items()})
        with torch.no_grad(), _StandIn(model):
            yield
    finally:
        config._experts_implementation = experts
        for module, named in parameters.items():
            module._parameters.update(named)
        for module, tensors in buffers.items():
            module._buffers.update(tensors)


def _parameter(module: nn.Module, parameter: nn.Parameter | None, random: torch.Generator) -> nn.Parameter | None:
    if parameter is None:
        return None
    shape = parameter.shape
    # A subclass may use its weight differently.
    plain = isinstance(module, nn.Linear) or type(module) is nn.Embedding
    if parameter.dim() > 1 and (plain or shape.numel() > _LARGEST):
        return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    return nn.Parameter(_values(shape, random), requires_grad=False)


def _buffer(buffer: Tensor | None, random: torch.Generator) -> Tensor | None:
    if buffer is None:
        return None
    if not buffer.is_floating_point():
        return torch.zeros(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.cpu().clone()
    if buffer.is_meta or bool(buffer.isnan().any()):  # NaN: the model's initialiser left it out (see skeleton.py)
        return _values(buffer.shape, random)
    return buffer.to("cpu", torch.float32, copy=True)  # a forward pass may write to it


def _values(shape: torch.Size, random: torch.Generator) -> Tensor:
    """Random values: vectors near 1, as in norms; matrices and kernels that keep the magnitude of their input."""
    if len(shape) < 2:
        return torch.rand(shape, generator=random) + 0.5
    values: Tensor = torch.randn(shape, generator=random) * (shape[1:].numel() or 1) ** -0.5
    return values


class _StandIn(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DEVICE_OF:  # models move ids to where a weight is
            return torch.device("cpu")
        if func is F.conv1d:
            self._refuse_convolution(*_bind(("input", "weight"), args, kwargs)[:2])
        elif func is F.linear:
            x, weight, bias = _bind(("input", "weight", "bias"), args, kwargs)
            if weight.is_meta and not x.is_meta:
                return _plus(_apply(x, weight.shape[1], weight.shape[0]), bias)
        elif func is F.embedding:
            ids, weight, *_ = _bind(("input", "weight"), args, kwargs)
            if weight.is_meta and not ids.is_meta:
                return _embed(ids, weight.shape[1])
        elif func in _RIGHT_PRODUCTS:
            x, weight = [*args, *kwargs.values()][:2]
            if weight.is_meta and not x.is_meta:
                return _apply(x, weight.shape[-2], weight.shape[-1])
            if x.is_meta and not weight.is_meta:
                return _apply(weight.transpose(-1, -2), x.shape[-1], x.shape[-2]).transpose(-1, -2)
        elif func in _SUMMED_PRODUCTS:
            bias, x, weight, *_ = [*args, *kwargs.values()]
            if isinstance(weight, Tensor) and weight.is_meta and not x.is_meta:
                return _plus(_apply(x, weight.shape[-2], weight.shape[-1]), bias)
        return func(*args, **kwargs)

    def _refuse_convolution(self, x: Tensor, weight: Tensor) -> None:
        """Raises TokensMixed for a convolution over tokens, before the recurrence that follows it in most models: that
        takes minutes without its kernels."""
        if weight.shape[-1] > 1 and x.shape[-1] < _FEW_TOKENS:
            held = ((name, p) for name, p in self._model.named_parameters() if not p.is_meta)
            name = next((name for name, p in held if p.data_ptr() == weight.data_ptr()), "one of its modules")
            raise TokensMixed(f"{name.removesuffix('.weight')} (a convolution over {weight.shape[-1]} tokens)")


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *(kwargs.get(name) for name in names[len(args) :])]


def _plus(product: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return product
    return product + (torch.full(bias.shape[-1:], 0.25) if bias.is_meta else bias)


def _apply(x: Tensor, inputs: int, outputs: int) -> Tensor:
    """A sparse linear map, [..., inputs] -> [..., outputs]: every output reads some inputs, and every input is read."""
    if x.shape[-1] != inputs:
        raise ValueError(f"a weight of {inputs} inputs is given {x.shape[-1]}")
    factors = _factors(inputs, outputs).to(x.dtype)
    if inputs < outputs:
        y = torch.cat([x] * len(factors), dim=-1)[..., :outputs] * factors.flatten()[:outputs]
    else:
        whole = F.pad(x, (0, factors.numel() - inputs)).unflatten(-1, factors.shape)
        y = (whole * factors).sum(-2) if len(factors) > 1 else (whole * factors).squeeze(-2)
    return y + y.roll(outputs // 3 + 1, -1)


@cache
def _factors(inputs: int, outputs: int) -> Tensor:
    """The map's factors, [larger / smaller of inputs and outputs rounded up, the smaller of both]."""
    times, size = -(-max(inputs, outputs) // min(inputs, outputs)), min(inputs, outputs)
    random = torch.Generator().manual_seed(inputs * 1_000_003 + outputs)
    factors: Tensor = torch.randn(times, size, generator=random) / (times if inputs >= outputs else 1) ** 0.5
    return factors


def _embed(ids: Tensor, width: int) -> Tensor:
    """[...] ids -> [..., width]: a different row for every id."""
    frequencies = torch.rand(width, generator=torch.Generator().manual_seed(width)) * 3 + 0.1
    return torch.sin((ids.unsqueeze(-1) + 1) * frequencies)


def _experts(module: nn.Module, hidden: Tensor, *routing: Tensor, **others: Any) -> Tensor:
    """One map for all experts, scaled by the routing, so that a token's result depends on its own routing only."""
    chosen = [x for x in (*routing, *others.values()) if isinstance(x, Tensor)]
    weight = sum((_rows(x, hidden) for x in chosen), torch.ones(()))
    return _apply(hidden, hidden.shape[-1], hidden.shape[-1]) * weight


def _rows(routing: Tensor, hidden: Tensor) -> Tensor:
    """One number for each token, from its routing weights or its experts' indices."""
    value = torch.tanh(routing.float())
    order = torch.linspace(0.5, 1.0, value.shape[-1])
    return (value * order).sum(-1).reshape(*hidden.shape[:-1], 1)


def register() -> None:
    """Makes the stand-in for experts known to transformers; repeating it changes nothing."""
    ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
