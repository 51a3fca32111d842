"""Packing: a model's linears as PackedLinear, alone, several in one product, or as one rank's part of a sum.

It takes weights over: what was packed is dropped from the module it came from. It does not know what is served.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.linear import PackedLinear


def pack_linears(module: nn.Module, *, fixed_rows: bool) -> None:
    """Replaces every linear below `module` by a packed one; its plain weight is dropped."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:  # a subclass has a forward of its own: phimoe's router is one
            setattr(module, name, PackedLinear(child.weight, child.bias, fixed_rows=fixed_rows))
        else:
            pack_linears(child, fixed_rows=fixed_rows)


def row_parallel(linear: Any, *, fixed_rows: bool) -> tuple[PackedLinear, Callable[[Tensor], Tensor] | None]:
    """The product of this rank's part, and what makes the whole of it: None where this rank has all."""
    if isinstance(linear, nn.Linear):
        return PackedLinear(linear.weight, linear.bias, fixed_rows=fixed_rows), None
    return PackedLinear(linear.linear.weight, linear.linear.bias, fixed_rows=fixed_rows), linear.reduce


def joined(owner: Any, whole: str, parts: tuple[str, ...], *, fixed_rows: bool) -> PackedLinear:
    """One product for several linears that read the same input; `whole` is its name where the model has it so."""
    if hasattr(owner, whole):
        linear = getattr(owner, whole)
        return PackedLinear(linear.weight, linear.bias, fixed_rows=fixed_rows)
    linears = [getattr(owner, name) for name in parts]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return PackedLinear(torch.cat([linear.weight for linear in linears]), bias, fixed_rows=fixed_rows)
