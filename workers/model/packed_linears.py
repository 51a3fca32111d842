"""Replaces a model's linears by PackedLinear: one by one, merged (QKV, gate and up), or row-parallel.

The `weight` of a loaded linear is a tensor or a QuantisedWeight (weight_loader.py). A PackedLinear holds it in the form
that its kernels read. A linear whose attributes the model's own code reads cannot be replaced; `record_weight_reads`
finds these linears.

`batch_invariant`: a row's result does not depend on the other rows (see kernels/layers/linear.py).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coatcheck.kernels import native
from coatcheck.kernels.layers.linear import PackedLinear, holds_quantised
from coatcheck.kernels.layers.quantised_weight import CodeKind, QuantisedWeight, quantise
from coatcheck.kernels.layers.w8a8_linear import FormatChoice
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.checkpoint.quantisation_scheme import check_quantization, read_scheme
from coatcheck.workers.distributed.tensor_slice import Range
from coatcheck.workers.lora.attach_adapters import LoraTarget
from coatcheck.workers.model.parallel_layers import RankSum


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight and bias of some rows of a linear, to be packed."""

    weight: Tensor | QuantisedWeight
    bias: Tensor | None


def choose_code_kind(
    quantization: str, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> CodeKind | None:
    """The format to which linears are quantised at load; None for "auto". Raises InvalidConfig if it is not
    possible."""
    scheme = read_scheme(checkpoint.name, checkpoint.config)
    check_quantization(checkpoint.name, quantization, scheme)
    if quantization == "auto":
        return None
    kind = CodeKind[quantization.upper()]
    if not holds_quantised(quantise(torch.zeros(8, 8, dtype=dtype), kind), device):
        raise InvalidConfig(
            f"quantization on CPU needs bfloat16 or float32 and the native kernels (here: {dtype}, "
            f"{native.native_status()}); set --dtype, install with a C compiler, or leave --quantization out"
        )
    return kind


def pack_linears(module: nn.Module, *, batch_invariant: bool, exclude: Collection[nn.Module] = ()) -> None:
    """Replace every linear below `module` that is not in `exclude`. Linears with the same weight and the same bias, as
    zamba2's shared blocks have, become one PackedLinear."""
    packed: dict[tuple[int, int], PackedLinear] = {}
    # The list holds no linear, so that each unpacked weight is freed before the next one is packed.
    for parent in [part for part in module.modules() if type(part) is not nn.Linear]:
        for name, child in list(parent.named_children()):
            # A subclass may have its own forward, as phimoe's router has.
            if type(child) is not nn.Linear or child in exclude:
                continue
            tensors = id(child.weight), id(child.bias)
            if tensors not in packed:
                packed[tensors] = PackedLinear(child.weight, child.bias, batch_invariant=batch_invariant)
            setattr(parent, name, packed[tensors])


def pack_merged(owner: Any, merged: str, parts: tuple[str, ...], *, batch_invariant: bool) -> PackedLinear:
    """One linear for the linears `parts` of `owner`, which read the same input.

    `merged`: the attribute of `owner` in models that store the merged linear, such as phi3's qkv_proj.
    """
    if hasattr(owner, merged):
        linear = getattr(owner, merged)
        return PackedLinear(linear.weight, linear.bias, batch_invariant=batch_invariant)
    linears = [getattr(owner, name) for name in parts]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    return PackedLinear(_merge([linear.weight for linear in linears]), bias, batch_invariant=batch_invariant)


def merged_targets(packed: PackedLinear, owner: Any, merged: str, parts: tuple[str, ...]) -> dict[str, LoraTarget]:
    """The linears that can have LoRA adapters, by name. `packed`: what `pack_merged` made with the same arguments."""
    if hasattr(owner, merged):
        return {merged: LoraTarget(packed, 0, packed.weight_shape[0])}
    targets, column = {}, 0
    for name in parts:
        features = getattr(owner, name).weight.shape[0]
        targets[name] = LoraTarget(packed, column, features)
        column += features
    return targets


def pack_reordered(linear: Any, rows: Sequence[Range], *, batch_invariant: bool) -> PackedLinear:
    """`linear` with its rows in the order of the ranges `rows`."""
    bias = None if linear.bias is None else select_rows(linear.bias, rows)
    return PackedLinear(select_rows(linear.weight, rows), bias, batch_invariant=batch_invariant)


def select_rows(weight: Tensor | QuantisedWeight, rows: Sequence[Range]) -> Any:
    """The rows of a weight or bias in the order of the ranges `rows`."""
    if isinstance(weight, QuantisedWeight):
        return weight.select_rows(rows)
    return torch.cat([weight.detach()[start:stop] for start, stop in rows])


def _merge(weights: Sequence[Tensor | QuantisedWeight]) -> Tensor | QuantisedWeight:
    """The rows of all weights, one after the other. Dequantised unless all weights are quantised in the same way."""
    quantised = [weight for weight in weights if isinstance(weight, QuantisedWeight)]
    if len(quantised) == len(weights) and (merged := QuantisedWeight.concatenate(quantised)) is not None:
        return merged
    return torch.cat([weight if isinstance(weight, Tensor) else weight.dequantise() for weight in weights])


def pack_row_parallel(linear: Any, *, batch_invariant: bool) -> tuple[PackedLinear, RankSum | None]:
    """(the linear, the all-reduce after it). `linear`: an nn.Linear or a RowParallelLinear. The all-reduce is None in a
    group of one rank."""
    if isinstance(linear, nn.Linear):
        return PackedLinear(linear.weight, linear.bias, batch_invariant=batch_invariant), None
    packed = PackedLinear(linear.linear.weight, linear.linear.bias, batch_invariant=batch_invariant)
    return packed, linear.reduce


def describe_activations(choices: Iterable[FormatChoice | None]) -> str:
    """How the linears quantise their activations, in words; "" if no weight asks for quantised activations."""
    asked = [choice for choice in choices if choice is not None]
    formats = sorted({(choice.format.kind.name.lower(), choice.format.group) for choice in asked if choice.format})
    phrases = [
        f"{kind} activations for {f'each {group} columns' if group else 'each token'}" for kind, group in formats
    ]
    reasons = sorted({choice.reason for choice in asked if choice.format is None})
    return "; ".join([*phrases, *(f"activations not quantised: {reason}" for reason in reasons)])


@contextmanager
def record_weight_reads(model: nn.Module) -> Iterator[set[nn.Module]]:
    """Collect the linears whose weight or sizes the model's own code reads while the context is open.

    These cannot be packed. hunyuan_v1_moe, for example, reads the dtype of a weight.
    """
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
