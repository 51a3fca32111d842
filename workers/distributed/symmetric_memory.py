"""SymmetricMemory: all-reduces between the GPUs of one host through memory that all ranks have mapped.

A decode step of a model with 80 layers has 160 all-reduces of small tensors. Their time in NCCL is mostly latency. Here
each rank has one buffer of torch.distributed._symmetric_memory. torch's kernels (torch.ops.symm_mem) add the contents
of the buffers; kernels/layers/all_reduce_norm.py adds and normalises in one kernel. all_reduce_choice.py chooses the
kernel. CUDA graphs can capture all of these kernels: the buffer lives as long as this object, and `Rank` frees the
graphs first.

torch's kernels compute bfloat16 and float32. NCCL computes other dtypes. If the buffers cannot be mapped, NCCL computes
everything, and `connect` logs one line that says why.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symm_mem

from coatcheck.kernels.peer_memory import MAX_PROGRAMS, PeerMemory, signal_bytes
from coatcheck.workers.distributed.all_reduce_choice import BUFFER_BYTES, AllReduce, Links, choose_all_reduce
from coatcheck.workers.distributed.shm_collectives import AllGather, host_id

_log = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
_SIGNALS_ALIGNMENT = 256
_REASON_CHARACTERS = 200  # so that a reason fits in all_gather_json


class SymmetricMemory:
    """One rank's endpoint. Every rank makes the same calls in the same order, with the same shapes and dtypes.

    `links`, `in_rank_order`: see choose_all_reduce.
    """

    def __init__(self, data: Tensor, peers: PeerMemory, group: str, links: Links, *, in_rank_order: bool) -> None:
        """`data`: uint8 [BUFFER_BYTES] of this rank's buffer. `group`: the process group's name."""
        self.peers = peers
        self.links = links
        self._data = data
        self._group = group
        self._in_rank_order = in_rank_order

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        all_gather: AllGather,
        barrier: Callable[[], None],
        *,
        in_rank_order: bool,
    ) -> Self | None:
        """Allocate and map the ranks' buffers. Returns None on every rank if one of them cannot, and rank 0 logs why.

        `all_gather(value)` returns every rank's value, in rank order.
        """
        mine = {"host": host_id(), "gpu": device.index or 0, "reason": find_obstacle(device)}
        ranks = all_gather(mine)
        buffer = memory = None
        reason = ""
        try:
            reason = common_obstacle(ranks)
            if not reason:
                buffer = symm_mem.empty(_signals_end(size) + BUFFER_BYTES, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            reason = _first_line(error)
        # The rendezvous waits for every rank. So no rank enters it before all know that each has a buffer.
        reason = _first_reason(reason, all_gather)
        if buffer is not None and not reason:
            try:
                gpus = [each["gpu"] for each in ranks]
                memory = cls._map(rank, size, buffer, gpus, in_rank_order=in_rank_order)
            except RuntimeError as error:
                reason = _first_line(error)
            reason = _first_reason(reason, all_gather)
            barrier()  # no rank signals before all have cleared their signals
        if reason:
            if rank == 0:
                _log.warning("all-reduces use NCCL alone, which is slower for small tensors: %s", reason)
            return None
        assert memory is not None
        if rank == 0:
            _log.info("all-reduces of up to %d MiB use peer memory: %s", BUFFER_BYTES >> 20, memory.links)
        return memory

    @classmethod
    def _map(cls, rank: int, size: int, buffer: Tensor, gpus: Sequence[int], *, in_rank_order: bool) -> Self:
        """Map the buffers of all ranks. Raises RuntimeError for what torch or CUDA refuse."""
        assert dist.group.WORLD is not None
        group, device, start = dist.group.WORLD.group_name, buffer.device, _signals_end(size)
        handle = symm_mem.rendezvous(buffer, group)
        buffer[:start].zero_()
        # The buffer may begin after the start of the mapped allocation.
        offset = buffer.data_ptr() - handle.buffer_ptrs[rank]
        mapped = [address + offset for address in handle.buffer_ptrs]
        peers = PeerMemory(
            rank,
            size,
            BUFFER_BYTES,
            torch.tensor([address + start for address in mapped], device=device),
            torch.tensor(mapped, device=device),
            torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device),
        )
        torch.cuda.synchronize(device)
        links = Links(has_nvlink(gpus), bool(handle.multicast_ptr))
        return cls(buffer[start:], peers, group, links, in_rank_order=in_rank_order)

    def choose(self, x: Tensor) -> AllReduce:
        """The kernel with which `all_reduce` adds `x`. NCCL: `all_reduce` leaves `x` to NCCL."""
        row_bytes = x.shape[-1] * x.itemsize if x.dim() else x.itemsize
        if (
            x.dtype not in _DTYPES
            or not x.is_contiguous()
            or row_bytes % 4
            or x.storage_offset() * x.itemsize % _ALIGNMENT
        ):
            return AllReduce.NCCL
        return choose_all_reduce(x.nbytes, self.peers.size, self.links, in_rank_order=self._in_rank_order)

    def all_reduce(self, x: Tensor) -> bool:
        """Write the sum over ranks into `x`. Returns False, and changes nothing, if `choose` returns NCCL."""
        if (how := self.choose(x)) is AllReduce.NCCL:
            return False
        for part in x.view(-1).split(BUFFER_BYTES // x.itemsize):
            self._all_reduce(part, how)
        return True

    def fuses_norm(self, x: Tensor) -> bool:
        """Whether all_reduce_add_norm with `peers` is the best all-reduce for `x`.

        Never with `in_rank_order`: for larger tensors the norm is a kernel of its own, which may sum a row in another
        order, so a token's bits would depend on the number of tokens.
        """
        return not self._in_rank_order and x.dim() == 2 and self.choose(x) is AllReduce.ONE_SHOT

    def _all_reduce(self, x: Tensor, how: AllReduce) -> None:
        """`x`: contiguous [n], at most BUFFER_BYTES."""
        symmetric = self._data[: x.nbytes].view(x.dtype)
        if how is AllReduce.ONE_SHOT:  # the kernel copies x into the buffer, and the sum back
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(symmetric, x, "sum", self._group, x)
            return
        symmetric.copy_(x)
        if how is AllReduce.TWO_SHOT:
            torch.ops.symm_mem.two_shot_all_reduce_out(symmetric, "sum", self._group, x)
        else:
            torch.ops.symm_mem.multimem_all_reduce_(symmetric, "sum", self._group)
            x.copy_(symmetric)


def _signals_end(ranks: int) -> int:
    """The byte offset at which data begin in a buffer, after the signals of `ranks` ranks."""
    return -(-signal_bytes(ranks) // _SIGNALS_ALIGNMENT) * _SIGNALS_ALIGNMENT


def _first_line(error: Exception) -> str:
    """The first line of `error`, short enough for all_gather_json. Never "", which would mean that nothing failed."""
    return str(error).partition("\n")[0][:_REASON_CHARACTERS] or type(error).__name__


def _first_reason(reason: str, all_gather: AllGather) -> str:
    """The reason of the first rank that has one; "" if none has."""
    reasons: list[str] = [each["reason"] for each in all_gather({"reason": reason})]
    return next(filter(None, reasons), "")


def find_obstacle(device: torch.device) -> str:
    """Why this rank cannot map its peers' memory; "" if it may be able to."""
    if torch.version.hip is not None:
        return "peer memory was built for NVIDIA GPUs alone"
    if symm_mem.get_backend(device) is None:
        return (
            f"torch {torch.__version__} has no symmetric memory for {device.type}; install torch for CUDA 12.3 or later"
        )
    return ""


