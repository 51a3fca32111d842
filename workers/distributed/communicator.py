"""Communicator: the collectives between the ranks of one tensor-parallel group.

    tensors   torch.distributed: NCCL between GPUs, gloo between CPU processes
              all-reduces between the GPUs of one host: memory that the ranks have mapped (symmetric_memory.py)
    ints      gloo, also in a group with NCCL, because the ranks read them on the host

Ranks on one host use shared memory in place of gloo (shm_collectives.py). A group of one rank never initialises
torch.distributed, and its collectives return their input.
"""

from __future__ import annotations  # array[int] is a type only for checkers before Python 3.12

import json
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from coatcheck.kernels.peer_memory import PeerMemory
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.host_port import bare_host
from coatcheck.workers.core.runner_protocol import PeerLost
from coatcheck.workers.distributed.shm_collectives import ShmCollectives
from coatcheck.workers.distributed.symmetric_memory import SymmetricMemory

# torch 2.13 has renamed all_gather_into_tensor to all_gather_single.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_JSON_BYTES = 512  # the size of one rank's value in `all_gather_json`
# int32s of the first broadcast: the number of values, then the values. A step plan rarely needs a second broadcast.
_HEAD_INTS = 2048


class Communicator:
    """One rank of a group. The default is a group of one rank.

    Every rank makes the same calls in the same order. A collective raises PeerLost if another rank has ended or is late
    by more than the timeout.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size
        self._gloo: dist.ProcessGroup | None = None
        self._shared: ShmCollectives | None = None
        self._symmetric: SymmetricMemory | None = None
        self._sum_in_rank_order = False
        self._startup_timeout = timedelta()

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        rendezvous: str | Store,
        *,
        device: torch.device,
        timeout_seconds: float = 60.0,
        startup_timeout_seconds: float = 300.0,
        share_memory: bool = True,
        sum_in_rank_order: bool = False,
    ) -> Self:
        """Connect to the other ranks.

        `rendezvous`: rank 0's address (host:port), or a store of `connect_store`.
        `timeout_seconds`: of a collective. Ranks compute the same layers, so they wait for each other only briefly.
        `startup_timeout_seconds`: of `join` and `barrier`.
        `share_memory`: if False, use gloo even between the ranks of one host.
        `sum_in_rank_order`: `all_reduce` adds the ranks in order, for --deterministic. Otherwise NCCL and gloo choose
        the order by the size of the tensor. Shared memory always adds in rank order.
        Raises InvalidConfig if NCCL cannot start.
        """
        self = cls(rank, size)
        if size == 1:
            return self
        self._sum_in_rank_order = sum_in_rank_order
        self._startup_timeout = timedelta(seconds=startup_timeout_seconds)
        use_nccl = device.type == "cuda"
        timeout = timedelta(seconds=timeout_seconds)
        if isinstance(rendezvous, str):
            rendezvous = connect_store(rank, size, rendezvous, timeout_seconds=startup_timeout_seconds)
        try:
            dist.init_process_group(
                "nccl" if use_nccl else "gloo",
                store=rendezvous,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if use_nccl else None,
            )
        except dist.DistBackendError as error:
            raise InvalidConfig(describe_nccl_failure(error, device)) from error
        self._gloo = dist.new_group(backend="gloo", timeout=timeout) if use_nccl else dist.group.WORLD
        if share_memory:
            self._shared = ShmCollectives.connect(rank, size, self.all_gather_json, timeout_seconds=timeout_seconds)
        if use_nccl:
            self.map_peer_memory(device)
        return self

    def map_peer_memory(self, device: torch.device) -> None:
        """Use peer memory for all-reduces on `device` if all ranks can map it. Every rank calls this at once."""
        self._symmetric = SymmetricMemory.connect(
            self.rank, self.size, device, self.all_gather_json, self.barrier, in_rank_order=self._sum_in_rank_order
        )

    @property
    def uses_shared_memory(self) -> bool:
        """Whether the ranks exchange plans, and tensors on CPUs, through shared memory."""
        return self._shared is not None

    @property
    def supports_cuda_graphs(self) -> bool:
        """Whether a CUDA graph can capture `all_reduce` and `all_gather`."""
        return self.size == 1 or dist.get_backend() == "nccl"

    def barrier(self) -> None:
        """Wait for all ranks, up to the startup timeout. For work that takes some ranks longer, such as loading."""
        if self._gloo is not None:
            dist.monitored_barrier(self._gloo, timeout=self._startup_timeout)

    def peer_memory_for(self, x: Tensor) -> PeerMemory | None:
        """The peer memory for all_reduce_add_norm, if that is better for `x` than `all_reduce` and then a norm; else
        None."""
        return self._symmetric.peers if self._symmetric is not None and self._symmetric.fuses_norm(x) else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Write the sum over ranks into `x`, and return it."""
        if self._shared is not None and self._shared.can_reduce(x):
            self._shared.all_reduce(x)
        elif self._symmetric is not None and self._symmetric.all_reduce(x):
            pass
        elif self._sum_in_rank_order:
            parts = [torch.empty_like(x) for _ in range(self.size)]
            with _raise_peer_lost():
                dist.all_gather(parts, x)
            x.copy_(sum((part.float() for part in parts[1:]), parts[0].float()))
        elif self.size > 1:
            with _raise_peer_lost():
                dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's `x` (equal shapes), concatenated along `dim` in rank order."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if self._shared is not None and x.device.type == "cpu":
            return torch.cat(self._shared.all_gather(x).unbind(0), dim=dim)
        parts = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        with _raise_peer_lost():
            _gather_into(parts, x)
        return torch.cat(parts.chunk(self.size), dim=dim)

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...] -> [size, ...]: element j of the result is element `rank` of rank j's x."""
        if self.size == 1:
            return x
        x = x.contiguous()
        if self._shared is not None and x.device.type == "cpu":
            return self._shared.all_gather(x)[:, self.rank]
        out = torch.empty_like(x)
        with _raise_peer_lost():
            dist.all_to_all_single(out, x)
        return out

    def broadcast_ints(self, values: array[int] | None) -> array[int]:
        """Return rank 0's int32 `values` on every rank. The other ranks pass None."""
        if self._gloo is None:
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

    def _broadcast(self, x: Tensor) -> None:
        if self._shared is not None:
            self._shared.broadcast(x)
        else:
            with _raise_peer_lost():
                dist.broadcast(x, src=0, group=self._gloo)

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """The element-wise minimum over ranks. Every rank passes a list of the same length."""
        if self._gloo is None:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        if self._shared is not None:
            tensor = self._shared.all_gather(tensor).amin(0)
        else:
            with _raise_peer_lost():
                dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._gloo)
        minimum: list[int] = tensor.tolist()
        return minimum

    def all_gather_json(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `value`, at most _JSON_BYTES as JSON, in rank order. For startup, not for steps.

        JSON and not torch's all_gather_object, which would unpickle what another host sends.
        """
        if self._gloo is None:
            return [value]
        encoded = json.dumps(value).encode().ljust(_JSON_BYTES)
        assert len(encoded) == _JSON_BYTES, f"{value} is too long"
        mine = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with _raise_peer_lost():
            dist.all_gather(everyone, mine, group=self._gloo)
        return [json.loads(bytes(theirs.numpy())) for theirs in everyone]

    def close(self) -> None:
        """Leave the group. No collective may follow."""
        self._shared = self._symmetric = None
        if self._gloo is not None:
            self._gloo = None
            dist.destroy_process_group()


def connect_store(
    rank: int, size: int, address: str, *, timeout_seconds: float, listener: socket.socket | None = None
) -> Store:
    """A store that all ranks share, at rank 0's `address` (host:port).

    `listener`: rank 0's socket, already bound to `address`, so that no other process can take the port.
    """
    host, _, port = address.rpartition(":")
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but missing from the module's __all__
        bare_host(host),
        int(port),
        size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach() if listener else None,
    )


def describe_nccl_failure(error: Exception, device: torch.device) -> str:
    """One line on why NCCL did not start, and what to change. NCCL's reason is the last line of its error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (
        f"NCCL could not start on {device}: {lines[-1]}; give every rank a GPU of its own, check that the ranks reach "
        "each other on NCCL_SOCKET_IFNAME, and set NCCL_DEBUG=INFO for details"
    )


@contextmanager
def _raise_peer_lost() -> Iterator[None]:
    """Turn torch.distributed's errors into PeerLost. A CUDA error has another class, and is raised as it is."""
    try:
        yield
    except RuntimeError as error:
        if type(error) is RuntimeError or isinstance(error, dist.DistError):
            raise PeerLost(str(error)) from error
        raise
