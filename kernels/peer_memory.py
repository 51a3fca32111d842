"""PeerMemory: one buffer of each rank of a host, mapped so that a kernel of any rank reads and writes all of them.

`meet_peers` is the barrier between the ranks inside a kernel. Program p of a rank meets program p of every other rank:

    epoch = epochs[p] + 1
    signals of each peer [p, own rank] = epoch           (release: what the program wrote before is visible with it)
    wait until own signals [p, peer] >= epoch for all    (acquire)

Epochs only grow, so nothing has to be reset, and a CUDA graph may repeat the kernel. They wrap around after 2^31 calls,
which the comparison of differences allows.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

# All programs of a kernel that meets its peers must run at once, on every GPU.
MAX_PROGRAMS = 32


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The buffers as one rank's kernels take them.

    `nbytes`: of each rank's buffer.
    `buffers`: int64 [size], the address of each rank's buffer in this process; 16 bytes aligned.
    `signals`: int64 [size], the address of each rank's signals, int32 [MAX_PROGRAMS, size], 0 at the start.
    `epochs`: int32 [MAX_PROGRAMS] of this rank alone, 0 at the start.
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
    """Wait for this program on every other rank. PADDED: SIZE, rounded up to a power of two."""
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
