"""Causal attention over a paged KV cache: prefills, chunks and decodes in one batch.

    out[i] = softmax(mask(cap(scale * q[i] @ K^T))) @ V

where K and V are the sequence's keys and values found through its block table, cap(x) = softcap * tanh(x / softcap)
where softcap > 0, and query i of a sequence with q_len tokens in this step sits at position p = seq_len - q_len + i and
sees keys at positions p - sliding_window < j <= p (all j <= p where sliding_window is 0). With sinks[head] the
denominator gains exp(sinks[head]).

Shapes: q, out [num_tokens, num_heads, head_dim] (q's stride over tokens is free, out is dense); k_cache, v_cache
[num_blocks, num_kv_heads, block_size, head_dim], inner three dense, blocks anywhere in the pool; block_tables int32
[num_seqs, max_blocks]; seq_lens int32 [num_seqs], this step's tokens included; cu_seqlens_q int32 [num_seqs + 1];
sinks [num_heads] float32. Rows of out past cu_seqlens_q[-1] are left as they were.

A sequence's result never depends on its neighbours: splits over the sequence have a fixed size and are combined in
order. The file does not know what a request is, nor which layer calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import native
from .launch_check import (
    FLOATS,
    refuse,
    want_cache,
    want_contiguous,
    want_device,
    want_dtype,
    want_heads,
    want_rows,
    want_shape,
)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    check_attention(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, sliding_window, softcap, sinks, out)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    library = native.library()
    if library is None or q.device.type != "cpu" or q.dtype not in native.TYPES or q.shape[2] % 16 or q.shape[2] > 256:
        paged_attention_reference(
            q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, scale, sliding_window, softcap, sinks, out
        )
        return out
    _, kv_heads, block_size, dim = k_cache.shape
    call = native.ATTENTION.pack(
        q.data_ptr(), q.stride(0), k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), v_cache.stride(0),
        block_tables.data_ptr(), block_tables.stride(0), seq_lens.data_ptr(), cu_seqlens_q.data_ptr(),
        seq_lens.shape[0], q.shape[1], kv_heads, dim, block_size, scale, softcap, sliding_window,
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    if library.attention[q.dtype](call):
        raise native.out_of_memory("paged_attention")
    return out


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor | None,
) -> None:
    if q.dim() != 3:
        refuse("q", "shape [num_tokens, num_heads, head_dim]", list(q.shape))
    want_dtype("q", q, *FLOATS)
    want_heads("q", q)
    want_cache("k_cache", k_cache)
    want_cache("v_cache", v_cache)
    want_shape("k_cache", k_cache, (None, None, None, q.shape[2]))
    want_shape("v_cache", v_cache, tuple(k_cache.shape))
    want_dtype("k_cache", k_cache, q.dtype)
    want_dtype("v_cache", v_cache, q.dtype)
    if k_cache.shape[1] == 0 or q.shape[1] % k_cache.shape[1]:
        refuse("q", f"a multiple of k_cache's {k_cache.shape[1]} heads", q.shape[1])
    want_shape("block_tables", block_tables, (None, None))
    num_seqs = block_tables.shape[0]
    want_rows("block_tables", block_tables)
    want_shape("seq_lens", seq_lens, (num_seqs,))
    want_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,))
    for name, index in (("block_tables", block_tables), ("seq_lens", seq_lens), ("cu_seqlens_q", cu_seqlens_q)):
        want_dtype(name, index, torch.int32)
        want_device(name, index, q.device)
    want_contiguous("seq_lens", seq_lens)
    want_contiguous("cu_seqlens_q", cu_seqlens_q)
    want_device("k_cache", k_cache, q.device)
    want_device("v_cache", v_cache, q.device)
    if sliding_window < 0:
        refuse("sliding_window", "0 (off) or a positive number of keys", sliding_window)
    if not softcap >= 0.0:
        refuse("softcap", "0 (off) or a positive cap", softcap)
    if sinks is not None:
        want_shape("sinks", sinks, (q.shape[1],))
        want_dtype("sinks", sinks, torch.float32)
        want_contiguous("sinks", sinks)
        want_device("sinks", sinks, q.device)
    if out is not None:
        want_shape("out", out, tuple(q.shape))
        want_dtype("out", out, q.dtype)
        want_contiguous("out", out)
        want_device("out", out, q.device)


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """One sequence after the other, all in float32: slow, plain, and what every other path is tested against."""
    block_size, groups = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    starts = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[row], starts[row + 1]
        if first == last:
            continue
        blocks = block_tables[row, : -(-seq_len // block_size)].long()
        keys, values = (
            cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].float().repeat_interleave(groups, dim=0)
            for cache in (k_cache, v_cache)
        )
        scores = scale * (q[first:last].float().transpose(0, 1) @ keys.transpose(1, 2))  # [heads, q_len, seq_len]
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(seq_len - (last - first), seq_len, device=q.device)[:, None]
        key_position = torch.arange(seq_len, device=q.device)[None]
        hidden = key_position > position
        if sliding_window > 0:
            hidden |= key_position <= position - sliding_window
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, last - first, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :seq_len]
        out[first:last] = (weights @ values).transpose(0, 1).to(q.dtype)
