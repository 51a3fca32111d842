"""Merges attention over parts of the keys, which several ranks store, into attention over all keys.

    out[t, h] = sum_s weight[s, t, h] * parts[s, t, h] / sum_s weight[s, t, h]
    weight[s, t, h] = exp(lse[s, t, h] - max_s lse[s, t, h])

`pack_parts` puts a rank's results for the heads of all ranks, and their log-sum-exps, into one tensor, so that one
all-to-all exchanges both: [shards, tokens, heads of one rank, dim + 4 / itemsize]. The last elements of a row are the
bytes of its float32 log-sum-exp. Parts are added in the order of the ranks, so a result has the same bits in any batch.

The log-sum-exp is -inf for a query over no keys. If no rank has keys, the result is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from coatcheck.kernels.launch_check import FLOATS, check_dense, check_dtype, check_shape


def pack_parts(out: Tensor, lse: Tensor, shards: int) -> Tensor:
    """out [tokens, shards * heads, dim], lse [tokens, shards * heads] -> [shards, tokens, heads, dim + 4 /
    itemsize]."""
    check_shape("out", out, (None, None, None))
    check_dtype("out", out, *FLOATS)
    check_dense("lse", lse, tuple(out.shape[:2]), torch.float32, out.device)
    rows = torch.cat((out, lse.unsqueeze(-1).view(out.dtype)), dim=-1)
    of_ranks: Tensor = rows.unflatten(1, (shards, -1)).transpose(0, 1)
    return of_ranks.contiguous()


def merge_parts_of_ranks(packed: Tensor) -> Tensor:
    """[shards, tokens, heads, dim + 4 / itemsize], the result of the all-to-all -> [tokens, heads, dim]."""
    width = 4 // packed.itemsize
    dim = packed.shape[-1] - width
    lse = packed[..., dim:].contiguous().view(torch.float32).squeeze(-1)
    top = lse.amax(0)
    weights = (lse - top.masked_fill(top.isinf(), 0.0)).exp()
    total = torch.zeros_like(top)
    merged = torch.zeros((*packed.shape[1:-1], dim), dtype=torch.float32, device=packed.device)
    for part, weight in zip(packed[..., :dim], weights, strict=True):
        merged += part.float() * weight.unsqueeze(-1)
        total += weight
    return (merged / total.masked_fill(total == 0, 1.0).unsqueeze(-1)).to(packed.dtype)
