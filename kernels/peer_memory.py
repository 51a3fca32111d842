"""PeerMemory: a buffer of each rank of a host, mapped so that the kernels of every rank can read and write all of them.

`meet_peers` is a barrier between the ranks inside a kernel. Program p of a rank waits for program p of every other
rank:

    epoch = epochs[p] + 1
    for each peer: the peer's signals[p, own rank] = epoch          (release: earlier writes of the program are visible)
    wait until own signals[p, peer] >= epoch for each peer          (acquire)

Epochs only grow, so nothing has to be reset, and a CUDA graph can repeat the kernel. An epoch wraps around after 2^31
calls; only differences of epochs are compared, so that does not matter.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

# All programs of a kernel with `meet_peers` must run at the same time, on every GPU.
MAX_PROGRAMS = 32


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The buffers of all ranks, as the kernels of one rank read them.

    `nbytes`: of each rank's buffer.
    `buffers`: int64 [size], the address of each rank's buffer in this process; aligned to 16 bytes.
    `signals`: int64 [size], the address of each rank's signals, int32 [MAX_PROGRAMS, size], initially 0.
    `epochs`: int32 [MAX_PROGRAMS], of this rank, initially 0.
    """

    rank: int
    size: int
    nbytes: int
    buffers: Tensor
    signals: Tensor
    epochs: Tensor


def signal_bytes(size: int) -> int:
    """Bytes of one rank's signals in a group of `size` ranks."""
    return 4 * MAX_PROGRAMS * size


@triton.jit
def meet_peers(signals, epochs, rank, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Wait for the same program of every other rank. PADDED: SIZE, rounded up to a power of two."""
    program = tl.program_id(0)
    peer = tl.arange(0, PADDED)
    is_peer = peer < SIZE
    epoch = tl.load(epochs + program) + 1
    tl.debug_barrier()  # the stores of all threads precede the signals
    theirs = tl.load(signals + peer, is_peer, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(
        theirs + program * SIZE + rank, tl.zeros([PADDED], tl.int32) + epoch, is_peer, sem="release", scope="sys"
    )
    mine = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + program * SIZE + peer
    nothing = tl.zeros([PADDED], tl.int32)
    behind = tl.full([], -1, tl.int32)
    while behind < 0:
        seen = tl.atomic_add(mine, nothing, is_peer, sem="acquire", scope="sys")
        behind = tl.min(tl.where(is_peer, seen - epoch, 0), 0)
    tl.store(epochs + program, epoch)
    tl.debug_barrier()  # no thread reads what the peers wrote before all of them have signalled
