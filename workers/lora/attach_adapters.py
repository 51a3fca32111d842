"""attach_adapters(): gives the linears of a rank's model the slices of every adapter.

A and B are sharded as their linear is. For a column-parallel linear a rank holds all of A and its rows of B. For a
row-parallel linear it holds its columns of A and all of B, and its (x A^T) B^T is one term of the sum over ranks. On a
CPU A and B are float32; on a GPU they have the dtype of their linear.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from coatcheck.kernels.gpu_properties import TRITON_DEVICES
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.lora.lora_linear import LoraLinear, LoraPart
from coatcheck.kernels.lora.lora_step import LoraStep
from coatcheck.kernels.lora.shrink_expand import StackedLora
from coatcheck.proto.errors import InvalidModel
from coatcheck.workers.distributed.tensor_slice import TensorSlice
from coatcheck.workers.lora.adapter import Adapter


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear that can have adapters. `linear`: the packed linear that computes it, which may be several linears
    merged. `column`, `features`: its output features are [column, column + features) of `linear`."""

    linear: PackedLinear
    column: int
    features: int


def attach_adapters(
    adapters: Sequence[Adapter],
    targets: Mapping[str, LoraTarget],
    slices: Mapping[str, TensorSlice],
    step: LoraStep,
) -> int:
    """Load this rank's slices of all adapters. Return their bytes.

    `adapters`: in the order of their indices in a step. `targets`: by the name of the linear. `slices`: of the model's
    weights by name; a weight that the rank holds whole has none. Raises InvalidModel for A or B with NaN or infinity.
    """
    parts_of: dict[PackedLinear, list[list[LoraPart]]] = {}  # a list for each adapter
    for index, adapter in enumerate(adapters):
        with safe_open(adapter.file, framework="pt", device="cpu") as file:
            for name, module in adapter.modules.items():
                target, sliced = targets[name], slices.get(f"{name}.weight")
                a = _read(file, module.a_name, sliced if sliced is not None and sliced.dim == 1 else None)
                b = _read(file, module.b_name, sliced if sliced is not None and sliced.dim == 0 else None)
                assert len(b) == target.features, f"{name}: {len(b)} rows of B for {target.features} features"
                dtype = target.linear.dtype if _is_stacked(target.linear) else torch.float32
                a, b = a.to(dtype), (b * module.scaling).T.contiguous().to(dtype)
                if not (a.isfinite().all() and b.isfinite().all()):
                    raise InvalidModel(
                        f"lora-modules {adapter.name}: A or B of {name} has NaN or infinity, or lora_alpha or "
                        f"{dtype} makes them infinite; export the adapter again"
                    )
                parts = parts_of.setdefault(target.linear, [[] for _ in adapters])
                parts[index].append(LoraPart(a, b, target.column))
    num_bytes = 0
    while parts_of:  # a linear copies its parts; they are freed before the next linear, so that few copies are held
        linear, by_adapter = parts_of.popitem()
        if _is_stacked(linear):
            step.num_stacked = len(adapters)
            linear.lora = StackedLora(step, by_adapter, linear.weight_shape, linear.dtype, linear.device)
        else:
            linear.lora = LoraLinear(step, by_adapter, linear.weight_shape, linear.dtype)
        num_bytes += linear.lora.num_bytes
    return num_bytes


def _is_stacked(linear: PackedLinear) -> bool:
    return linear.device.type in TRITON_DEVICES


def _read(file: Any, name: str, sliced: TensorSlice | None) -> Tensor:
    """A tensor, or this rank's slice of it, as float32."""
    tensor: Tensor = file.get_tensor(name).float()
    if sliced is None:
        return tensor.contiguous()
    return torch.cat([tensor.narrow(sliced.dim, start, stop - start) for start, stop in sliced.ranges], sliced.dim)
