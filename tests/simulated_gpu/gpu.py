"""SimulatedGpu: runs torch's CPU operators under a GPU's rules for streams, to find missing synchronisation.

Every operator is computed at once, so results are those of a CPU. A Hazard is raised for what a GPU would not wait for:

- two streams use the same memory, one of them writes, and neither waits for the other (memory.py);
- the host reads pinned memory before it waited for the copy to it: until then it holds garbage;
- the host changes pinned memory before it waited for the copy from it;
- a graph uses memory that was freed since its capture (graph.py). A replay repeats the captured numbers.

`waits` lists what the host waited for. `kernels` counts Triton's kernels by name, also those in a graph. `launches`
counts what the host launched: operators, kernels, copies and replays of graphs. Not simulated: speed, Triton's
compiler, and memory that is freed and reused while another stream still uses it.
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
from tests.simulated_gpu.memory import CaptureError, Clock, Memory
from tests.simulated_gpu.pinned import Pinned
from tests.simulated_gpu.streams import Stream
from tests.simulated_gpu.tensors import CudaTensor

aten = torch.ops.aten
# Operators for whose result the host waits, and operators that take indices on either device.
_SYNCHRONISING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::item"}
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put"}
_PINNING = {"aten::pin_memory", "aten::_pin_memory"}


class SimulatedGpu:
    """The one device of a process.

    `streams_wait`, `host_waits`: false makes waits between streams, or of the host, do nothing, as if the program had
    forgotten them.
    """

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = Counter()  # up to which point of each stream the host knows that work is done
        self.waits: list[str] = []
        self.kernels: Counter[str] = Counter()  # how often each Triton kernel ran
        self.launches: Counter[str] = Counter()  # by "operator", "kernel", "copy" or "replay"
        self.streams_wait = self.host_waits = True
        self.capturing: Graph | None = None
        self.watched: list[Memory] = []
        self.pinned = Pinned()
        self.lock = threading.RLock()
        self.total_bytes = 1 << 29
        self._allocated = self._reserved = self._graph_bytes = 0
        self._local = threading.local()

    def watch(self, pool: Tensor) -> None:
        """Check `pool` per 16 bytes. Reads of block 0 are exempt: kernels read it for positions beyond a sequence."""
        assert isinstance(pool, CudaTensor)
        pool.memory.watch(pool.nbytes // len(pool))
        self.watched.append(pool.memory)

    # Memory, as torch's caching allocator has it: what was allocated at the peak stays reserved

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return self.total_bytes - self._reserved - self._graph_bytes, self.total_bytes

    def empty_cache(self) -> None:
        self._reserved = self._allocated

    def _count_allocation(self, memory: Memory) -> None:
        if self.capturing is not None:  # graphs share one pool of memory
            self._graph_bytes = max(self._graph_bytes, self.capturing.nbytes)
            return
        self._allocated += memory.nbytes
        self._reserved = max(self._reserved, self._allocated)
        weakref.finalize(memory, self._count_free, memory.nbytes)

    def _count_free(self, nbytes: int) -> None:
        self._allocated -= nbytes

    # Streams and the host

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
        """The host waits until `clock`. `why` is for `waits`."""
        with self.lock:
            if self.capturing is not None:
                raise CaptureError(f"the host waits ({why}) while a graph is captured")
            self.waits.append(why)
            self.host |= clock
            self.pinned.finish_copies(self.host)

    def wait_for_all(self, device: object = None) -> None:
        self.wait(Counter({stream.number: stream.clock[stream.number] for stream in self.streams}), "everything")

    # Operators

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of torch, with the rules above if one of its tensors or its device is the GPU's."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            name, device = func.name().partition(".")[0], kwargs.get("device")
            if name in _PINNING:
                return self.pinned.pin(args[0].clone())
            if kwargs.get("pin_memory"):
                return self.pinned.pin(func(*args, **{**kwargs, "pin_memory": False}))
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
                self._check_operands(name, flat, ours, device)
                return self._compute(func, args, kwargs, ours)
            return func(*args, **kwargs)

    def _check_operands(self, name: str, flat: list[Any], ours: list[CudaTensor], device: torch.device | None) -> None:
        """Record a wait of the host for a result. Raise RuntimeError for tensors on different devices."""
        is_grouped = name == "aten::_grouped_mm" and flat[0].dtype != torch.bfloat16  # CUDA then loops on the host
        if is_grouped or name in _SYNCHRONISING or any(x.dtype == torch.bool for x in ours[1:] if name in _INDEXING):
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
        if self.capturing is None:
            self.launches["operator"] += bool(made or changes)
        elif made or changes:  # otherwise it only made views
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
        if self.capturing is None:  # a captured operator runs when the graph is replayed
            self.current_stream().tick()
            for x, write in roles:
                self._touch(x.memory, x.held, name, write=write)

    def _touch(self, memory: Memory, held: Tensor, name: str, *, write: bool) -> None:
        stream = self.current_stream()
        memory.touch(stream.number, stream.clock, write=write, what=name, places=memory.places_of(held))

    def _wrapped(self, held: Tensor, ours: Sequence[CudaTensor], made: list[Tensor]) -> CudaTensor:
        """`held` as a CudaTensor: the argument itself if the operator returned it; a view shares memory."""
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
            self.capturing.add_allocation(memory, held)
        self._count_allocation(memory)
        return CudaTensor(held, memory)

    # Copies between host and device

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
            raise CaptureError("a copy between host and device while a graph is captured")
        if source.numel() == 0:
            return to
        self.launches["copy"] += 1
        stream = self.current_stream()
        time = stream.tick()
        if isinstance(to, CudaTensor):
            self._touch(to.memory, to.held, "a copy from the host", write=True)
            asynchronous = non_blocking and self.pinned.is_pinned(source)
            if asynchronous:
                self.pinned.start_upload(stream.number, time, source)
            to.held.copy_(source)
        else:
            assert isinstance(source, CudaTensor)
            self._touch(source.memory, source.held, "a copy to the host", write=False)
            asynchronous = non_blocking and self.pinned.is_pinned(to)
            if asynchronous:
                self.pinned.start_download(stream.number, time, to, source.held.to(to.dtype, copy=True))
            else:
                to.copy_(source.held)
        if not asynchronous:
            self.wait(Counter(stream.clock), "a copy")
        return to


def _roles(func: Any, args: Any, kwargs: Any) -> list[tuple[CudaTensor, bool]]:
    """(tensor, whether the operator writes it) of the operator's CudaTensors, without those it only makes a view of."""
    roles = []
    for index, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is None or alias.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            roles += [(x, alias is not None) for x in pytree.tree_leaves(value) if isinstance(x, CudaTensor)]
    return roles
