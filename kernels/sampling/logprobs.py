"""Log-probabilities of chosen tokens and of the k most likely ones.

    lse = log(sum(exp(logits)));  chosen = logits[token] - lse;  rank = how many logits are >= logits[token]

Shapes: logits float32 [R, V], token_ids int64 [R]; returns (chosen float32 [R], rank int64 [R] counting from 1,
top_ids int64 [R, k], top_logprobs float32 [R, k]). The top k are in descending order, equal ones by ascending token id.

On a GPU one program sums a row, in a fixed order. torch is not used, because its order depends on the number of rows.
"""

# Triton device functions take pointers and constexprs, which mypy cannot type.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import uses_triton
from coatcheck.kernels.launch_check import check_dense, check_logits, refuse

# The C kernel inserts each token into a sorted list of k. With k = 128,256 and ascending logits it takes 6.6 s, torch's
# topk 0.1 s.
_MAX_INSERTED = 4096
_SLICE_ROWS = 32  # 32 rows of 128,000 logits take 130 MB of temporaries


@triton.jit(do_not_specialize=["token_ids", "normalisers", "chosen", "ranks"])
def _logprobs(logits, token_ids, normalisers, chosen, ranks, stride, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    picked = tl.load(row + tl.load(token_ids + index))
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(row + ids, ids < vocab, other=float("-inf"))
        tops = tl.maximum(tops, x)
        above += ((x >= picked) & (ids < vocab)).to(tl.int32)
    top = tl.max(tops, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        sums += tl.exp(tl.load(row + ids, ids < vocab, other=float("-inf")) - top)
    normaliser = top + tl.log(tl.sum(sums, 0))
    tl.store(normalisers + index, normaliser)
    tl.store(chosen + index, picked - normaliser)
    tl.store(ranks + index, tl.sum(above, 0).to(tl.int64))


def launch_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(lse float32 [R], chosen, rank) on a GPU."""
    rows, vocab = logits.shape
    normaliser, chosen = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    rank = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _logprobs[(rows,)](
            logits, token_ids, normaliser, chosen, rank, logits.stride(0), vocab, BLOCK=4096, num_warps=8
        )  # fmt: skip
    return normaliser, chosen, rank


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(chosen, rank, top_ids, top_logprobs). Raises LaunchRefused."""
    check_logits(logits)
    check_dense("token_ids", token_ids, (logits.shape[0],), torch.int64, logits.device)
    if not 0 <= k <= logits.shape[1]:
        refuse("k", f"0 to {logits.shape[1]}, the vocabulary", k)
    if uses_triton(logits):
        normaliser, chosen, rank = launch_logprobs(logits, token_ids)
        return chosen, rank, *_most_likely(logits, normaliser[:, None], k)
    library = native.library_for(logits)
    if library is None or k > _MAX_INSERTED:
        return logprobs_reference(logits, token_ids, k)
    rows, vocab = logits.shape
    chosen, rank = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    ids, values = torch.empty((rows, k), dtype=torch.int64), torch.empty((rows, k))
    library.logprobs(
        logits.data_ptr(), logits.stride(0), rows, vocab, token_ids.data_ptr(), k, chosen.data_ptr(), rank.data_ptr(),
        ids.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    return chosen, rank, ids, values


def all_logprobs(logits: Tensor) -> Tensor:
    """The log-probability of every token, float32 [R, V]. `logits` does not change."""
    check_logits(logits)
    if not uses_triton(logits):
        return logits.log_softmax(-1)
    first = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    return logits - launch_logprobs(logits, first)[0][:, None]


def logprobs_reference(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    picked = logits.gather(1, token_ids[:, None])
    rank = (logits >= picked).sum(dim=-1)
    return (picked - normaliser)[:, 0], rank, *_most_likely(logits, normaliser, k)


def _most_likely(logits: Tensor, normaliser: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) of the k most likely tokens, by torch's topk."""
    if k == 0:
        empty = logits.new_empty((logits.shape[0], 0))
        return empty.long(), empty
    # In slices of rows, because the int64 keys take several times the memory of the logits.
    parts = [
        _most_likely_of_slice(part, norm, k)
        for part, norm in zip(logits.split(_SLICE_ROWS), normaliser.split(_SLICE_ROWS), strict=True)
    ]
    ids, values = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(values)


def _most_likely_of_slice(logits: Tensor, normaliser: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # topk returns equal values in any order. So it gets integer keys, which are never equal: the upper half orders as
    # the logit does, the lower half is larger for a smaller token id. Adding 0 makes -0.0 equal to 0.0.
    bits = (logits + 0.0).view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    keys |= torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = logits.shape[1] - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return ids, logits.gather(1, ids) - normaliser