def common_obstacle(ranks: Sequence[dict[str, Any]]) -> str:
    """Why the ranks of a group cannot map each other's memory; "" if they may be able to.

    `ranks`: for each rank {"host": its host_id, "gpu": the index of its GPU on the host, "reason": the result of
    `find_obstacle` there}.
    """
    if reason := next((each["reason"] for each in ranks if each["reason"]), ""):
        return str(reason)
    hosts = {each["host"] for each in ranks}
    if len(hosts) > 1:
        return f"the {len(ranks)} ranks are on {len(hosts)} hosts; place a group on one host, or lower --tp"
    gpus = sorted({each["gpu"] for each in ranks})
    for first in gpus:
        for second in gpus:
            if first != second and not torch.cuda.can_device_access_peer(first, second):
                return f"GPU {first} cannot map the memory of GPU {second}; `nvidia-smi topo -p2p r` shows which can"
    return ""


def has_nvlink(gpus: Sequence[int]) -> bool:
    """Whether NVLink connects every two of these GPUs of this host. False if the driver does not tell."""
    try:
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _detect_dma_connectivity  # type: ignore[attr-defined]

        matrix = _detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
        return all(matrix[first][second] for first in gpus for second in gpus if first != second)
    except (ImportError, RuntimeError, IndexError):
        return False
