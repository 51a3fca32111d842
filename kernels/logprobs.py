"""Log-probabilities of chosen tokens and of the k most likely ones.

    lse = log(sum(exp(logits)));  chosen = logits[token] - lse;  rank = how many logits are >= logits[token]

Shapes: logits float32 [R, V], token_ids int64 [R]; returns (chosen float32 [R], rank int64 [R] counting from 1,
top_ids int64 [R, k], top_logprobs float32 [R, k]), the top k in falling order, equal ones by rising token id. The
file does not know whether the logits were penalised first: it reports what it is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .launch_check import refuse, want_contiguous, want_device, want_dtype, want_rows, want_shape


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_shape("logits", logits, (None, None))
    want_dtype("logits", logits, torch.float32)
    want_rows("logits", logits)
    want_shape("token_ids", token_ids, (logits.shape[0],))
    want_dtype("token_ids", token_ids, torch.int64)
    want_contiguous("token_ids", token_ids)
    want_device("token_ids", token_ids, logits.device)
    if not 0 <= k <= logits.shape[1]:
        refuse("k", f"0 to {logits.shape[1]}, the vocabulary", k)
    library = native.library()
    if library is None or logits.device.type != "cpu":
        return logprobs_reference(logits, token_ids, k)
    rows, vocab = logits.shape
    chosen, rank = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
    ids, values = torch.empty((rows, k), dtype=torch.int64), torch.empty((rows, k))
    library.logprobs(
        logits.data_ptr(), logits.stride(0), rows, vocab, token_ids.data_ptr(), k, chosen.data_ptr(), rank.data_ptr(),
        ids.data_ptr(), values.data_ptr(),
    )  # fmt: skip
    return chosen, rank, ids, values


def logprobs_reference(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    picked = logits.gather(1, token_ids[:, None])
    rank = (logits >= picked).sum(dim=-1)
    if k == 0:
        empty = logits.new_empty((logits.shape[0], 0))
        return (picked - normaliser)[:, 0], rank, empty.long(), empty
    # topk promises no order of equals: ids are the low half of what it compares, so that there are none. Adding 0 makes
    # -0.0 equal to 0.0.
    bits = (logits + 0.0).view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    keys |= torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = logits.shape[1] - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return (picked - normaliser)[:, 0], rank, ids, logits.gather(1, ids) - normaliser
