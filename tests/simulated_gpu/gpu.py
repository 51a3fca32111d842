"""SimulatedGpu: torch's CPU operators under the rules that hold on a GPU, so that what breaks them is seen without one.

Everything is computed at once, so tokens are those of any device. What is watched is what a GPU would not wait for:

- memory that two streams touch, one of them writing, and neither waits for the other (memory.py);
- a copy to pinned memory, which arrives when the host has waited for it, and is rubbish until then;
- a copy from pinned memory that is changed before the copy is known to be over;
- a graph, which repeats operators and kernels with the numbers that it was captured with (graph.py).

`waits` says each time what the host waited for. It does not know speed, what the compiler makes of a kernel, nor memory
that is freed and given away while another stream still uses it.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.simulated_gpu.graph import Graph
from tests.simulated_gpu.memory import Clock, Hazard, Memory
from tests.simulated_gpu.pinned import Pinned
from tests.simulated_gpu.streams import Stream
from tests.simulated_gpu.tensors import CudaTensor

aten = torch.ops.aten
# What makes the host wait for a result, and operators that take their indices from either side.
_ASKING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::item"}
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put"}
_PINNING = {"aten::pin_memory", "aten::_pin_memory"}


class SimulatedGpu:
    """One device of one process. `streams_wait` and `host_waits`: false makes every such call of the program do
    nothing, as if it had been forgotten."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = Counter()  # what the host knows to be over
        self.waits: list[str] = []
        self.streams_wait = self.host_waits = True
        self.capturing: Graph | None = None
        self.watched: list[Memory] = []
        self.pinned = Pinned()
        self.lock = threading.RLock()
        self._local = threading.local()

    def watch(self, pool: Tensor) -> None:
        """Every 16 bytes of it by themselves, but that kernels may read block 0's keys for those behind the end."""
        assert isinstance(pool, CudaTensor)
        pool.memory.watch(pool.nbytes // len(pool))
        self.watched.append(pool.memory)

    # Streams and the host.

    def current_stream(self, device: object = None) -> Stream:
        stream: Stream = getattr(self._local, "stream", self.streams[0])
        return stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    def wait(self, clock: Clock, why: str) -> None:
        """The host waits."""
        with self.lock:
            if self.capturing is not None:
                raise Hazard(f"the host waits ({why}) while a graph is captured")
            self.waits.append(why)
            self.host |= clock
            self.pinned.settle(self.host)

    def wait_for_all(self, device: object = None) -> None:
        self.wait(Counter({stream.number: stream.clock[stream.number] for stream in self.streams}), "everything")

    # Operators.

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator of torch's, if a tensor or the device that it is given is ours."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            name, device = func.name().partition(".")[0], kwargs.get("device")
            if name in _PINNING:
                return self.pinned.made(args[0].clone())
            if kwargs.get("pin_memory"):
                return self.pinned.made(func(*args, **{**kwargs, "pin_memory": False}))
            flat = pytree.tree_leaves((args, kwargs))
            ours = [x for x in flat if isinstance(x, CudaTensor)]
            if name in ("aten::_to_copy", "aten::to"):
                said = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
                goes = said.get("device")
                if goes is not None and goes.type != ("cuda" if ours else "cpu"):
                    return self._across(args[0], goes, said.get("dtype"), said.get("non_blocking", False))
            if name == "aten::copy_" and len(ours) == 1:
                return self._copy(args[0], args[1], (*args, kwargs.get("non_blocking", False))[2])
            if name == "aten::histc" and ours and not args[0].is_floating_point():  # a CPU has it of floats alone
                return self.run(func, (args[0].float(), *args[1:]), kwargs).to(args[0].dtype)
            if ours or (device is not None and device.type == "cuda"):
                self._look(name, flat, ours, device)
                return self._compute(func, args, kwargs, ours)
            return func(*args, **kwargs)

    def _look(self, name: str, flat: list[Any], ours: list[CudaTensor], device: torch.device | None) -> None:
        """At what the host would wait for, and at tensors that are elsewhere."""
        if name in _ASKING or any(x.dtype == torch.bool for x in ours[1:] if name in _INDEXING):
            self.wait(Counter(self.current_stream().clock), name)
        for x in flat:
            if isinstance(x, Tensor) and not isinstance(x, CudaTensor) and x.dim() > 0 and device is None:
                if name not in _INDEXING:
                    raise RuntimeError(f"{name}: expected all tensors to be on one device, found cuda:0 and {x.device}")
                self.wait(Counter(self.current_stream().clock), f"{name} by an index on the host")

    def _compute(self, func: Any, args: Any, kwargs: Any, ours: list[CudaTensor]) -> Any:
        goes = kwargs.get("device")
        if goes is not None:
            kwargs = {**kwargs, "device": torch.device("cpu") if goes.type == "cuda" else goes}
        roles = _roles(func, args, kwargs)
        args, kwargs = pytree.tree_map(lambda x: x.held if isinstance(x, CudaTensor) else x, (args, kwargs))
        self._begin(func.name(), roles)
        found = func(*args, **kwargs)
        if goes is not None and goes.type != "cuda":
            return found
        made: list[Tensor] = []
        result = pytree.tree_map(lambda y: self._wrapped(y, ours, made) if isinstance(y, Tensor) else y, found)
        changes = any(write for _, write in roles)
        if self.capturing is not None and (made or changes):  # all else are views
            outputs = [y for y in pytree.tree_leaves(found) if isinstance(y, Tensor)]
            touched = [(weakref.ref(x.memory), x.held, write) for x, write in roles]

            def again() -> None:
                self.current_stream().tick()
                for of, held, write in touched:
                    if (memory := of()) is not None:
                        self._touch(memory, held, func.name(), write=write)
                for old, new in zip(outputs, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                    if any(old is y for y in made):
                        old.copy_(new)

            self.capturing.add(again, [x.memory for x in ours])
        return result

    def _begin(self, name: str, roles: Sequence[tuple[CudaTensor, bool]]) -> None:
        if self.capturing is None:  # what is captured runs when it is replayed
            self.current_stream().tick()
            for x, write in roles:
                self._touch(x.memory, x.held, name, write=write)

    def _touch(self, memory: Memory, held: Tensor, name: str, *, write: bool) -> None:
        stream = self.current_stream()
        memory.touch(stream.number, stream.clock, write=write, what=name, places=memory.places_of(held))

    def _wrapped(self, held: Tensor, ours: Sequence[CudaTensor], made: list[Tensor]) -> CudaTensor:
        """The same object where an operator returns what it was given; a view shares its memory."""
        for x in ours:
            if held is x.held:
                return x
        address = held.untyped_storage().data_ptr()
        for x in ours:
            if address == x.memory.first and x.memory.nbytes:
                return CudaTensor(held, x.memory)
        made.append(held)
        memory = Memory(held)
        if self.capturing is not None:
            self.capturing.allocated(memory, held)
        return CudaTensor(held, memory)

    # Copies between the host and the device.

    def _across(self, x: Tensor, device: torch.device, dtype: torch.dtype | None, non_blocking: bool) -> Tensor:
        dtype = dtype or x.dtype
        if device.type == "meta":
            return torch.empty_like(x.held if isinstance(x, CudaTensor) else x, dtype=dtype, device=device)
        if isinstance(x, CudaTensor):
            source = self.run(aten._to_copy.default, (x,), {"dtype": dtype}) if dtype != x.dtype else x
            return self._copy(torch.empty_like(x.held, dtype=dtype), source, non_blocking)
        to = self._wrapped(torch.empty_like(x, dtype=dtype), [], [])
        return self._copy(to, x.to(dtype), non_blocking)

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        if self.capturing is not None:
            raise Hazard("a copy between host and device while a graph is captured")
        if source.numel() == 0:
            return to
        stream = self.current_stream()
        time = stream.tick()
        if isinstance(to, CudaTensor):
            self._touch(to.memory, to.held, "a copy from the host", write=True)
            asynchronous = non_blocking and self.pinned.holds(source)
            if asynchronous:
                self.pinned.goes(stream.number, time, source)
            to.held.copy_(source)
        else:
            assert isinstance(source, CudaTensor)
            self._touch(source.memory, source.held, "a copy to the host", write=False)
            asynchronous = non_blocking and self.pinned.holds(to)
            if asynchronous:
                self.pinned.comes(stream.number, time, to, source.held.to(to.dtype, copy=True))
            else:
                to.copy_(source.held)
        if not asynchronous:
            self.wait(Counter(stream.clock), "a copy")
        return to


def _roles(func: Any, args: Any, kwargs: Any) -> list[tuple[CudaTensor, bool]]:
    """Which of our tensors an operator reads, and which it writes; what it only makes a view of it does neither."""
    roles = []
    for index, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or alias.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            roles += [(x, alias is not None) for x in pytree.tree_leaves(value) if isinstance(x, CudaTensor)]
    return roles
