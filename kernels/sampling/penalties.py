"""Repetition, presence and frequency penalties and logit biases, in place.

    if token in prompt or output:  logit = logit / repetition  where logit > 0,  logit * repetition  otherwise
    logit -= frequency * (times in output) + presence * (in output ? 1 : 0)

Shapes: logits float32 [R, V]; token_ids int32 [R, L], each row's prompt then output then padding; prompt_lens,
total_lens int32 [R], with 0 <= prompt_lens <= total_lens <= L; repetition, presence, frequency float32 [R] (1, 0 and 0
are off). Repetition counts prompt and output, as in transformers and vLLM; the other two count the output only.

On a GPU one program takes a part of one row's tokens, in two passes. The first counts each token in a table of the size
of the vocabulary. The second takes each token's count out of the table by an atomic exchange; of equal tokens, the
one that gets the count changes the logit. No program reads the whole table.
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
from coatcheck.kernels.launch_check import check_dense, check_device, check_dtype, check_logits, check_rows, check_shape


@triton.jit(do_not_specialize=["prompt_lens", "total_lens", "ids_stride"])
def _count_tokens(counts, token_ids, prompt_lens, total_lens, ids_stride, vocab, BLOCK: tl.constexpr):
    """Add 1 for each token of the prompt and 2^16 for each of the output."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(total_lens + row)
    ids = tl.load(token_ids + row * ids_stride + at, inside, other=-1)
    one = tl.where(at >= tl.load(prompt_lens + row), 65536, 1)
    tl.atomic_add(counts + row * vocab + ids, one, inside & (ids >= 0) & (ids < vocab), sem="relaxed")


@triton.jit(do_not_specialize=["total_lens", "repetition", "presence", "frequency", "ids_stride"])
def _penalise(
    logits, counts, token_ids, total_lens, repetition, presence, frequency, stride, ids_stride, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(total_lens + row)
    ids = tl.load(token_ids + row * ids_stride + at, inside, other=-1)
    inside = inside & (ids >= 0) & (ids < vocab)
    # Only one of equal tokens gets the count. The others get 0.
    count = tl.atomic_xchg(counts + row * vocab + ids, tl.zeros([BLOCK], tl.int32), inside, sem="relaxed")
    inside = inside & (count > 0)
    times = (count >> 16).to(tl.float32)
    factor = tl.load(repetition + row)
    x = tl.load(logits + row * stride + ids, inside, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor) - tl.load(frequency + row) * times
    tl.store(logits + row * stride + ids, tl.where(times > 0, x - tl.load(presence + row), x), inside)


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Return `logits`, changed in place."""
    check_logits(logits)
    rows, vocab = logits.shape
    check_shape("token_ids", token_ids, (rows, None))
    check_dtype("token_ids", token_ids, torch.int32)
    check_rows("token_ids", token_ids)
    check_device("token_ids", token_ids, logits.device)
    for name, tensor, dtype in (
        ("prompt_lens", prompt_lens, torch.int32),
        ("total_lens", total_lens, torch.int32),
        ("repetition", repetition, torch.float32),
        ("presence", presence, torch.float32),
        ("frequency", frequency, torch.float32),
    ):
        check_dense(name, tensor, (rows,), dtype, logits.device)
    if uses_triton(logits):
        if token_ids.numel():
            counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
            grid = (rows, -(-token_ids.shape[1] // 1024))
            _count_tokens[grid](
                counts, token_ids, prompt_lens, total_lens, token_ids.stride(0), vocab, BLOCK=1024, num_warps=4
            )
            _penalise[grid](
                logits, counts, token_ids, total_lens, repetition, presence, frequency,
                logits.stride(0), token_ids.stride(0), vocab, BLOCK=1024, num_warps=4,
            )  # fmt: skip
        return logits
    library = native.library_for(logits)
    if library is None:
        return apply_penalties_reference(logits, token_ids, prompt_lens, total_lens, repetition, presence, frequency)
    if library.penalties(
        logits.data_ptr(), logits.stride(0), rows, vocab, token_ids.data_ptr(), token_ids.stride(0),
        prompt_lens.data_ptr(), total_lens.data_ptr(), repetition.data_ptr(), presence.data_ptr(), frequency.data_ptr(),
    ):  # fmt: skip
        raise native.out_of_memory("apply_penalties")
    return logits


def apply_penalties_reference(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    at = torch.arange(token_ids.shape[1], device=logits.device)[None]
    seen = at < total_lens[:, None]
    generated = seen & (at >= prompt_lens[:, None])
    # Padding counts for token 0 with weight 0, because it may hold ids outside the vocabulary.
    index = token_ids.masked_fill(~seen, 0).long()
    appears = torch.zeros_like(logits).scatter_add_(1, index, seen.float()) > 0
    count = torch.zeros_like(logits).scatter_add_(1, index, generated.float())
    factor = repetition[:, None].expand_as(logits)
    logits.copy_(torch.where(appears, torch.where(logits > 0, logits / factor, logits * factor), logits))
    logits -= frequency[:, None] * count
    logits -= presence[:, None] * (count > 0)
    return logits


def add_logit_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> Tensor:
    """logits[rows[i], token_ids[i]] += bias[i], in place; -inf forbids a token. Returns `logits`.

    Shapes: rows, token_ids int64 [n], bias float32 [n]. The biases of a repeated (row, token) pair add up.
    """
    check_logits(logits)
    check_dense("rows", rows, (None,), torch.int64, logits.device)
    check_dense("token_ids", token_ids, (len(rows),), torch.int64, logits.device)
    check_dense("bias", bias, (len(rows),), torch.float32, logits.device)
    return logits.index_put_((rows, token_ids), bias, accumulate=True)
