"""Communicator: what the ranks of one group say to each other.

Tensors travel over torch.distributed, NCCL between GPUs and gloo between CPU processes; plain ints over gloo, since
they are read on the host. Ranks that share a host use its memory in gloo's place, also beside NCCL. A group of one
never initialises torch.distributed. The module does not know what is sent, nor how the ranks found their address.
"""

from __future__ import annotations  # array[int] is a type only for checkers before Python 3.12

import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from coatcheck.workers.core.errors import PeerLost
from coatcheck.workers.distributed.shm_collectives import ShmCollectives

# What ranks tell each other as they look for shared memory.
_WORDS_BYTES = 512
# A step's plan nearly always fits here, so that one collective carries it: length first, then the ints.
_HEAD_INTS = 2048


class Communicator:
    """One rank's end. The default is a group of one, whose collectives are the identity."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._ints: dist.ProcessGroup | None = None
        self._shared: ShmCollectives | None = None
        self._in_order = False
        self._over_host = False
        self._meeting = timedelta()

    @property
    def transport(self) -> str:
        """How tensors travel, in a word or two for a log line."""
        if self.size == 1:
            return "none"
        backend = str(dist.get_backend())
        if self._shared is None:
            means = backend
        else:
            means = "shared memory" if backend == "gloo" else f"{backend}, plans through shared memory"
        return f"{means}, over host memory" if self._over_host else means

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold the collectives of tensors."""
        return self.size == 1 or (not self._over_host and dist.get_backend() == "nccl")

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        address: str,
        *,
        device: torch.device,
        timeout_seconds: float = 60.0,
        meeting_seconds: float = 300.0,
        listener: socket.socket | None = None,
        share_memory: bool = True,
        in_order: bool = False,
        over_host: bool = False,
    ) -> Self:
        """Meets the other ranks at rank 0's `address` (host:port). A collective that outlasts the timeout raises: ranks
        compute alike, so that one is never late by more than a layer. Only here and in `meet` do they wait for long.

        `listener`: a socket that rank 0 has already bound to that address, so that nobody else can take the port.
        `in_order`: sums run over ranks in order whatever the size, as those through shared memory always do; NCCL and
        gloo choose an order by size. `share_memory`: false keeps to gloo even where memory could be shared.
        `over_host`: GPU tensors go through host memory, for ranks that share one GPU, which NCCL does not take.
        """
        self = cls(rank, size)
        if size == 1:
            return self
        self._in_order = in_order
        self._over_host = over_host and device.type == "cuda"
        on_gpu = device.type == "cuda" and not over_host
        self._meeting = timedelta(seconds=meeting_seconds)
        timeout = timedelta(seconds=timeout_seconds)
        host, _, port = address.rpartition(":")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.TCPStore(  # type: ignore[attr-defined]  # public, but missing from the module's __all__
                host,
                int(port),
                size,
                is_master=rank == 0,
                timeout=self._meeting,
                master_listen_fd=listener.detach() if listener else None,
            ),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
        self._ints = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD
        if share_memory:
            self._shared = ShmCollectives.meet(rank, size, self._exchange, timeout_seconds=timeout_seconds)
        return self

    def meet(self) -> None:
        """Waits for all ranks after something that may take one much longer than another, such as loading."""
        if self._ints is not None:
            dist.monitored_barrier(self._ints, timeout=self._meeting)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, written into `x` and returned."""
        if self._over_host and x.device.type != "cpu":
            return x.copy_(self.all_reduce(x.cpu()))
        if self._shared is not None and self._shared.takes(x):
            self._shared.all_reduce(x)
        elif self._in_order:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            with _speaking():
                dist.all_gather(parts, x)
            x.copy_(sum((part.float() for part in parts[1:]), parts[0].float()))
        elif self.size > 1:
            with _speaking():
                dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x` (equal shapes), side by side along `dim` in rank order."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if self._over_host and x.device.type != "cpu":
            return self.all_gather(x.cpu(), dim).to(x.device)
        if self._shared is not None and x.device.type == "cpu":
            return torch.cat(self._shared.all_gather(x).unbind(0), dim=dim)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with _speaking():
            dist.all_gather(parts, x)
        return torch.cat(parts, dim=dim)

    def broadcast_ints(self, values: array[int] | None) -> array[int]:
        """Rank 0's int32 `values` on every rank; the others pass None."""
        if self._ints is None:
            assert values is not None
            return values
        head = torch.zeros(_HEAD_INTS, dtype=torch.int32)
        body = torch.zeros(0, dtype=torch.int32)
        if self.rank == 0:
            assert values is not None and values.itemsize == 4
            body = torch.frombuffer(values, dtype=torch.int32) if values else body
            head[0] = len(body)
            head[1 : 1 + len(body)] = body[: _HEAD_INTS - 1]
        self._broadcast(head)
        length = int(head[0])
        if length > _HEAD_INTS - 1:
            rest = body[_HEAD_INTS - 1 :].clone() if self.rank == 0 else head.new_empty(length - _HEAD_INTS + 1)
            self._broadcast(rest)
            head = torch.cat((head, rest))
        if self.rank == 0:
            assert values is not None
            return values
        return array("i", head[1 : 1 + length].numpy().tobytes())

    def least(self, values: list[int]) -> list[int]:
        """Of each value the least of all ranks'; every rank gives as many."""
        if self._ints is None:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._shared is not None:
            tensor = self._shared.all_gather(tensor).amin(0)
        else:
            with _speaking():
                dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._ints)
        least: list[int] = tensor.tolist()
        return least

    def _broadcast(self, x: Tensor) -> None:
        if self._shared is not None:
            self._shared.broadcast(x)
        else:
            with _speaking():
                dist.broadcast(x, src=0, group=self._ints)

    def _exchange(self, words: bytes) -> list[bytes]:
        assert len(words) <= _WORDS_BYTES, "words are few"
        mine = torch.frombuffer(bytearray(words.ljust(_WORDS_BYTES)), dtype=torch.uint8)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everybody, mine, group=self._ints)
        return [bytes(said.numpy()).rstrip() for said in everybody]

    def close(self) -> None:
        """Leaves the group; the object is of no use afterwards."""
        self._shared = None
        if self._ints is not None:
            self._ints = None
            dist.destroy_process_group()


@contextmanager
def _speaking() -> Iterator[None]:
    """What torch.distributed raises for a lost peer becomes PeerLost. An error of the device that only comes to light
    here has a class of its own, and stays what it is."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            raise PeerLost(str(error)) from error
        raise
