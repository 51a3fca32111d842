"""The kernel that ranks compute together, in Triton's interpreter, one process for each rank."""

import os
import sys
import traceback

import torch
from torch import Tensor

from coatcheck.kernels.layers.all_reduce_norm import (
    all_reduce_add_norm,
    all_reduce_add_norm_and_quantise,
    all_reduce_add_norm_reference,
)
from coatcheck.kernels.layers.quantised_rows import RowFormat, quantise_rows
from coatcheck.kernels.layers.quantised_weight import CodeKind
from coatcheck.kernels.layers.rms_norm import RmsNorm
from coatcheck.kernels.peer_memory import MAX_PROGRAMS, PeerMemory, signal_bytes
from tests.kernels.triton.agreement import agree
from tests.kernels.triton.linear_checks import same_codes

_SIZE = 3
# (tokens, hidden): one program, several, and programs with more than one row.
_SHAPES = ((1, 40), (3, 64), (MAX_PROGRAMS + 5, 24))


def ranks() -> None:
    """Three ranks, in float32 and float16, get the sum in rank order, normed; in several calls through one buffer. The
    codes of the norm are those that a kernel behind would write.

    Later epochs and reused buffers must not mix up the calls.
    """
    buffers = torch.zeros(_SIZE, 1 << 14, dtype=torch.uint8).share_memory_()
    signals = torch.zeros(_SIZE, signal_bytes(_SIZE), dtype=torch.uint8).share_memory_()
    children = [_fork(rank, buffers, signals) for rank in range(_SIZE)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * _SIZE, codes


def _fork(rank: int, buffers: Tensor, signals: Tensor) -> int:
    """The process of a rank. A fork needs no second import of torch and Triton."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    try:
        data, mailboxes = (torch.tensor([part.data_ptr() for part in each]) for each in (buffers, signals))
        epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int32)
        _compute(rank, PeerMemory(rank, _SIZE, buffers.shape[1], data, mailboxes, epochs))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _compute(rank: int, peers: PeerMemory) -> None:
    for number, (tokens, hidden) in enumerate(_SHAPES * 2):
        torch.manual_seed(number)
        dtype = (torch.float32, torch.float16)[number % 2]
        parts = [torch.randn(tokens, hidden).to(dtype) for _ in range(_SIZE)]
        residual = torch.randn(tokens, hidden).to(dtype)
        norm = RmsNorm(torch.randn(hidden).to(dtype), 1e-6, float(number % 2))
        have = all_reduce_add_norm(parts[rank], residual, norm, peers)
        for ours, theirs in zip(have, all_reduce_add_norm_reference(parts, residual, norm), strict=True):
            agree(ours, theirs)
        for format in (RowFormat(CodeKind.FP8, 0), RowFormat(CodeKind.INT8, 32)):
            for keeps_plain in (False, True):
                rows, total = all_reduce_add_norm_and_quantise(
                    parts[rank], residual, norm, peers, format, keeps_plain=keeps_plain
                )
                same_codes(rows, quantise_rows(have[0], format))
                assert torch.equal(total, have[1]) and (rows.plain is not None) == keeps_plain
                assert rows.plain is None or torch.equal(rows.plain, have[0])
