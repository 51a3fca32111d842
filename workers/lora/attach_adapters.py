"""attach_adapters(): gives the linears of a rank's model the slices of every adapter.

A and B are sharded as their linear is. Of a column-parallel linear a rank holds all of A and its rows of B. Of a
row-parallel linear a rank holds its columns of A and all of B: the product is a part of the sum over ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.lora.lora_linear import LoraLinear, LoraPart
from coatcheck.kernels.lora.lora_step import LoraStep
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.lora.adapter import Adapter


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear that adapters may have: `features` of the features of `linear`, from `column` on."""

    linear: PackedLinear
    column: int
    features: int


def attach_adapters(
    adapters: Sequence[Adapter],
    targets: Mapping[str, LoraTarget],
    slices: Mapping[str, TensorSlice],
    step: LoraStep,
) -> int:
    """Load the slices of all adapters, in the order of their index in a step. Return their bytes on this rank.

    `targets`: by the name of the linear. `slices`: of each weight by its name; absent if the rank holds all of it.
    """
    parts: dict[PackedLinear, list[list[LoraPart]]] = {}
    for index, adapter in enumerate(adapters):
        with safe_open(adapter.file, framework="pt", device="cpu") as file:
            for name, module in adapter.modules.items():
                target, part = targets[name], slices.get(f"{name}.weight")
                a = _read(file, module.a, part if part is not None and part.dim == 1 else None)
                b = _read(file, module.b, part if part is not None and part.dim == 0 else None)
                assert len(b) == target.features, f"{name}: {len(b)} rows of B for {target.features} features"
                held = parts.setdefault(target.linear, [[] for _ in adapters])
                held[index].append(LoraPart(a, (b * module.scale).T.contiguous(), target.column))
    for linear, by_adapter in parts.items():
        linear.lora = LoraLinear(step, by_adapter, linear.weight_shape, linear.dtype)
    return sum(linear.lora.num_bytes for linear in parts if linear.lora is not None)


def _read(file: Any, name: str, part: TensorSlice | None) -> Tensor:
    """A tensor, or this rank's slice of it, as float32."""
    tensor: Tensor = file.get_tensor(name).float()
    if part is None:
        return tensor.contiguous()
    return torch.cat([tensor.narrow(part.dim, start, stop - start) for start, stop in part.ranges], part.dim)
