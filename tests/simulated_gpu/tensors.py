"""CudaTensor: a wrapper of a CPU tensor that claims to be on `cuda:0`, and the dispatch mode that creates it.

For torch's C++ it is on the CPU, because this torch may be built without CUDA. For Python code it is on the GPU. gpu.py
runs its operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_gpu.memory import Memory

if TYPE_CHECKING:
    from tests.simulated_gpu.gpu import SimulatedGpu

DEVICE = torch.device("cuda", 0)


class CudaTensor(Tensor):
    gpu: SimulatedGpu
    held: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, held: Tensor, memory: Memory) -> CudaTensor:
        with torch.inference_mode(False):  # otherwise it could not be changed outside of inference mode
            self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
                device=torch.device("cpu"),
            )  # fmt: skip
        self.held, self.memory = held, memory
        return self  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.gpu.run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        if not copy and (device or DEVICE).type == "cuda" and dtype in (None, self.dtype) and layout is None:
            return self
        found: Tensor = self.gpu.run(
            torch.ops.aten._to_copy.default, (self,),
            {"device": device or DEVICE, "dtype": dtype, "non_blocking": non_blocking, "memory_format": layout},
        )  # fmt: skip
        return found

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({self.held})"


class Mode(TorchDispatchMode):
    """Sends every operator of its thread through SimulatedGpu.run, which ignores those without GPU tensors."""

    gpu: SimulatedGpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.run(func, args, kwargs or {})
