"""Which all-reduce the ranks of one host use for a tensor: a pure function of its size, the ranks and their links.

    one-shot    each rank reads the whole tensor of every rank, and adds. One exchange of signals, (N - 1) x bytes read
    two-shot    each rank adds 1/N of the tensor, and writes the sum to every rank. 2 (N - 1) / N x bytes moved
    multimem    as two-shot, but the NVLink switch adds and copies (multicast memory, sm_90 and later)
    NCCL        in all other cases

One-shot and two-shot add in the order of ranks, with one rounding for each addition. So they give the same bits, and a
token's sum does not depend on its batch. NCCL and the switch choose the order by the size of the tensor.

The limits are those that vLLM publishes for NVLink systems. They have not been measured here.
"""

from enum import StrEnum
from typing import NamedTuple

# Bytes of each rank's buffer: 512 tokens of a model with hidden size 8,192 in bfloat16.
BUFFER_BYTES = 1 << 23
_MIN_MULTIMEM_RANKS = 4
_TWO_SHOT_RANKS = (2, 4, 8)  # group sizes of torch's two_shot_all_reduce_out


class AllReduce(StrEnum):
    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    MULTIMEM = "multimem"
    NCCL = "NCCL"


class Links(NamedTuple):
    """`has_nvlink`: every two GPUs of the group are connected by NVLink, directly or by a switch. `has_multicast`: the
    NVLink switch has multicast memory."""

    has_nvlink: bool
    has_multicast: bool


def choose_all_reduce(nbytes: int, ranks: int, links: Links, *, in_rank_order: bool) -> AllReduce:
    """The all-reduce for a tensor of `nbytes`.

    `in_rank_order`: choose one-shot or two-shot, which add the ranks in order. The caller divides a tensor that is
    larger than BUFFER_BYTES into slices.
    """
    fits_one_shot = nbytes <= one_shot_bytes(ranks)
    if in_rank_order:
        return AllReduce.ONE_SHOT if fits_one_shot or ranks not in _TWO_SHOT_RANKS else AllReduce.TWO_SHOT
    if nbytes > BUFFER_BYTES or (ranks > 2 and not links.has_nvlink):
        return AllReduce.NCCL  # over PCIe every rank would read each byte N - 1 times through one root
    if fits_one_shot:
        return AllReduce.ONE_SHOT
    if links.has_multicast and ranks >= _MIN_MULTIMEM_RANKS:
        return AllReduce.MULTIMEM
    return AllReduce.TWO_SHOT if ranks in _TWO_SHOT_RANKS else AllReduce.NCCL


def one_shot_bytes(ranks: int) -> int:
    """The size in bytes up to which one-shot beats two-shot: the second exchange of signals takes longer than reading
    N - 1 whole tensors."""
    if ranks <= 2:
        return 1 << 20
    return 1 << 19 if ranks <= 4 else 1 << 18
