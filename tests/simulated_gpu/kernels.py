"""Triton kernels on the simulated GPU: they run in Triton's interpreter, and every load and store is checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.simulated_gpu.gpu import SimulatedGpu
from tests.simulated_gpu.memory import Hazard
from tests.simulated_gpu.tensors import CudaTensor


def launch(gpu: SimulatedGpu, kernel: Callable[..., None], name: str, args: Sequence[Any], kwargs: Any) -> None:
    """Run a kernel now, or at every replay of the graph that is being captured."""
    with gpu.lock, torch.inference_mode(False), torch.no_grad():
        every = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        ours = [x for x in every if isinstance(x, CudaTensor)]
        if len(ours) < len(every):
            raise Hazard(f"{name} was given a tensor on the host")
        held, named = pytree.tree_map(lambda x: x.held if isinstance(x, CudaTensor) else x, (args, kwargs))
        touched = [weakref.ref(x.memory) for x in ours]

        def call() -> None:
            stream = gpu.current_stream()
            stream.tick()
            gpu.kernels[name] += 1
            for of in touched:
                memory = of()
                if memory is not None and not memory.watched:  # watched memory is checked at each access
                    memory.touch(stream.number, stream.clock, write=True, what=name)
            kernel(*held, **named)

        if gpu.capturing is not None:
            gpu.capturing.add(call, [x.memory for x in ours])
        else:
            gpu.launches["kernel"] += 1
            call()


def check_access(gpu: SimulatedGpu, addresses: Any, mask: Any, *, write: bool) -> None:
    """Check the loads or stores of the running kernel."""
    stream, at = gpu.current_stream(), addresses[mask]
    for memory in gpu.watched:
        places = memory.places_at(at, write=write)
        memory.touch(stream.number, stream.clock, write=write, what="a kernel", places=places)
