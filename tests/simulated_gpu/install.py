"""Replaces torch.cuda by a simulated GPU, for the rest of this process. It must have TRITON_INTERPRET=1.

This patches names in torch and Triton, because neither has an interface for a device that does not exist. So it is done
only in processes that do nothing else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import interpreter  # type: ignore[import-untyped]

from tests.kernels.triton.mended_interpreter import reduce_work
from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.graph import Capture, Graph
from tests.simulated_gpu.kernels import check_access, launch
from tests.simulated_gpu.streams import Event, Stream
from tests.simulated_gpu.tensors import CudaTensor, Mode


def install() -> SimulatedGpu:
    gpu = SimulatedGpu()
    for made_for in (Stream, Event, Graph, Capture, CudaTensor, Mode):
        made_for.gpu = gpu  # type: ignore[attr-defined]
    Stream()
    in_place: dict[str, Any] = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "current_device": lambda: 0,
        "set_device": lambda device: None,
        "current_stream": gpu.current_stream, "stream": gpu.on, "Stream": Stream, "Event": Event,
        "synchronize": gpu.wait_for_all, "CUDAGraph": Graph, "graph": Capture, "graph_pool_handle": lambda: 0,
        "empty_cache": gpu.empty_cache, "mem_get_info": gpu.mem_get_info,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "get_device_capability": lambda device=None: (9, 0),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: gpu.pinned.add(address, nbytes),
            cudaHostUnregister=gpu.pinned.remove,
        ),
    }  # fmt: skip
    for name, replacement in in_place.items():
        setattr(torch.cuda, name, replacement)
    # Then torch.tensor(values, device="cuda") creates the tensor on the host, and copies it.
    torch._C._set_only_lift_cpu_tensors(True)
    reduce_work()
    _patch_interpreter(gpu)
    Mode().__enter__()
    return gpu


def _patch_interpreter(gpu: SimulatedGpu) -> None:
    """Observe every launch, load and store in Triton's interpreter."""
    run = interpreter.GridExecutor.__call__
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        def kernel(*held: Any, **named: Any) -> None:
            run(self, *held, **named)

        launch(gpu, kernel, self.fn.__name__, args, kwargs)

    def loaded(self: Any, at: Any, mask: Any, *rest: Any) -> Any:
        check_access(gpu, at.data, mask.data, write=False)
        return load(self, at, mask, *rest)

    def stored(self: Any, at: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check_access(gpu, at.data, mask.data, write=True)
        return store(self, at, value, mask, *rest)

    interpreter.GridExecutor.__call__ = launched
    builder.create_masked_load, builder.create_masked_store = loaded, stored
