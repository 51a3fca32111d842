"""Packing: a model's linears as PackedLinear, alone, several in one product, or as one rank's part of a sum.

Packing takes weights over: a packed weight is dropped from its module. A linear whose attributes the model's own code
reads is not packed; `record_weight_reads` finds those. This module does not know what is served.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coatcheck.kernels.layers.linear import PackedLinear


def pack_linears(module: nn.Module, *, batch_invariant: bool, keep: Collection[nn.Module] = ()) -> None:
    """Replaces every linear below `module`, except those in `keep`, by a packed one; its plain weight is dropped."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:  # a subclass has a forward of its own: phimoe's router is one
            if child not in keep:
                setattr(module, name, PackedLinear(child.weight, child.bias, batch_invariant=batch_invariant))
        else:
            pack_linears(child, batch_invariant=batch_invariant, keep=keep)


@contextmanager
def record_weight_reads(model: nn.Module) -> Iterator[set[nn.Module]]:
    """While inside, collects the linears of `model` whose weight or sizes the model's own code reads. They cannot be
    packed. One example: hunyuan_v1_moe reads the dtype of a weight."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    read: set[nn.Module] = set()

    class RecordedLinear(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            if name in ("weight", "in_features", "out_features"):
                read.add(self)
            return super().__getattribute__(name)

        def forward(self, input: Tensor) -> Tensor:
            weight, bias = (self._parameters[name] for name in ("weight", "bias"))
            assert weight is not None
            return nn.functional.linear(input, weight, bias)

    for linear in linears:
        linear.__class__ = RecordedLinear
    try:
        yield read
    finally:
        for linear in linears:
            linear.__class__ = nn.Linear


def row_parallel(linear: Any, *, batch_invariant: bool) -> tuple[PackedLinear, Callable[[Tensor], Tensor] | None]:
    """The product of this rank's part, and what makes the whole of it: None where this rank has all."""
    if isinstance(linear, nn.Linear):
        return PackedLinear(linear.weight, linear.bias, batch_invariant=batch_invariant), None
    return PackedLinear(linear.linear.weight, linear.linear.bias, batch_invariant=batch_invariant), linear.reduce


def joined(owner: Any, whole: str, parts: tuple[str, ...], *, batch_invariant: bool) -> PackedLinear:
    """One product for several linears that read the same input; `whole` is its name where the model has it so."""
    if hasattr(owner, whole):
        linear = getattr(owner, whole)
        return PackedLinear(linear.weight, linear.bias, batch_invariant=batch_invariant)
    linears = [getattr(owner, name) for name in parts]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return PackedLinear(torch.cat([linear.weight for linear in linears]), bias, batch_invariant=batch_invariant)
