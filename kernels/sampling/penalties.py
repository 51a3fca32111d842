"""Repetition, presence and frequency penalties and logit biases, in place.

    if token in prompt or output:  logit = logit / repetition  where logit > 0,  logit * repetition  otherwise
    logit -= frequency * (times in output) + presence * (in output ? 1 : 0)

Shapes: logits float32 [R, V]; token_ids int32 [S, L], a row is a prompt, then its output, then padding; slots int64
[R], the row of token_ids for each row of logits; prompt_lens, total_lens int32 [R], with 0 <= prompt_lens <= total_lens
<= L; repetition, presence, frequency float32 [R] (1, 0 and 0 are off). Repetition looks at prompt and output, as in
transformers and vLLM; the other two look at the output only.

On a GPU _PARTS programs share one row's tokens, in two passes. The first counts each token in a table of the size of
the vocabulary. The second takes each token's count out of the table by an atomic exchange; of equal tokens, the one
that gets the count changes the logit. No program reads the whole table, and none reads a row without penalties. The
grid does not depend on the sequences' lengths, so a CUDA graph can capture both passes.
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


@triton.jit
def _length(total_lens, repetition, presence, frequency, row):
    """The number of tokens of a row; 0 if the row has no penalties."""
    is_off = (tl.load(repetition + row) == 1) & (tl.load(presence + row) == 0) & (tl.load(frequency + row) == 0)
    return tl.where(is_off, 0, tl.load(total_lens + row))


@triton.jit(
    do_not_specialize=[
        "slots", "prompt_lens", "total_lens", "repetition", "presence", "frequency", "ids_stride",
    ]
)  # fmt: skip
def _count_tokens(
    counts, token_ids, slots, prompt_lens, total_lens, repetition, presence, frequency, ids_stride, vocab,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In counts int32 [R, V], set bit 0 for each token of the prompt, and add 2 for each token of the output."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = _length(total_lens, repetition, presence, frequency, row)
    own, prompt_len = token_ids + tl.load(slots + row) * ids_stride, tl.load(prompt_lens + row)
    for first in range(part * BLOCK, length, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        ids = tl.load(own + at, at < length, other=-1)
        own_count, inside = counts + row * vocab + ids, (ids >= 0) & (ids < vocab)
        tl.atomic_or(own_count, tl.full([BLOCK], 1, tl.int32), inside & (at < prompt_len), sem="relaxed")
        tl.atomic_add(own_count, tl.full([BLOCK], 2, tl.int32), inside & (at >= prompt_len), sem="relaxed")


@triton.jit(do_not_specialize=["slots", "total_lens", "repetition", "presence", "frequency", "ids_stride"])
def _penalise(
    logits, counts, token_ids, slots, total_lens, repetition, presence, frequency, stride, ids_stride, vocab,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = _length(total_lens, repetition, presence, frequency, row)
    own = token_ids + tl.load(slots + row) * ids_stride
    factor, per_time, once = tl.load(repetition + row), tl.load(frequency + row), tl.load(presence + row)
    for first in range(part * BLOCK, length, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        ids = tl.load(own + at, at < length, other=-1)
        inside = (ids >= 0) & (ids < vocab)
        # Only one of equal tokens gets the count. The others get 0.
        count = tl.atomic_xchg(counts + row * vocab + ids, tl.zeros([BLOCK], tl.int32), inside, sem="relaxed")
        inside = inside & (count > 0)
        times = (count >> 1).to(tl.float32)
        x = tl.load(logits + row * stride + ids, inside, other=0.0)
        x = tl.where(x > 0, x / factor, x * factor) - per_time * times
        tl.store(logits + row * stride + ids, tl.where(times > 0, x - once, x), inside)


_PARTS = 8  # programs that share a row
_BLOCK = 1024


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Change `logits` in place and return it. Raises LaunchRefused, and MemoryError if the C library finds no
    memory."""
    check_logits(logits)
    rows, vocab = logits.shape
    check_shape("token_ids", token_ids, (None, None))
    check_dtype("token_ids", token_ids, torch.int32)
    check_rows("token_ids", token_ids)
    check_device("token_ids", token_ids, logits.device)
    check_dense("slots", slots, (rows,), torch.int64, logits.device)
    for name, tensor, dtype in (
        ("prompt_lens", prompt_lens, torch.int32),
        ("total_lens", total_lens, torch.int32),
        ("repetition", repetition, torch.float32),
        ("presence", presence, torch.float32),
        ("frequency", frequency, torch.float32),
    ):
        check_dense(name, tensor, (rows,), dtype, logits.device)
    if uses_triton(logits):
        if rows and token_ids.numel():
            counts = torch.zeros((rows, vocab), dtype=torch.int32, device=logits.device)
            penalties = (total_lens, repetition, presence, frequency)
            launch = dict(PARTS=_PARTS, BLOCK=_BLOCK, num_warps=4)
            _count_tokens[(rows, _PARTS)](
                counts, token_ids, slots, prompt_lens, *penalties, token_ids.stride(0), vocab, **launch
            )
            _penalise[(rows, _PARTS)](
                logits, counts, token_ids, slots, *penalties, logits.stride(0), token_ids.stride(0), vocab, **launch
            )
        return logits
    library = native.library_for(logits)
    if library is None:
        return apply_penalties_reference(
            logits, token_ids, slots, prompt_lens, total_lens, repetition, presence, frequency
        )
    history = token_ids[:, : int(total_lens.max()) if rows else 0][slots]
    if library.penalties(
        logits.data_ptr(), logits.stride(0), rows, vocab, history.data_ptr(), history.stride(0),
        prompt_lens.data_ptr(), total_lens.data_ptr(), repetition.data_ptr(), presence.data_ptr(), frequency.data_ptr(),
    ):  # fmt: skip
        raise native.out_of_memory("apply_penalties")
    return logits


def apply_penalties_reference(
    logits: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    prompt_lens: Tensor,
    total_lens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    token_ids = token_ids[slots]
    at = torch.arange(token_ids.shape[1], device=logits.device)[None]
    seen = at < total_lens[:, None]
    generated = seen & (at >= prompt_lens[:, None])
    # Padding may hold ids outside the vocabulary. So it is counted as token 0, with weight 0.
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

    Shapes: rows, token_ids int64 [n], bias float32 [n]. The biases of a repeated (row, token) pair are added. Raises
    LaunchRefused.
    """
    check_logits(logits)
    check_dense("rows", rows, (None,), torch.int64, logits.device)
    check_dense("token_ids", token_ids, (len(rows),), torch.int64, logits.device)
    check_dense("bias", bias, (len(rows),), torch.float32, logits.device)
    return logits.index_put_((rows, token_ids), bias, accumulate=True)
